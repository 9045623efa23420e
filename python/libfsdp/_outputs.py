"""Tensors in what modules take and give."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def tensors_with_gradient(output: Any) -> list[torch.Tensor]:
    """All tensors in a module's output that backward may come by: in mappings, sequences, sets and dataclasses, which are only read."""
    found: list[torch.Tensor] = []
    _collect(output, found)
    return found


# Not a closure: one that calls itself is a cycle, which would keep the outputs and their graph until the garbage collector comes.
def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            found.append(value)
    elif isinstance(value, Mapping):
        for inner in value.values():
            _collect(inner, found)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            _collect(inner, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found)


def cast_floating(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor
