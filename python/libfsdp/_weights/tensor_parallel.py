"""Parameters that are cut over further mesh dimensions than those of FSDP (tensor parallelism, experts): where their pieces lie."""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from libfsdp import _C
from libfsdp._comm.mesh import known_mesh, sharding_mesh
from libfsdp._weights.chunks import chunks_of_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Placement

    from libfsdp._comm.mesh import ShardingMesh
    from libfsdp._core.model import MemberState
    from libfsdp._core.sharded_parameter import ShardedParameter
    from libfsdp._weights.chunks import Chunk


class FurtherDim(NamedTuple):
    """A mesh dimension beside those of a parameter's unit, as a mesh of its own, and the parameter's placement on it."""

    mesh: DeviceMesh
    placement: Placement


def further_dims(parameter: ShardedParameter, state: MemberState) -> list[FurtherDim]:
    """Returns the dimensions beside those of a parameter's unit over which its DTensor is spread, the outermost first."""
    if parameter.whole_spec is not None:
        return dims_of(parameter.whole_spec)
    # Pieces of Megatron's layers are ordinary tensors, and only what users see has their placements.
    if parameter.spec is None or parameter.spec.mesh is state.mesh.mesh:
        return []
    return dims_of(parameter.spec, state.mesh.mesh.ndim)


def dims_of(spec: DTensorSpec, first: int = 0) -> list[FurtherDim]:
    """Returns the dimensions of a DTensor's mesh, from the given one on."""
    return [
        FurtherDim(_dimension(spec.mesh, dim), spec.placements[dim])
        for dim in range(first, spec.mesh.ndim)
        if spec.mesh.size(dim) > 1
    ]


def _dimension(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is None:
        raise _C.Error(
            f"full_weights: a mesh of {tuple(mesh.shape)} that cuts parameters needs names for its dimensions"
        )
    return mesh[mesh.mesh_dim_names[dim]]


def assembly_of(
    name: str, shape: Sequence[int], own: Sequence[int], dims: Sequence[FurtherDim]
) -> _C.WeightAssembly | None:
    """Returns how a tensor is put together from the pieces of all ranks, as the engine takes it; None if this rank has all of it.

    Args:
        name: for errors.
        shape: of the whole tensor.
        own: the shape of this rank's piece.
        dims: over which it is spread.

    Raises:
        Error: if this can't be done.
    """
    cuts = [dim for dim in dims if not isinstance(dim.placement, Replicate)]
    if not cuts:
        return None
    for _, placement in cuts:
        if not isinstance(placement, Shard | _StridedShard):
            raise _C.Error(
                f"full_weights: parameter '{name}' has the placement {placement}, so ranks have no pieces of it; use its full_tensor()"
            )
    sizes = tuple(cut.mesh.size() for cut in cuts)
    shapes, chunks = _pieces(tuple(shape), tuple(cut.placement for cut in cuts), sizes)
    index = 0
    for cut, size in zip(cuts, sizes, strict=True):
        index = index * size + cut.mesh.get_local_rank()
    if math.prod(own) != math.prod(shapes[index]) or (math.prod(own) > 0 and list(own) != shapes[index]):
        raise _C.Error(
            f"full_weights: parameter '{name}' of {list(shape)} has a piece of {list(own)} on this rank, and by its placements "
            f"({', '.join(str(cut.placement) for cut in cuts)}) one of {shapes[index]}; use its full_tensor()"
        )
    return _C.WeightAssembly([sharding_mesh(cut.mesh).engine_mesh for cut in cuts], shapes, chunks)


def meshes_of_all(states: Sequence[MemberState], others: Iterable[torch.Tensor]) -> list[_C.DeviceMesh]:
    """Returns meshes whose dimensions together, the outermost first, have all ranks that have parts of a model.

    Makes the engine's views of all these meshes, so it is collective. Empty if nothing is cut but by units.

    Args:
        states: those of the model.
        others: tensors that no unit has.

    Raises:
        Error: if no meshes of one tensor have all ranks.
    """
    ranks_of = functools.cache(_ranks_of)  # Each takes microseconds, and units share their meshes.
    dims_by_ranks: dict[tuple[tuple[int, ...], ...], tuple[ShardingMesh, list[FurtherDim]]] = {}
    is_cut = False
    of_others = [(states[0], dims_of(tensor._spec)) for tensor in others if isinstance(tensor, DTensor)]
    for state, dims in [*_dims_in(states), *of_others]:
        for dim in dims:
            if not isinstance(dim.placement, Replicate):
                sharding_mesh(dim.mesh)  # assembly_of needs the view, whatever is asked for on this rank.
        is_cut = is_cut or not all(isinstance(dim.placement, Replicate) for dim in dims)
        # Those of experts may be among the ranks of the unit's mesh already, and those of one mesh for all are.
        further = [dim for dim in dims if not set(ranks_of(dim.mesh)) <= set(ranks_of(state.mesh.mesh))]
        key = tuple(ranks_of(mesh) for mesh in (state.mesh.mesh, *(dim.mesh for dim in further)))
        dims_by_ranks.setdefault(key, (state.mesh, further))
    if not is_cut:
        return []
    found: list[tuple[set[int], list[_C.DeviceMesh]]] = []
    for data, dims in dims_by_ranks.values():
        meshes = [dim.mesh for dim in dims]
        together = DeviceMesh._concatenate([data.mesh, *meshes]) if meshes else data.mesh
        views = [data.engine_mesh, *(sharding_mesh(mesh).engine_mesh for mesh in meshes)]
        found.append((set(ranks_of(together)), views))
    largest, meshes_of_largest = max(found, key=lambda one: len(one[0]))
    for ranks, _ in found:
        if not ranks <= largest:
            raise _C.Error(
                f"full_weights: some parameters are on the ranks {sorted(ranks)}, and others on {sorted(largest)}; no parameter "
                "is on all of them"
            )
    return meshes_of_largest


def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


def known_further_meshes(states: Iterable[MemberState]) -> list[_C.DeviceMesh]:
    """Returns the meshes of dimensions beside those of units, if weights have been exported over them."""
    known = [known_mesh(dim.mesh) for _, dims in _dims_in(states) for dim in dims]
    return list({id(mesh.engine_mesh): mesh.engine_mesh for mesh in known if mesh is not None}.values())


def _dims_in(states: Iterable[MemberState]) -> Iterator[tuple[MemberState, list[FurtherDim]]]:
    """Yields each state without other dimensions, and with those of each of its parameters."""
    for state in states:
        yield state, []
        for parameter in state.parameters:
            dims = further_dims(parameter, state)
            if dims:
                yield state, dims


@functools.lru_cache(maxsize=256)
def _pieces(
    shape: tuple[int, ...], placements: tuple[Placement, ...], sizes: tuple[int, ...]
) -> tuple[list[list[int]], list[list[Chunk]]]:
    """Returns the shape and the chunks of each rank's piece. Ranks vary fastest along the last dimension.

    Args:
        shape: of the whole tensor.
        placements: those of the mesh dimensions.
        sizes: their numbers of ranks.
    """
    coordinates = itertools.product(*map(range, sizes))
    pieces = [chunks_of_rank(shape, placements, sizes, coordinate) for coordinate in coordinates]
    return [shape for shape, _ in pieces], [chunks for _, chunks in pieces]
