"""Decides along which dimension, and over which ranks, a parameter is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from libfsdp._comm.mesh import ShardingMesh, sharding_mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


@dataclass
class ShardPlacementResult:
    """A result of a ``shard_placement_fn``: a placement, and the ranks over which this parameter is sharded.

    torch's class of this name is accepted, too.

    Attributes:
        placement: the dimension that is cut; None for the first one.
        mesh_info: a mesh of one or two dimensions, or an object that has one as ``mesh`` (torch's FSDPMeshInfo).
    """

    placement: Shard | None
    mesh_info: Any


def placement_of(
    function: Callable[[nn.Parameter], Any] | None, default: ShardingMesh, parameter: nn.Parameter
) -> tuple[ShardingMesh, int]:
    """Returns the ranks over which a parameter is cut, and the dimension.

    Raises:
        AssertionError: if the parameter does not have the dimension, or if the placement is not a Shard.
        NotImplementedError: if another dimension than the first does not divide by the ranks.
        ValueError: if the function returned something else, or a mesh of more than two dimensions.
    """
    result = function(parameter) if function is not None else None
    ranks, placement = default, result
    if result is not None and hasattr(result, "placement") and hasattr(result, "mesh_info"):
        placement = result.placement
        ranks = _ranks_of(result.mesh_info, default)
    return ranks, dimension_of(placement, ranks.shard_size, parameter)


def _ranks_of(mesh_info: Any, default: ShardingMesh) -> ShardingMesh:
    mesh = mesh_info if isinstance(mesh_info, DeviceMesh) else getattr(mesh_info, "mesh", None)
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
        raise ValueError(
            f"Invalid shard_placement_fn result: mesh_info has no mesh of one or two dimensions: {mesh_info}"
        )
    return default if mesh == default.mesh else sharding_mesh(mesh)


def dimension_of(placement: Any, shard_ranks: int, parameter: nn.Parameter) -> int:
    """Returns the dimension that a placement cuts.

    Raises:
        AssertionError: if the parameter does not have the dimension, or if the placement is not a Shard.
        NotImplementedError: if another dimension than the first does not divide by the ranks.
    """
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise AssertionError(
            f"Expected Shard, got {type(placement)}: {placement}; shard_placement_fn must return Shard(dim), a "
            f"ShardPlacementResult or None, for a parameter of the shape {list(parameter.shape)}"
        )
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    dim = placement.dim + local.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < local.ndim:
        raise AssertionError(f"Shard dim {dim} is invalid for {local.ndim}D tensor: {local.shape}")
    if dim > 0 and local.size(dim) % shard_ranks != 0:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {local.size()} (world size: {shard_ranks})"
        )
    return dim
