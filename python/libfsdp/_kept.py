"""The parameters that modules show between forward and backward if neighbouring ranks keep a copy between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from libfsdp import _C
    from libfsdp._sharded_parameter import ShardedParameter


def kept_parameter(
    parameter: ShardedParameter, i: int, unit: _C.Unit, mesh: DeviceMesh, ranks: int
) -> nn.Parameter | None:
    """Returns the parameter as a DTensor over the neighbours, in memory that comes and goes.

    Returns None if the part that this rank keeps is not the one that torch.chunk would give it. Its module then shows
    the shard.

    Args:
        parameter: the parameter of the unit.
        i: its position in the unit.
        unit: the unit, of which a copy is kept after forward.
        mesh: rows of neighbours, each of which has a copy between them.
        ranks: the ranks over which the parameter is sharded.
    """
    neighbours = mesh.size(1)
    padded = parameter.shard_dim == 0 and parameter.shape[0] % ranks != 0
    if parameter.whole_spec is not None or padded or parameter.shape[0] % neighbours != 0:
        return None
    assert parameter.whole is not None
    shape = [parameter.shape[0] // neighbours, *parameter.shape[1:]]
    stride = torch.empty(parameter.shape, device="meta").stride()
    spec = DTensorSpec(
        mesh, (Replicate(), Shard(0)), tensor_meta=TensorMeta(parameter.shape, stride, parameter.whole.dtype)
    )
    local = unit.kept(i, shape)
    kept = nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad=False)
    kept._libfsdp_identity = parameter.identity
    return kept
