"""Weights whose elements are codes, as bitsandbytes' four-bit weights are. What they mean is in their ``quant_state``."""

from __future__ import annotations

from typing import Any

import torch


def is_packed(parameter: torch.Tensor) -> bool:
    """True if the elements are no numbers, also where their dtype is one of numbers: converted, they would be other codes."""
    return getattr(parameter, "quant_state", None) is not None


def looked_up(parameter: torch.Tensor) -> dict[str, Any]:
    """Returns what torch.distributed's functions for state dicts look up in a packed weight, by name.

    Modules save the tensors of the quant_state under names behind the weight's ("weight.absmax"). The weight's class has a property for
    each of them, but its shard, a DTensor, is not of that class.
    """
    as_dict = getattr(getattr(parameter, "quant_state", None), "as_dict", None)
    return {} if as_dict is None else {name: value for name, value in as_dict().items() if torch.is_tensor(value)}
