"""Makes state and gradients that a step in C++ finds missing, usually once for each parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed.tensor.placement_types import Placement


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Runs the closure, and returns the result of a step."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def cut_dims(parameter: DTensor) -> list[int]:
    """Returns the mesh dimensions, of more than one rank, over which a parameter is cut or a sum of it is pending."""
    mesh = parameter.device_mesh
    return [d for d, p in enumerate(parameter.placements) if not isinstance(p, Replicate) and mesh.size(d) > 1]


def prepare_gradient(parameter: Tensor) -> None:
    """Gives a gradient the parameter's placements, and waits for it."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor):
        if not isinstance(gradient, DTensor):
            raise RuntimeError(f"the gradient of a DTensor of the shape {list(parameter.shape)} is none")
        if gradient.device_mesh != parameter.device_mesh or gradient.placements != parameter.placements:
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        if isinstance(gradient._local_tensor, AsyncCollectiveTensor):
            gradient._local_tensor = gradient._local_tensor.wait()
    elif isinstance(gradient, AsyncCollectiveTensor):
        parameter.grad = gradient.wait()


def zeros_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns zeros with the layout of a tensor. For a DTensor, it avoids the cost of its dispatch."""
    if not isinstance(tensor, DTensor):
        return torch.zeros_like(tensor, dtype=dtype, memory_format=torch.preserve_format)
    local = torch.zeros_like(tensor._local_tensor, dtype=dtype, memory_format=torch.preserve_format)
    return over(local, tensor, TensorMeta(tensor.shape, tensor.stride(), local.dtype), tensor.placements)


def over(local: Tensor, like: DTensor, whole: TensorMeta, placements: Sequence[Placement]) -> DTensor:
    """Returns a DTensor over a local tensor, where it is: from_local would move an offloaded one to the mesh's device."""
    spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=whole)
    return DTensor(local, spec, requires_grad=False)
