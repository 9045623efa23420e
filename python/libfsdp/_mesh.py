"""From torch's DeviceMesh to the engine's communicators."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from libfsdp import _C
from libfsdp._collectives import Collectives


@dataclass(frozen=True)
class ShardingMesh:
    """The ranks that a unit is sharded over, and those that replicate its shards.

    Attributes:
        mesh: one dimension (FSDP), or two: the first replicates, the second shards (HSDP).
        engine_mesh: the engine's view of the same ranks.
        collectives: of Python, one per dimension, where the engine communicates through torch.distributed.
    """

    mesh: DeviceMesh
    engine_mesh: _C.Mesh
    collectives: tuple[Collectives, ...] = ()

    @property
    def device(self) -> torch.device:
        return device_of(self.mesh)

    @property
    def shard_size(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def shard_rank(self) -> int:
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def replicates(self) -> bool:
        return self.mesh.ndim == 2


def default_mesh() -> DeviceMesh:
    """All ranks, on the accelerator if there is one, else on the CPU."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


@dataclass
class _OfWorld:
    """What has been made of one world's process groups: it goes with the default group."""

    meshes: dict[tuple[Any, ...], ShardingMesh] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)


_worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, _OfWorld] = weakref.WeakKeyDictionary()


def sharding_mesh(mesh: DeviceMesh, *, own_collectives: bool = False) -> ShardingMesh:
    """The engine's view of a mesh of one or two dimensions, made once.

    Args:
        mesh: of one or two dimensions.
        own_collectives: communicate through torch.distributed, by collectives that nobody else has.
    """
    world = _worlds.setdefault(dist.distributed_c10d._get_default_group(), _OfWorld())
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    key = tuple(group.group_name for group in groups)
    if own_collectives:
        return _over_python(mesh, groups)
    if key not in world.meshes:
        fast = mesh.device_type == "cpu" and all(_is_gloo(group) for group in groups)
        world.meshes[key] = _over_store(mesh, groups, world) if fast else _over_python(mesh, groups)
    made = world.meshes[key]
    return made if made.mesh == mesh else ShardingMesh(mesh, made.engine_mesh, made.collectives)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """The group's ranks are processes that talk by Gloo: none written in Python, none that only pretends."""
    if type(group) is not dist.ProcessGroup:
        return False
    return isinstance(group._get_backend(torch.device("cpu")), getattr(dist, "ProcessGroupGloo", ()))


def _names(mesh: DeviceMesh) -> list[str]:
    return list(mesh.mesh_dim_names or ("dp_shard",) if mesh.ndim == 1 else mesh.mesh_dim_names or ())


def _over_store(mesh: DeviceMesh, groups: list[dist.ProcessGroup], world: _OfWorld) -> ShardingMesh:
    """Connections of the engine's own. The ranks of the mesh have made the same meshes in the same order."""
    rows = [dist.get_process_group_ranks(group) for group in groups]
    ranks = ",".join(str(rank) for rank in mesh.mesh.flatten().tolist())
    name = hashlib.sha256(f"{tuple(mesh.mesh.shape)} {ranks}".encode()).hexdigest()[:16]
    world.count[name] = world.count.get(name, 0) + 1
    engine_mesh = _C.make_mesh(
        store=dist.distributed_c10d._get_default_store(),
        prefix=f"libfsdp/{name}/{world.count[name]}",
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dims=_names(mesh),
        rows=rows,
        device=device_of(mesh),
        timeout=dist.distributed_c10d._get_default_timeout("gloo").total_seconds(),
    )
    return ShardingMesh(mesh, engine_mesh)


def _over_python(mesh: DeviceMesh, groups: list[dist.ProcessGroup]) -> ShardingMesh:
    device = device_of(mesh)
    collectives = tuple(Collectives(group, device) for group in groups)

    def make(dimension: int, neighbours: int) -> Collectives:
        if neighbours == mesh.size(dimension):
            return collectives[dimension]
        ranks = dist.get_process_group_ranks(groups[dimension])
        own = mesh.get_local_rank(dimension) // neighbours
        made = [dist.new_group(ranks[k : k + neighbours]) for k in range(0, len(ranks), neighbours)]
        return Collectives(made[own], device)

    engine_mesh = _C.make_python_mesh(
        rank=dist.get_rank(),
        dims=_names(mesh),
        sizes=[mesh.size(dim) for dim in range(mesh.ndim)],
        coordinates=[mesh.get_local_rank(dim) for dim in range(mesh.ndim)],
        device=device,
        make=make,
    )
    return ShardingMesh(mesh, engine_mesh, collectives)
