"""Finds tensors in the inputs and outputs of modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def tensors_with_gradient(output: Any) -> list[torch.Tensor]:
    """Returns all tensors that require a gradient in a module's output, also in mappings, sequences, sets and dataclasses."""
    found: list[torch.Tensor] = []
    _collect(output, found)
    return found


# This is not a closure, because one that calls itself is a cycle, which would keep the outputs and their graph until the garbage collector
# runs.
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
