"""Weights whose elements are codes, as bitsandbytes' four-bit weights are. Their ``quant_state`` has the meaning of the codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

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


def packed_among(values: Mapping[str, Any]) -> set[str]:
    """Returns the names of packed weights in a ``state_dict(keep_vars=True)``."""
    return {name for name, value in values.items() if isinstance(value, torch.Tensor) and is_packed(value)}


def is_of_packed(name: str, packed: Collection[str]) -> bool:
    """True for packed weights, and for what modules save of their quant_state, under names behind theirs: none of it is converted."""
    return bool(packed) and any(name[:end] in packed for end, c in enumerate(f"{name}.") if c == ".")


class QuantStatePart(NamedTuple):
    """A part of a packed weight's quant_state, as modules save it.

    Attributes:
        weight: the packed weight.
        key: the part's name behind the weight's ("absmax").
        value: what it is now. For the part without tensors, these are the bytes of its JSON.
    """

    weight: torch.Tensor
    key: str
    value: torch.Tensor

    def fault_of(self, values: torch.Tensor) -> str:
        """Returns why these values can't become the part's; empty if they can."""
        if values.dtype != self.value.dtype:
            return f"has the dtype {values.dtype}, and here {self.value.dtype}: it is not converted"
        if self._is_json:
            come, here = _read(values), _read(self.value)
            for name in sorted(come.keys() | here.keys()):
                if name != _OFFSET and come.get(name) != here.get(name):
                    return f"has {name} {come.get(name)}, and here {here.get(name)}: quantize the module alike"
        elif values.shape != self.value.shape:
            return f"is {list(values.shape)}, and here {list(self.value.shape)}"
        return ""

    def fill(self, values: torch.Tensor) -> None:
        """Makes these values the part's."""
        state: Any = self.weight.quant_state
        if self._is_json:
            if state.offset is not None:
                state.offset.fill_(_read(values)[_OFFSET])
            return
        owner, attribute = _ATTRIBUTES[self.key](state)
        if attribute == "code":  # a table that many weights may share
            if not torch.equal(self.value, values.to(self.value.device)):
                setattr(owner, attribute, values.to(self.value.device, copy=True))
        else:
            getattr(owner, attribute).copy_(values)

    @property
    def _is_json(self) -> bool:
        return self.key.startswith(_JSON)


_OFFSET = "nested_offset"
_JSON = "quant_state."
_ATTRIBUTES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "absmax": lambda state: (state, "absmax"),
    "quant_map": lambda state: (state, "code"),
    "nested_absmax": lambda state: (state.state2, "absmax"),
    "nested_quant_map": lambda state: (state.state2, "code"),
}


def parts_of(weight: torch.Tensor) -> dict[str, QuantStatePart] | None:
    """Returns the parts of a packed weight's quant_state, by key; None if it is of an unknown kind."""
    as_dict = getattr(weight.quant_state, "as_dict", None)
    if as_dict is None:
        return None
    parts = {key: QuantStatePart(weight, key, value) for key, value in as_dict(packed=True).items()}
    known = all(key in _ATTRIBUTES or key.startswith(_JSON) for key in parts)
    return parts if known else None


def _read(values: torch.Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(values.cpu().tolist()))
    return found
