"""Makes the DTensors that users of a Megatron-FSDP model see, over all ranks that have a parameter or pieces of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from libfsdp._core.sharded_parameter import local_of

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    from libfsdp._core.state import ShardState


def describe(state: ShardState, i: int, tensor_parallel: DeviceMesh | None, cut_dim: int | None) -> None:
    """Gives a parameter its DTensor, over the memory that it has. Called before the first forward.

    Parameters that are not cut (ZeRO-0) become replicated DTensors. Those that are pieces of Megatron's
    tensor-parallel layers, and ordinary tensors, become DTensors of the whole; modules compute with the pieces as before.

    Args:
        state: the state of the unit.
        i: the index of the parameter in the unit.
        tensor_parallel: the ranks that have pieces.
        cut_dim: the dimension along which they have pieces; None if all have the same.
    """
    parameter = state.parameters[i]
    whole = parameter.whole_spec
    pieces_here = whole is None and cut_dim is not None and tensor_parallel is not None
    if not state.options.is_replicated and not pieces_here:
        return
    data = state.mesh.mesh
    placements: tuple[Placement, ...] = (Replicate(),) * data.ndim
    if not state.options.is_replicated:
        assert parameter.spec is not None
        placements = parameter.spec.placements
    shape = list(parameter.shape)
    mesh = data
    if pieces_here:
        assert tensor_parallel is not None
        assert cut_dim is not None
        shape[cut_dim] *= tensor_parallel.size()
        placements = (*(_strided(one, cut_dim, tensor_parallel.size()) for one in placements), Shard(cut_dim))
        mesh = DeviceMesh._concatenate([data, tensor_parallel])
    elif whole is not None:
        assert whole.tensor_meta is not None
        shape = list(whole.tensor_meta.shape)
        placements = (*placements, *whole.placements)
        mesh = DeviceMesh._concatenate([data, whole.mesh])
    size = torch.Size(shape)
    meta = TensorMeta(size, torch.empty(size, device="meta").stride(), parameter.dtype)
    parameter.spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    local = local_of(parameter.sharded).detach()
    state._set_sharded(i, nn.Parameter(parameter.place(local), requires_grad=parameter.sharded.requires_grad))
    state._show_shards()


def _strided(placement: Placement, dim: int, pieces: int) -> Placement:
    """Returns the placement of a data-parallel dimension that cuts pieces along the dimension along which they were cut before."""
    if not isinstance(placement, Shard | _StridedShard) or placement.dim != dim or pieces == 1:
        return placement
    cut_before = placement.split_factor if isinstance(placement, _StridedShard) else 1
    return _StridedShard(dim, split_factor=pieces * cut_before)


def with_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts a tensor to another dtype. A DTensor keeps its placements, and nothing is communicated."""
    if tensor.dtype == dtype:
        return tensor
    if not isinstance(tensor, DTensor):
        return tensor.to(dtype)
    spec = tensor._spec
    assert spec.tensor_meta is not None
    spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
    return DTensor(tensor._local_tensor.to(dtype), spec, requires_grad=False)
