"""Tensors in what modules take and give."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.utils import _apply_to_tensors


def tensors_with_gradient(output: Any) -> list[torch.Tensor]:
    """All tensors in a module's output that backward may come by."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    if isinstance(output, torch.Tensor):
        collect(output)
    else:
        _apply_to_tensors(collect, output)
    return found


def cast_floating(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor
