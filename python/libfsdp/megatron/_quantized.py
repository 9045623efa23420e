"""Parameters that TransformerEngine has quantized (``quantized_model_init``): main weights as shards, quantized ones to compute with.

They are known by TransformerEngine's protocol alone: ``parameter._quantizer``, its ``update_quantized`` and ``set_usage``,
``get_high_precision_init_val``, and the names of what such tensors have inside. Nothing of it is imported.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from libfsdp import _C
from libfsdp._core.quantized_form import QUANTIZED
from libfsdp.megatron._scaling import scale_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from libfsdp._core.state import ShardState
    from libfsdp.megatron._config import ShardingStrategy

_ROWWISE = ("_data", "_rowwise_data")
_COLUMNWISE = ("_transpose", "_transpose_invalid", "_columnwise_data", "_columnwise_scale_inv")
_REMAKES = ("_create_transpose", "_create_columnwise")


def is_quantized(parameter: torch.Tensor) -> bool:
    """True if TransformerEngine has quantized the parameter."""
    return hasattr(parameter, "_quantizer")


class TransformerEngineForm:
    """How one parameter is quantized after each gather.

    Each rank quantizes its rows, and eight bits per element are sent, if scales belong to blocks of rows that are not cut between ranks, or
    if there is one scale that all ranks can know (see ``_scaling``). Otherwise the main weights are sent in the dtype that
    TransformerEngine states for the parameter (``parameter.dtype``), and each rank quantizes the whole. Either way, the result has the
    values that one rank alone would compute.

    The transposed copy, which backward computes with on some devices, is made when a unit is gathered for backward, and goes after
    forward and with the unit. With ``keeps_transposed`` it is made for forward, and stays.
    """

    def __init__(self, name: str, parameter: nn.Parameter, *, keeps_transposed: bool) -> None:
        """Takes the parameter's quantizer.

        Raises:
            ValueError: if it is trained, and its values from before it was quantized are not available.
        """
        if parameter.requires_grad and not hasattr(parameter, "get_high_precision_init_val"):
            raise ValueError(
                f"parameter '{name}' is quantized, and the values of its main weights are lost: build the module within "
                "quantized_model_init(preserve_high_precision_init_val=True)"
            )
        self._given: Any = parameter
        self._quantizer: Any = parameter._quantizer
        self._keeps_transposed = keeps_transposed
        self._scale = scale_of(self._quantizer)
        # By the number of rows: the parts of a quantized tensor that are sent; () if ranks can't quantize this many rows separately.
        self._by_rows: dict[int, tuple[str, ...]] = {}
        self._travels: tuple[str, ...] = ()  # the parts of the rows that were quantized last

    def high_precision(self) -> torch.Tensor:
        """Returns the values from before they were quantized; for a parameter that is not trained, the quantized ones."""
        given, self._given = self._given, None
        if not hasattr(given, "get_high_precision_init_val"):
            return given.detach().dequantize()
        values = given.get_high_precision_init_val().detach()
        given.clear_high_precision_init_val()
        return values

    def make(self, values: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the tensor for the computation, and those of its parts that are freed between uses: the quantized values. Scales stay."""
        whole = self._quantizer(values)
        names = (*_ROWWISE, *(() if _remakes_transposed(whole) else ("_columnwise_data",)))
        freed = [getattr(whole, name) for name in names if isinstance(getattr(whole, name, None), torch.Tensor)]
        self._arrange_transposed(whole)
        return whole, freed

    def fill(self, values: torch.Tensor, whole: torch.Tensor) -> None:
        """Quantizes, in place."""
        if not _remakes_transposed(whole):
            self._quantizer.update_quantized(values, whole)
            return
        kept = {}
        if self._keeps_transposed and _C.inside_backward():  # The values are the same as in forward.
            kept = {name: getattr(whole, name) for name in _COLUMNWISE if hasattr(whole, name)}
        with self._without_transposed():
            self._quantizer.update_quantized(values, whole)
        for name, value in kept.items():
            setattr(whole, name, value)
        if not kept:
            self._arrange_transposed(whole)

    def renew(self, rows: torch.Tensor, shape: torch.Size, whole: torch.Tensor | None) -> torch.Tensor | None:
        """See QuantizedForm."""
        # TransformerEngine's modules may have given their tensor another quantizer.
        self._quantizer = getattr(whole, "_quantizer", self._quantizer)
        if self._scale is None or not self._parts_by_rows(rows, shape):
            return None
        return self._scale.renew(self._quantizer, rows, trained=whole is None or whole.requires_grad)

    def set_largest(self, largest: torch.Tensor) -> None:
        """See QuantizedForm."""
        assert self._scale is not None
        self._scale.set_largest(largest)

    def encode(self, rows: torch.Tensor, shape: torch.Size) -> list[torch.Tensor] | None:
        """See QuantizedForm."""
        self._travels = self._parts_by_rows(rows, shape)
        if not self._travels:
            return None
        if self._scale is not None:
            piece = self._scale.quantize(rows)
            return [*(getattr(piece, name)[: rows.size(0)] for name in self._travels), *self._scale.beside()]
        with self._without_transposed():
            piece = self._quantizer(rows)
        return [getattr(piece, name) for name in self._travels]

    def decode(self, name: str, arrived: list[torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """See QuantizedForm."""
        assert self._travels
        with self._without_transposed():
            whole: torch.Tensor = self._quantizer.make_empty(shape, dtype=dtype, device=arrived[0].device)
        for part, rows in zip(self._travels, arrived, strict=False):
            setattr(whole, part, rows.narrow(0, 0, getattr(whole, part).size(0)))
        self._deliver_scale(name, arrived, whole)
        self._arrange_transposed(whole)
        return whole

    def decoded(self, name: str, arrived: list[torch.Tensor], whole: torch.Tensor) -> None:
        """See QuantizedForm."""
        self._deliver_scale(name, arrived, whole)
        if not (self._keeps_transposed and _C.inside_backward()):
            self._arrange_transposed(whole)

    def _deliver_scale(self, name: str, arrived: list[torch.Tensor], whole: torch.Tensor) -> None:
        if self._scale is not None:
            self._scale.deliver(name, self._quantizer, arrived[len(self._travels) :], whole)

    def _parts_by_rows(self, rows: torch.Tensor, shape: torch.Size) -> tuple[str, ...]:
        """Returns the parts of a quantized tensor that are sent, if ranks can quantize this many rows separately; otherwise none."""
        if rows.size(0) not in self._by_rows:
            self._by_rows[rows.size(0)] = self._find_parts_by_rows(rows, shape)
        return self._by_rows[rows.size(0)]

    def _find_parts_by_rows(self, rows: torch.Tensor, shape: torch.Size) -> tuple[str, ...]:
        """Returns the parts of a quantized tensor, if each of them consists of the ranks' parts one after the other; otherwise none.

        Then a scale belongs to whole rows of one rank, or to a part of a row, or it is the only scale, which is not sent because ranks know
        it. The sizes of tensors without memory tell this.
        """
        if not hasattr(self._quantizer, "make_empty"):
            return ()
        with self._without_transposed():
            of_rank, of_all = (
                self._quantizer.make_empty(size, dtype=rows.dtype, device=torch.device("meta"))
                for size in (rows.shape, shape)
            )
        if not _remakes_transposed(of_all):
            return ()
        names = [name for name, value in vars(of_all).items() if isinstance(value, torch.Tensor)]
        if self._scale is not None:
            if "_scale_inv" not in names or of_all._scale_inv.numel() != 1:
                return ()
            names.remove("_scale_inv")
        for name in names:
            one, whole = getattr(of_rank, name), getattr(of_all, name)
            if one.ndim == 0 or one.shape[1:] != whole.shape[1:] or one.size(0) == 0 or rows.size(0) % one.size(0) != 0:
                return ()
            block = rows.size(0) // one.size(0)
            if whole.size(0) != -(-shape[0] // block):
                return ()
        return tuple(names)

    @contextmanager
    def _without_transposed(self) -> Iterator[None]:
        columnwise = self._quantizer.columnwise_usage
        self._quantizer.set_usage(columnwise=False)
        try:
            yield
        finally:
            self._quantizer.set_usage(columnwise=columnwise)

    def freed(self, whole: torch.Tensor | None) -> None:
        """Called when the unit is freed, and after forward, when it may stay gathered; frees the transposed copy."""
        if not self._keeps_transposed:
            discard_transposed(whole)

    def _arrange_transposed(self, whole: Any) -> None:
        if not _remakes_transposed(whole):
            return
        discard_transposed(whole)
        if self._keeps_transposed or _C.inside_backward():
            next(getattr(whole, name) for name in _REMAKES if hasattr(whole, name))()


def _remakes_transposed(whole: torch.Tensor) -> bool:
    """True if the transposed copy can be made from the quantized values. Otherwise it is another quantization of the original values."""
    return any(hasattr(whole, name) for name in _REMAKES)


def discard_transposed(whole: Any) -> None:
    """Frees the transposed copy, if it can be made again."""
    if hasattr(whole, "_transpose_invalid"):
        whole._transpose_invalid = True
        whole._transpose = None
    elif _remakes_transposed(whole):
        whole.update_usage(rowwise_usage=True, columnwise_usage=False)


@dataclass(frozen=True)
class QuantizedOptions:
    """The options of a model that its quantized parameters depend on.

    Attributes:
        strategy: what is sharded.
        main_params_dtype: the dtype of main parameters in the policy.
        keeps_transposed: ``keep_fp8_transpose_cache``.
    """

    strategy: ShardingStrategy
    main_params_dtype: torch.dtype | None
    keeps_transposed: bool

    def mark(self, module: nn.Module) -> None:
        """Marks the quantized parameters of a module for libfsdp.fully_shard, with their forms.

        Raises:
            ValueError: if there are such parameters, and the options or they themselves do not give main weights.
        """
        for name, parameter in module.named_parameters():
            if is_quantized(parameter):
                setattr(parameter, QUANTIZED, self.take_form(name, parameter))

    def take_form(self, name: str, parameter: nn.Parameter) -> TransformerEngineForm:
        """Returns the form of a quantized parameter.

        Raises:
            ValueError: if the options or the parameter do not give main weights.
        """
        if self.main_params_dtype is None:
            raise ValueError(
                f"parameter '{name}' is quantized, and main_params_dtype is None: no optimizer can update it; give "
                "main_params_dtype=torch.float32"
            )
        if self.strategy.placements == "no_shard":
            raise ValueError(
                f"parameter '{name}' is quantized, and the model is sharded 'no_shard': each rank has all main weights, and quantized "
                "ones are made of what is gathered; give zero_dp_strategy 1 ('optim'), 2 or 3"
            )
        return TransformerEngineForm(name, parameter, keeps_transposed=self.keeps_transposed)


def discard_transposed_after_forward(states: Sequence[ShardState]) -> None:
    """Frees transposed copies after forward, also in units that stay gathered."""
    for state in states:
        for parameter in state.parameters:
            form = parameter.quantized
            if not isinstance(form, TransformerEngineForm):
                continue
            for place in parameter.places:
                place.module.register_forward_hook(lambda *_, form=form, parameter=parameter: form.freed(parameter.whole))
