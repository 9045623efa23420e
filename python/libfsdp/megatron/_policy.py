"""The dtypes of parameters, gradients and communication in Megatron-FSDP's options."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import TYPE_CHECKING, Any

import torch

from libfsdp._core.precision import MixedPrecisionPolicy as ComputePolicy
from libfsdp._core.sharding_options import make_options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from libfsdp._core.sharding_options import ShardingOptions

_BY_NAME = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp64": torch.float64,
    "float64": torch.float64,
    "auto": None,
}
_SUPPORTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_told_of_low_gradients = False


def dtype_of(name: str, value: Any) -> torch.dtype | None:
    """Returns the dtype that an option states: a dtype, its short name ("fp32", "bf16", "fp16"), or None, for which "auto" stands, too.

    Raises:
        ValueError: for other values, and for dtypes in which gradients can't be added up.
    """
    dtype = _BY_NAME.get(value, value) if isinstance(value, str) else value
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype in _SUPPORTED):
        return dtype
    names = ", ".join(str(one) for one in _SUPPORTED)
    raise ValueError(f"{name} is {value!r}: give one of {names}, a short name as 'bf16', or None ('auto')")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes beside that of the computation, which is the one of each parameter.

    Peer: ``megatron_fsdp.MixedPrecisionPolicy``.

    Attributes:
        main_params_dtype: the dtype of the weights that the optimizer updates and checkpoints contain. None: each parameter's own.
        main_grads_dtype: the dtype of their gradients, in which several backwards add up. None: each parameter's own.
        grad_comm_dtype: the dtype in which gradients are sent; sums are always computed in fp32. None: ``main_grads_dtype``.
        preserve_fp32_weights: deprecated: True is ``main_params_dtype=torch.float32``, False is None.
        grad_reduce_in_fp32: deprecated: True is torch.float32 for main gradients and for what travels, False is None for both.

    Raises:
        ValueError: for dtypes other than those of 16, 32 and 64 bits with fractions, and deprecated options beside new ones.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    _: KW_ONLY
    preserve_fp32_weights: InitVar[bool | None] = None
    grad_reduce_in_fp32: InitVar[bool | None] = None

    def __post_init__(self, preserve_fp32_weights: bool | None, grad_reduce_in_fp32: bool | None) -> None:
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype"):
            self._set(name, dtype_of(name, getattr(self, name)))
        if preserve_fp32_weights is not None:
            _deprecate("preserve_fp32_weights", "main_params_dtype=torch.float32, or None")
            self._set("main_params_dtype", torch.float32 if preserve_fp32_weights else None)
        if grad_reduce_in_fp32 is not None:
            _deprecate(
                "grad_reduce_in_fp32", "main_grads_dtype=torch.float32 and grad_comm_dtype=torch.float32, or None"
            )
            if self.main_grads_dtype is not None or self.grad_comm_dtype is not None:
                raise ValueError(
                    "grad_reduce_in_fp32 says the dtype of gradients, and so do main_grads_dtype and grad_comm_dtype: leave it out"
                )
            dtype = torch.float32 if grad_reduce_in_fp32 else None
            self._set("main_grads_dtype", dtype)
            self._set("grad_comm_dtype", dtype)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are sent; None: each parameter's own."""
        return self.grad_comm_dtype or self.main_grads_dtype

    def sharding_options(self, **others: Any) -> ShardingOptions:
        """Returns the options of libfsdp.fully_shard with these dtypes, and others that are given by their names there."""
        return make_options(
            mp_policy=ComputePolicy(reduce_dtype=self.reduce_dtype, cast_forward_inputs=False),
            main_params_dtype=self.main_params_dtype,
            main_grads_dtype=self.main_grads_dtype or "own",
            **others,
        )

    def _set(self, name: str, value: torch.dtype | None) -> None:
        object.__setattr__(self, name, value)

    def warn_of_low_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Warns once per process if gradients of these parameters add up in fewer bits than those of fp32."""
        global _told_of_low_gradients
        trained = {p.dtype for p in parameters if p.requires_grad and p.is_floating_point()}
        dtypes = {self.main_grads_dtype} if self.main_grads_dtype is not None else trained
        low = sorted(str(dtype) for dtype in dtypes if dtype.itemsize < torch.float32.itemsize)
        if low and not _told_of_low_gradients:
            _told_of_low_gradients = True
            warnings.warn(
                f"main gradients add up in {', '.join(low)}; main_grads_dtype=torch.float32 keeps the digits of many small ones",
                stacklevel=2,
            )


def _deprecate(name: str, instead: str) -> None:
    warnings.warn(f"MixedPrecisionPolicy: {name} is deprecated: give {instead}", DeprecationWarning, stacklevel=4)
