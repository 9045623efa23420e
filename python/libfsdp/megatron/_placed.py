"""Makes the DTensors that users of a Megatron-FSDP model see, over all ranks that have a parameter or pieces of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from libfsdp._core.sharded_parameter import local_of, spec_over

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from libfsdp._core.state import ShardState


def describe(state: ShardState, i: int, tensor_parallel: DeviceMesh | None, cut_dim: int | None) -> None:
    """Gives a parameter its DTensor, over the memory that it has. Called before the first forward.

    Parameters that are not cut (ZeRO-0) become replicated DTensors. Those that are pieces of Megatron's
    tensor-parallel layers, and ordinary tensors, become DTensors of the whole; modules compute with the pieces as before.

    Args:
        tensor_parallel: the ranks that have pieces.
        cut_dim: the dimension along which they have pieces; None if all have the same.
    """
    parameter, replicated = state.parameters[i], state.options.is_replicated
    whole, shape = parameter.whole_spec, parameter.shape
    if whole is not None:
        assert whole.tensor_meta is not None
        shape = whole.tensor_meta.shape
    elif cut_dim is not None and tensor_parallel is not None:
        shape = torch.Size(size * tensor_parallel.size() if d == cut_dim else size for d, size in enumerate(shape))
        whole = DTensorSpec(tensor_parallel, (Shard(cut_dim),))
    if not replicated and whole is parameter.whole_spec:
        return
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), parameter.dtype)
    outer = state.options.outer_sharded
    parameter.spec = spec_over(
        state.mesh, whole, meta, parameter.shard_dim, replicated=replicated, outer_sharded=outer
    )
    local = local_of(parameter.sharded).detach()
    state._set_sharded(i, nn.Parameter(parameter.place(local), requires_grad=parameter.sharded.requires_grad))
    state._show_shards()


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
