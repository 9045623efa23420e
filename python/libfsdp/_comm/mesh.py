"""Makes the engine's communicators from torch's DeviceMesh."""

from __future__ import annotations

import atexit
import hashlib
import weakref
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import default_pg_timeout

from libfsdp import _C
from libfsdp._comm import stack_dump
from libfsdp._comm.collectives import Collectives

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class ShardingMesh:
    """The ranks that a unit is sharded over, and those that replicate its shards.

    Attributes:
        mesh: one dimension (FSDP), or two: the first replicates, the second shards (HSDP).
        engine_mesh: the engine's view of the same ranks.
        shards: False if the only dimension replicates (DDP).
        collectives: of Python, one per dimension, where the engine communicates through torch.distributed.
        is_own: whether only this object uses these collectives.
        more_backends: which the engine has asked for so far, beside those of the mesh's groups.
    """

    mesh: DeviceMesh
    engine_mesh: _C.DeviceMesh
    shards: bool = True
    collectives: tuple[Collectives, ...] = ()
    is_own: bool = False
    more_backends: list[dist.Backend] = field(default_factory=list, compare=False)

    @property
    def device(self) -> torch.device:
        return device_of(self.mesh)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The dimension that shards."""
        if self.mesh.ndim == 1:
            return self.mesh
        assert self.mesh.mesh_dim_names is not None
        return self.mesh[self.mesh.mesh_dim_names[-1]]

    @property
    def shard_size(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1) if self.shards else 1

    @property
    def shard_rank(self) -> int:
        return self.mesh.get_local_rank(self.mesh.ndim - 1) if self.shards else 0

    @property
    def backends(self) -> list[dist.Backend]:
        """Of torch's own groups along its dimensions, and of those that the engine has asked for so far."""
        groups = [self.mesh.get_group(dim) for dim in range(self.mesh.ndim)]
        own = [group._get_backend(self.device) for group in groups if type(group) is dist.ProcessGroup]
        return [*own, *self.more_backends]

    def piece(self, *, replicated: bool, outer_sharded: bool) -> tuple[int, int]:
        """Returns the number of pieces into which a parameter is cut, and this rank's piece. The inner dimension cuts first."""
        if replicated:
            return 1, 0
        if not outer_sharded:
            return self.shard_size, self.shard_rank
        outer = self.mesh.size(0)
        return self.shard_size * outer, self.shard_rank * outer + self.mesh.get_local_rank(0)

    @property
    def replicates(self) -> bool:
        return self.mesh.ndim == 2


@dataclass(frozen=True)
class _Row:
    """The row of this rank along one dimension of the engine's mesh."""

    name: str
    ranks: list[int]
    mesh: DeviceMesh
    dim: int | None  # None for a row of this rank alone

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.dim is None else self.mesh.get_group(self.dim)

    @property
    def position(self) -> int:
        return self.ranks.index(dist.get_rank())

    def second_group(self, neighbours: int) -> dist.ProcessGroup:
        """Returns a group of this many neighbours, this rank among them, that is not the row's own. Collective over them at its first call.

        The group stays in the world, for other rows of the same ranks. Were it destroyed with the row's group, the name that torch computes
        from its ranks would come again, with the old addresses under it in the store.
        """
        first = self.position // neighbours * neighbours
        seconds = None if self.group is None else timeout_of(self.group, device_of(self.mesh))
        ranks = self.ranks[first : first + neighbours]
        backend = None if self.group is None else dist.get_backend_config(self.group)
        groups, key = _own_world().groups, (*ranks, backend, seconds)
        if key not in groups:
            groups[key] = _new_group(ranks, backend, None if seconds is None else timedelta(seconds=seconds))
        return groups[key]

    def group_of(self, neighbours: int) -> dist.ProcessGroup | None:
        """Returns the group of this many neighbours; for all ranks, the row's own. Collective over the neighbours at its first call."""
        return self.group if neighbours == len(self.ranks) else self.second_group(neighbours)


def _new_group(ranks: list[int], backend: str | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """Makes a group with connections of its own. Collective over these ranks, and no others.

    If ``init_process_group`` was given a `device_id`, torch would split the default group, and all of its ranks would have to take part.
    """
    default = dist.distributed_c10d._get_default_group()
    device, default.bound_device_id = default.bound_device_id, None
    try:
        return dist.new_group(ranks, backend=backend, timeout=timeout, use_local_synchronization=True)
    finally:
        default.bound_device_id = device


def _when_destroyed(group: dist.ProcessGroup, call: Callable[..., object], *arguments: Any) -> None:
    """Calls it when the program destroys the group.

    Torch keeps the Python object of a group's store exactly as long as it knows the group. The group itself lives longer: meshes refer to
    it, such as those that are to be dropped.
    """
    weakref.finalize(dist.distributed_c10d._get_process_group_store(group), call, *arguments).atexit = False


def default_mesh(names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Returns a mesh of all ranks, on the accelerator if there is one, and otherwise on the CPU.

    Args:
        names: the names of its dimensions, of which the first has all ranks.
    """
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as error:  # the environment names no ranks
            raise ValueError(
                "fully_shard without a mesh shards over all ranks, and there is no process group: call "
                f"torch.distributed.init_process_group() before, or start the program with torchrun ({error})"
            ) from error
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    sizes = (dist.get_world_size(), *(1 for _ in (names or ())[1:]))
    return init_device_mesh(accelerator.type if accelerator else "cpu", sizes, mesh_dim_names=names)


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


@dataclass
class _OfWorld:
    """The objects that have been made from the process groups of one world. A mesh is dropped when one of its groups is destroyed."""

    meshes: dict[tuple[Any, ...], ShardingMesh] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    neighbours: dict[tuple[int, ...], DeviceMesh] = field(default_factory=dict)
    groups: dict[tuple[Any, ...], dist.ProcessGroup] = field(default_factory=dict)


# By the store of the default group, which goes when that is destroyed: see _when_destroyed().
_worlds: weakref.WeakKeyDictionary[dist.Store, _OfWorld] = weakref.WeakKeyDictionary()
_given: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()


@atexit.register
def _tell_how_this_rank_ends() -> None:
    """Reports to ranks that wait for this one whether its script has ended normally or by an exception."""
    _C.tell_ending(stack_dump.error_of_script())


@atexit.register
def _let_go_of_destroyed_groups() -> None:
    """Drops all references to the process groups after ``destroy_process_group()``, so that torch joins their threads now.

    A thread of Gloo releases the tensors of the last collective after the collective has returned. A thread that does so while the
    interpreter ends aborts the process ("terminate called without an active exception", Python before 3.13). Torch joins these threads when
    the last reference to the group goes; models that are alive at the end, and their meshes, hold such references.
    """
    if dist.is_initialized():
        return
    Collectives.let_go_of_groups()
    for mesh in list(_given.values()):
        getattr(mesh._get_root_mesh(), "_pg_registry", {}).clear()  # torch 2.11 has no registry


def sharding_mesh(mesh: DeviceMesh, *, shards: bool = True, own_collectives: bool = False) -> ShardingMesh:
    """Returns the engine's view of a mesh of one or two dimensions. It is made once.

    Args:
        shards: False if its only dimension replicates.
        own_collectives: communicate through torch.distributed, by collectives that no other unit uses.
    """
    world = _own_world()
    _given[id(mesh)] = mesh
    rows = _rows_of(mesh, shards)
    if own_collectives:
        return replace(_over_python(mesh, rows, shards), is_own=True)
    key = _key_of(rows, shards)
    if key not in world.meshes:
        world.meshes[key] = _make(mesh, rows, shards, world)
        for row in rows:
            if row.group is not None:
                _when_destroyed(row.group, world.meshes.pop, key, None)
    made = world.meshes[key]
    return made if made.mesh == mesh else replace(made, mesh=mesh)


def new_host_mesh(mesh: DeviceMesh) -> _C.DeviceMesh:
    """Makes connections of its own between the ranks of a mesh, for tensors on the host. Collective; they close with the result."""
    return _over_store(mesh, _rows_of(mesh, True), True, _own_world(), device=torch.device("cpu")).engine_mesh


def known_mesh(mesh: DeviceMesh) -> ShardingMesh | None:
    """Returns the engine's view of a mesh that shards, if it has been made."""
    return _own_world().meshes.get(_key_of(_rows_of(mesh, True), True))


def _own_world() -> _OfWorld:
    return _worlds.setdefault(dist.distributed_c10d._get_default_store(), _OfWorld())


def _key_of(rows: list[_Row], shards: bool) -> tuple[Any, ...]:
    return (shards, *(row.group.group_name for row in rows if row.group is not None))


def neighbours_mesh(mesh: DeviceMesh, neighbours: int) -> DeviceMesh:
    """Returns the ranks of a mesh as rows of this many neighbours. The mesh is made once, which is collective over all ranks."""
    known = _own_world().neighbours
    key = (neighbours, *mesh.mesh.flatten().tolist())
    if key not in known:
        known[key] = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, neighbours))
    return known[key]


def _rows_of(mesh: DeviceMesh, shards: bool) -> list[_Row]:
    names = mesh.mesh_dim_names or tuple(f"dim_{dim}" for dim in range(mesh.ndim))
    rows = [_Row(name, dist.get_process_group_ranks(mesh.get_group(dim)), mesh, dim) for dim, name in enumerate(names)]
    return rows if shards else [*rows, _Row("(this rank)", [dist.get_rank()], mesh, None)]


def _make(mesh: DeviceMesh, rows: list[_Row], shards: bool, world: _OfWorld) -> ShardingMesh:
    groups = [row.group for row in rows if row.group is not None]
    if mesh.device_type == "cpu" and all(is_of(group, "ProcessGroupGloo", mesh) for group in groups):
        return _over_store(mesh, rows, shards, world)
    if all(is_of(group, "FakeProcessGroup", mesh) for group in groups):
        return _over_python(mesh, rows, shards, _C.make_fake_mesh)
    if all(_launches_collectives(group, mesh) for group in groups):
        return _over_backends(mesh, rows, shards, world)
    return _over_python(mesh, rows, shards)


def is_of(group: dist.ProcessGroup, backend: str, mesh: DeviceMesh) -> bool:
    """True if the group is torch's own, with this C++ backend for the mesh's device, so that no part of it is written in Python."""
    if type(group) is not dist.ProcessGroup:
        return False
    return isinstance(
        group._get_backend(torch.device(mesh.device_type)), getattr(torch._C._distributed_c10d, backend, ())
    )


def _launches_collectives(group: dist.ProcessGroup, mesh: DeviceMesh) -> bool:
    """True if the group has a C++ backend, like NCCL's, that can launch several operations at once, for which streams wait."""
    if type(group) is not dist.ProcessGroup or mesh.device_type == "cpu":
        return False
    backend = group._get_backend(torch.device(mesh.device_type))
    return type(backend).__module__ in _TORCHS_OWN and bool(backend.supports_coalescing)


_TORCHS_OWN = ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d")  # classes of C++


def _over_backends(mesh: DeviceMesh, rows: list[_Row], shards: bool, world: _OfWorld) -> ShardingMesh:
    """Makes a mesh whose tensors the groups' own backends move, called by the engine. Only small messages have connections of its own."""
    device = device_of(mesh)
    more: list[dist.Backend] = []

    def backend_of(dimension: int, neighbours: int) -> dist.Backend | None:
        row = rows[dimension]
        if row.group is None:  # This rank alone.
            return None
        group = row.second_group(neighbours) if neighbours else row.group
        assert group is not None
        backend = group._get_backend(device)
        if group is not row.group:
            more.append(backend)
        return backend

    return replace(_over_store(mesh, rows, shards, world, backend_of), more_backends=more)


def _over_store(
    mesh: DeviceMesh,
    rows: list[_Row],
    shards: bool,
    world: _OfWorld,
    backend_of: Callable[[int, int], dist.Backend | None] | None = None,
    device: torch.device | None = None,
) -> ShardingMesh:
    """Makes a mesh with connections of the engine's own. The ranks of the mesh must make the same meshes in the same order.

    Args:
        backend_of: see StoreMesh.
        device: where the tensors lie that are sent; None: on that of the mesh.
    """
    ranks = sorted(mesh.mesh.flatten().tolist())
    name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    world.count[name] = world.count.get(name, 0) + 1
    store = dist.distributed_c10d._get_default_store()
    prefix = f"libfsdp/{name}/{world.count[name]}"
    timeouts = [timeout_of(row.group, device_of(mesh)) for row in rows if row.group is not None]
    timeout = min((seconds for seconds in timeouts if seconds is not None), default=default_pg_timeout.total_seconds())
    if backend_of is not None:
        # This time-out ends before the one of the backend's watchdog, which ends the process: messages name the rank that is late.
        timeout -= min(timeout / 10, 60.0)
    _compare_shapes(mesh, ranks, store, prefix, timeout)
    stack_dump.register()
    engine_mesh = _C.make_mesh(
        store=store,
        prefix=prefix,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        dims=[row.name for row in rows],
        rows=[row.ranks for row in rows],
        device=device or device_of(mesh),
        timeout=timeout,
        make=_maker(mesh, rows, ()),
        backend_of=backend_of,
    )
    return ShardingMesh(mesh, engine_mesh, shards)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Returns the time-out of a Gloo or NCCL group in seconds: that of new_group, or else of init_process_group. None for other groups.

    Torch gives the groups of ``init_device_mesh`` its own default, whatever the default group has.
    """
    own = _given_timeout(group, device)
    default = _given_timeout(dist.distributed_c10d._get_default_group(), device)
    torchs = dist.distributed_c10d._get_default_timeout(dist.get_backend(group)).total_seconds()
    return default if own == torchs and default is not None else own


def _given_timeout(group: dist.ProcessGroup, device: torch.device) -> float | None:
    try:
        seconds: float = group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # no such backend for the device, or one without such options
        return None
    return seconds


def _compare_shapes(mesh: DeviceMesh, ranks: list[int], store: dist.Store, prefix: str, timeout: float) -> None:
    """Raises Error on all ranks if some of them have arranged the same ranks in another way, as they would wait for each other for ever."""
    own = dist.get_rank()
    keys = [f"{prefix}/shape/{rank}" for rank in ranks]
    store.set(keys[ranks.index(own)], repr(mesh.mesh.tolist()))
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        raise _C.CommError(
            f"rank {own} has waited {timeout:g} s for ranks {missing} to use a mesh of the ranks {ranks}, too, as in fully_shard. "
            "All ranks of a mesh must make the same models on it."
        ) from error
    shapes = [shape.decode() for shape in store.multi_get(keys)]
    for rank, shape in zip(ranks, shapes, strict=True):
        if shape != shapes[0]:
            raise _C.Error(
                f"rank {ranks[0]} and rank {rank} have meshes of other dimensions: {shapes[0]} and {shape}. All ranks must give "
                "fully_shard the same mesh."
            )


def _over_python(
    mesh: DeviceMesh, rows: list[_Row], shards: bool, make: Callable[..., _C.DeviceMesh] = _C.make_python_mesh
) -> ShardingMesh:
    device = device_of(mesh)
    collectives = tuple(Collectives(row.group, device) for row in rows)
    engine_mesh = make(
        rank=dist.get_rank(),
        dims=[row.name for row in rows],
        sizes=[len(row.ranks) for row in rows],
        coordinates=[row.position for row in rows],
        device=device,
        make=_maker(mesh, rows, collectives),
    )
    return ShardingMesh(mesh, engine_mesh, shards, collectives)


def _maker(
    mesh: DeviceMesh, rows: list[_Row], collectives: tuple[Collectives, ...]
) -> Callable[[int, int], Collectives]:
    """Returns a function that makes the collectives of neighbours along a dimension; for a whole row, it returns those given."""
    device = device_of(mesh)

    def make(dimension: int, neighbours: int) -> Collectives:
        row = rows[dimension]
        if neighbours == len(row.ranks) and collectives:
            return collectives[dimension]
        return Collectives(row.group_of(neighbours), device)

    return make
