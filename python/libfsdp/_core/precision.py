"""The dtypes of a parameter in computation, and of its gradient while it is sent and when it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy as _TorchPolicy

from libfsdp._core.packed_weights import is_packed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

# torch 2.15 has added two things: the function for single parameters, and reductions that follow grad_dtype.
torch_has_override = any(f.name == "param_dtype_override_fn" for f in fields(_TorchPolicy))


@dataclass(frozen=True)
class MixedPrecisionPolicy(_TorchPolicy):
    """The dtypes of computation and of reductions: torch's policy, with what torch 2.15 adds to it.

    Attributes:
        param_dtype: the dtype in which parameters are gathered and computed with; None: their own.
        reduce_dtype: the dtype in which gradients are sent; None: that of the computation, and from torch 2.15 on, as in its FSDP2,
            their parameter's ``grad_dtype``, which is the parameter's own dtype unless it was set.
        output_dtype: the dtype to which a module's floating-point outputs are cast.
        cast_forward_inputs: whether its floating-point inputs are cast to ``param_dtype``.
        param_dtype_override_fn: called once for each parameter, in fully_shard. It returns the parameter's own dtype to compute in that
            dtype, and ``param_dtype`` or None for no exception. Inputs are cast to ``param_dtype`` nevertheless. The result must be the
            same on all ranks.
    """

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)


def keeps_dtype(policy: _TorchPolicy, parameter: nn.Parameter) -> bool:
    """True if modules compute with the parameter in its own dtype: it is packed, or the policy's function returns that dtype.

    Raises:
        ValueError: if the function returns anything else than None, the policy's dtype, or the parameter's.
    """
    if is_packed(parameter):
        return True
    override = getattr(policy, "param_dtype_override_fn", None)
    given = override(parameter) if override is not None else None
    if given is None:
        return False
    if not isinstance(given, torch.dtype):
        raise ValueError(f"param_dtype_override_fn must return a torch.dtype or None but got {type(given)}")
    if given not in (policy.param_dtype, parameter.dtype):
        raise ValueError(
            "param_dtype_override_fn must return None, param_dtype, or the parameter's original dtype but got "
            f"{given} for a parameter with dtype {parameter.dtype} and param_dtype {policy.param_dtype}"
        )
    return given != policy.param_dtype


def follows(follow: bool | None) -> bool:
    """True if gradients are sent in the ``grad_dtype`` of their parameter; None does the same as FSDP2 of the installed torch."""
    return torch_has_override if follow is None else follow


def followed_grad_dtype(parameter: nn.Parameter, follow: bool | None) -> torch.dtype | None:
    """Returns the dtype that the user has set for the parameter's gradient; None if none is set, or if it is not to be followed."""
    if not follows(follow):
        return None
    dtype = getattr(parameter, "grad_dtype", parameter.dtype)
    return None if dtype == parameter.dtype else dtype
