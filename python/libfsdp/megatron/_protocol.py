"""The attributes of parameters by which Megatron's modules and optimizers communicate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

# The attributes that are copied to the distributed parameter, and to the unsharded one with which modules compute.
CARRIED = (
    "allreduce",
    "sequence_parallel",
    "is_embedding_parameter",
    "is_embedding_or_output_parameter",
    "is_qkv",
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "_tensor_parallel_mode",
    "overwrite_main_grad",
    "skip_backward_post_hook",
    "shared",
    "shared_embedding",
)


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Returns those attributes that a parameter has."""
    return {name: getattr(parameter, name) for name in CARRIED if hasattr(parameter, name)}


def is_expert(parameter: torch.Tensor) -> bool:
    """True if the parameter belongs to an expert, so that other ranks have other parameters instead."""
    return getattr(parameter, "allreduce", True) is False


def tensor_parallel_dim(parameter: torch.Tensor) -> int | None:
    """Returns the dimension along which ranks have pieces of a parameter that is an ordinary tensor; None if all have the same."""
    by_mode = {"column": 0, "row": 1}.get(getattr(parameter, "_tensor_parallel_mode", None) or "")
    if by_mode is not None:
        return by_mode if by_mode < parameter.ndim else None
    if getattr(parameter, "tensor_model_parallel", False):
        dim = getattr(parameter, "partition_dim", -1)
        return int(dim) if dim is not None and dim >= 0 else None
    return None
