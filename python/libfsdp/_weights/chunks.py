"""Which parts of a whole tensor a rank's DTensor has, as boxes."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    _Range = tuple[int, int]  # begin and end in the whole dimension


class Cut(NamedTuple):
    """One of the cuts of a dimension: all of it, or each of ``parts`` chunks of it, into ``ranks`` chunks of which this is number ``rank``.

    Chunks are those of torch.chunk.
    """

    parts: int
    ranks: int
    rank: int


class LocalBox(NamedTuple):
    """A box of a whole tensor, with this rank's values of it, as a view."""

    offsets: list[int]
    values: torch.Tensor


def local_boxes(tensor: DTensor, local: torch.Tensor) -> list[LocalBox] | None:
    """Returns the boxes that ``local``, the local tensor, has of a DTensor; None if its shape is not what the placements say.

    A dimension may be cut several times: a tensor-parallel piece of it is cut once more by the ranks that shard.
    """
    own = getattr(local, "__create_chunk_list__", None)
    if own is not None:  # By the protocol of torch.distributed.checkpoint, parts that the placements do not tell say where they lie.
        chunks = own()
        if len(chunks) != 1 or list(chunks[0].sizes) != list(local.shape):
            return None
        return [LocalBox(list(chunks[0].offsets), local)]
    of_dimensions = [
        _ranges(size, cuts_of_dimension(tensor, dimension)) for dimension, size in enumerate(tensor.shape)
    ]
    if [sum(end - begin for begin, end in ranges) for ranges in of_dimensions] != list(local.shape):
        return None
    boxes = []
    for chosen in itertools.product(*(range(len(ranges)) for ranges in of_dimensions)):
        values, offsets = local, []
        for dimension, (ranges, i) in enumerate(zip(of_dimensions, chosen, strict=True)):
            first = sum(end - begin for begin, end in ranges[:i])
            begin, end = ranges[i]
            values = values.narrow(dimension, first, end - begin)
            offsets.append(begin)
        boxes.append(LocalBox(offsets, values))
    return boxes


def cuts_of_dimension(tensor: DTensor, dimension: int) -> list[Cut]:
    """Returns the cuts of a dimension in their order.

    Mesh dimensions to the left cut first. A _StridedShard that makes as many parts as those to its right have made cuts
    after them, each of their pieces for itself (FSDP beside tensor parallelism), also where they are uneven.
    """
    mesh = tensor.device_mesh
    cuts: list[Cut] = []
    for of_mesh in reversed(range(len(tensor.placements))):
        placement = tensor.placements[of_mesh]
        if not isinstance(placement, Shard | _StridedShard) or placement.dim != dimension:
            continue
        cut = Cut(1, mesh.size(of_mesh), mesh.get_local_rank(of_mesh))
        parts = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        if parts == 1:
            cuts.insert(0, cut)
        elif parts == math.prod(other.ranks for other in cuts) and all(other.parts == 1 for other in cuts):
            cuts.append(cut)
        else:
            cuts.insert(0, cut._replace(parts=parts))
    return cuts


def _ranges(size: int, cuts: Sequence[Cut]) -> list[_Range]:
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
