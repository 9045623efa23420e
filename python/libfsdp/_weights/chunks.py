"""Computes the chunks of an unsharded tensor that each rank of a mesh has."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from libfsdp._checkpoint.items import chunk_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch.distributed.tensor.placement_types import Placement

    _Range = tuple[int, int]  # begin and end in the whole dimension


class _Cut(NamedTuple):
    """A cut of a dimension, or of each of ``parts`` chunks of it, into ``ranks`` chunks, as torch.chunk cuts, and a rank's number."""

    parts: int
    ranks: int
    rank: int


class Chunk(NamedTuple):
    """A chunk that a rank's part and the unsharded tensor share: where it begins in each, and its sizes."""

    in_part: list[int]
    offsets: list[int]
    sizes: list[int]


class LocalChunk(NamedTuple):
    """A chunk of an unsharded tensor, with this rank's values, as a view."""

    offsets: list[int]
    values: torch.Tensor


def local_chunks(tensor: DTensor, local: torch.Tensor) -> list[LocalChunk] | None:
    """Returns the chunks that ``local``, the local tensor, has of a DTensor; None if its shape does not fit the placements.

    A dimension may be cut several times: a tensor-parallel piece of it is cut once more by the ranks that shard.
    """
    if hasattr(local, "__create_chunk_list__"):  # The place of such a part does not follow from the placements.
        offsets = chunk_of(tensor, local)
        return None if offsets is None else [LocalChunk(offsets, local)]
    mesh = tensor.device_mesh
    coordinate = [mesh.get_local_rank(dim) for dim in range(mesh.ndim)]
    shape, chunks = chunks_of_rank(tensor.shape, tensor.placements, mesh.shape, coordinate)
    if shape != list(local.shape):
        return None
    found = []
    for in_part, offsets, sizes in chunks:
        values = local
        for d, (begin, size) in enumerate(zip(in_part, sizes, strict=True)):
            values = values.narrow(d, begin, size)
        found.append(LocalChunk(offsets, values))
    return found


def chunks_of_rank(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[list[int], list[Chunk]]:
    """Returns the shape of a rank's part of a tensor, and its chunks.

    Args:
        shape: the shape of the whole tensor.
        placements: by mesh dimension, the outermost first.
        sizes: the numbers of ranks of the mesh dimensions.
        coordinate: the rank's place on them.
    """
    cuts: list[list[_Cut]] = [[] for _ in shape]
    for placement, ranks, rank in reversed(list(zip(placements, sizes, coordinate, strict=True))):
        if isinstance(placement, Shard | _StridedShard):
            _add_cut(cuts[placement.dim % len(shape)], int(getattr(placement, "split_factor", 1)), ranks, rank)
    # Of each range of a dimension: where it begins in the part and in the whole, and its size.
    places: list[list[tuple[int, int, int]]] = []
    for size, of_dimension in zip(shape, cuts, strict=True):
        places.append([])
        start = 0
        for begin, end in _ranges(size, of_dimension):
            places[-1].append((start, begin, end - begin))
            start += end - begin
    chunks = [Chunk(*([place[i] for place in chosen] for i in range(3))) for chosen in itertools.product(*places)]
    return [sum(size for *_, size in of_dimension) for of_dimension in places], chunks


def _add_cut(cuts: list[_Cut], parts: int, ranks: int, rank: int) -> None:
    """Adds the cut of a mesh dimension to those of the dimensions to its right, in the order in which they are made.

    Mesh dimensions to the left cut first. A _StridedShard that makes as many parts as those to its right have made cuts
    after them, each of their pieces for itself (FSDP beside tensor parallelism), also where they are uneven.
    """
    if parts > 1 and parts == math.prod(other.ranks for other in cuts) and all(other.parts == 1 for other in cuts):
        cuts.append(_Cut(1, ranks, rank))
    else:
        cuts.insert(0, _Cut(parts, ranks, rank))


def _ranges(size: int, cuts: Iterable[_Cut]) -> list[_Range]:
    """Returns the ranges of a dimension that remain after its cuts."""
    ranges = [(0, size)]
    for parts, ranks, rank in cuts:
        chunks = [_chunk(ranges, parts, part) for part in range(parts)]
        ranges = [one for chunk in chunks for one in _chunk(chunk, ranks, rank)]
    joined: list[_Range] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined


def _chunk(ranges: Sequence[_Range], chunks: int, index: int) -> list[_Range]:
    """Returns one of the chunks into which torch.chunk cuts the elements of the ranges, which may be empty."""
    size = sum(end - begin for begin, end in ranges)
    per_chunk = -(-size // chunks)
    first, last = index * per_chunk, (index + 1) * per_chunk  # counted along the ranges
    found, passed = [], 0
    for begin, end in ranges:
        low, high = max(begin, begin + first - passed), min(end, begin + last - passed)
        if low < high:
            found.append((low, high))
        passed += end - begin
    return found
