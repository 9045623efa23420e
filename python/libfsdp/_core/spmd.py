"""Parameters that are DTensors on a mesh of all ranks already, some dimensions of which are data-parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class SpmdMesh:
    """A mesh of all ranks, and which of its dimensions are data-parallel: those that shard, those that replicate."""

    mesh: DeviceMesh
    shard: tuple[str, ...]
    replicate: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return cast("tuple[str, ...]", self.mesh.mesh_dim_names)

    @property
    def data_parallel(self) -> frozenset[int]:
        """The positions of the data-parallel dimensions."""
        return frozenset(self.names.index(name) for name in (*self.shard, *self.replicate))

    def data_parallel_mesh(self) -> DeviceMesh:
        """Returns a mesh of one dimension, or of two if some replicate and others shard. Several dimensions of a kind become one."""
        parts = [self._flat(names) for names in (self.replicate, self.shard) if names]
        return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)

    def _flat(self, names: tuple[str, ...]) -> DeviceMesh:
        return self.mesh[names[0]] if len(names) == 1 else self.mesh[names]._flatten("_".join(names))


def spmd_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims) -> SpmdMesh:
    """Checks what a user gives as ``mesh`` and ``dp_mesh_dims``.

    Raises:
        ValueError: for names that the mesh does not have.
    """
    shard, replicate = dims.shard_names, dims.replicate_names
    if not shard and not replicate:
        raise ValueError("At least one of shard or replicate must be set in dp_mesh_dims")
    if mesh.mesh_dim_names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*shard, *replicate):
        if name not in mesh.mesh_dim_names:
            raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}")
    return SpmdMesh(mesh, shard, replicate)


def spmd_specs(parameter: nn.Parameter, spmd: SpmdMesh, shard_dim: int) -> tuple[DTensorSpec, DTensorSpec]:
    """Returns the specs of a parameter between steps, and of its unsharded form.

    Raises:
        ValueError: if the parameter is no DTensor on the mesh, or not replicated over its data-parallel dimensions.
    """
    if not isinstance(parameter, DTensor):
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via distribute_module). "
            "Got a plain tensor"
        )
    whole = parameter._spec
    if whole.mesh is not spmd.mesh:
        raise ValueError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different mesh objects"
        )
    for kind, names in (("shard", spmd.shard), ("replicate", spmd.replicate)):
        for name in names:
            placement = whole.placements[spmd.names.index(name)]
            if not isinstance(placement, Replicate):
                raise ValueError(f"Expected Replicate() on DP {kind} dim '{name}' but got {placement}")
    placements = list(whole.placements)
    for name in spmd.shard:
        position = spmd.names.index(name)
        pieces = 1
        for later in range(position + 1, spmd.mesh.ndim):
            placement = whole.placements[later]
            if isinstance(placement, (Shard, _StridedShard)) and placement.dim == shard_dim:
                pieces *= spmd.mesh.size(later)
        placements[position] = Shard(shard_dim) if pieces == 1 else _StridedShard(shard_dim, split_factor=pieces)
    if len(spmd.shard) <= 1:
        return DTensorSpec(spmd.mesh, tuple(placements), tensor_meta=whole.tensor_meta), whole
    return _one_shard_dimension(spmd, placements, whole), whole


def _one_shard_dimension(spmd: SpmdMesh, placements: list[Placement], whole: DTensorSpec) -> DTensorSpec:
    """Returns the spec in which several dimensions that shard are one dimension of the mesh."""
    parts: list[DeviceMesh] = []
    found: list[Placement] = []
    for position, name in enumerate(spmd.names):
        if name in spmd.replicate:
            continue
        if name not in spmd.shard:
            parts.append(spmd.mesh[name])
            found.append(placements[position])
        elif name == spmd.shard[0]:
            parts.append(spmd.data_parallel_mesh())
            found += [Replicate()] if spmd.replicate else []
            found.append(placements[position])
    return DTensorSpec(DeviceMesh._concatenate(parts), tuple(found), tensor_meta=whole.tensor_meta)
