"""DTensors whose ranks hold parts of any size, including none: places of parts, unsharded tensors, splits, checkpoints.

DTensor computes a part's place from the rule that all parts but the last ones are equal. Here the ranks exchange the sizes of
what they have. Names and arguments are those of Megatron-FSDP's ``uneven_dtensor``.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "filter_unflattened_state_dict",
    "gather_and_compute_chunk_metadata",
    "gather_uneven_dtensor_to_full_tensor",
    "get_unflattened_state_dict",
    "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated",
    "split_dtensor",
    "uneven_dtensor_to_full_tensor",
    "update_uneven_dtensor_chunk_metadata",
    "validate_uneven_dtensor",
]


@dataclass(frozen=True)
class _Cuts:
    """Which mesh dimensions cut a DTensor."""

    by_dim: dict[int, list[int]]  # tensor dimension: mesh dimensions that cut it, in the order in which they did so

    @property
    def mesh_dims(self) -> list[int]:
        """All of them, ascending."""
        return sorted(m for dims in self.by_dim.values() for m in dims)


def _cuts_of(dtensor: DTensor, name: str) -> _Cuts:
    """Returns the order in which the mesh dimensions have cut the tensor's dimensions.

    Dimensions further to the right cut later, except that a _StridedShard has cut before those that made its split_factor parts.

    Raises:
        ValueError: for other placements than Shard, _StridedShard and Replicate.
    """
    mesh = dtensor.device_mesh
    by_dim: dict[int, list[int]] = {}
    for m in reversed(range(mesh.ndim)):
        placement = dtensor.placements[m]
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise ValueError(
                f"{name}: placement {placement} of mesh dimension {m} is none of Shard, _StridedShard, Replicate"
            )
        order = by_dim.setdefault(placement.dim % dtensor.ndim, [])
        factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
        before = [math.prod(mesh.size(other) for other in order[:k]) for k in range(len(order) + 1)]
        if factor not in before:
            raise ValueError(
                f"{name}: {dtensor.placements} on a mesh of {tuple(mesh.shape)}: no dimensions were cut into {factor}"
            )
        order.insert(before.index(factor), m)
    return _Cuts(by_dim)


def _local_shape(dtensor: DTensor) -> tuple[int, ...]:
    """Returns the sizes of this rank's part. An empty part may have lost its dimensions."""
    local = dtensor._local_tensor
    if local.ndim != dtensor.ndim and local.numel() == 0:
        return (0,) * dtensor.ndim
    return tuple(local.shape)


def _gather(value: Any, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> list[Any]:
    """Returns every rank's value over these mesh dimensions, in the order of their coordinates. Collective."""
    values = [value]
    for m in reversed(mesh_dims):
        group = mesh.get_group(m)
        everyone: list[Any] = [None] * mesh.size(m)
        dist.all_gather_object(everyone, values, group=group)
        values = [one for of_rank in everyone for one in of_rank]
    return values


def _compute_box(name: str, dtensor: DTensor, cuts: _Cuts, shapes: list[tuple[int, ...]]) -> ChunkStorageMetadata:
    """Computes this rank's box from the shapes of all parts.

    Args:
        shapes: the shapes in the order of coordinates on ``cuts.mesh_dims``.

    Raises:
        ValueError: on all ranks, if the parts are not the tensor.
    """
    mesh, whole = dtensor.device_mesh, tuple(dtensor.shape)
    grid = [mesh.size(m) for m in cuts.mesh_dims]
    if any(len(shape) != len(whole) for shape in shapes):
        raise ValueError(f"{name}: parts have the shapes {shapes}, the tensor has {len(whole)} dimensions")
    sizes = torch.tensor(shapes, dtype=torch.int64).reshape(*grid, len(whole))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    here = tuple(coordinate[m] for m in cuts.mesh_dims)
    offsets = []
    for d in range(len(whole)):
        extent = sizes[..., d]
        offset = torch.zeros_like(extent)
        # From the last cut to the first: the parts within one part of the cut before lie side by side.
        for m in reversed(cuts.by_dim.get(d, [])):
            axis = cuts.mesh_dims.index(m)
            offset = offset + extent.cumsum(axis) - extent
            extent = extent.sum(axis, keepdim=True).expand_as(extent)
        # An empty part may be empty in any of its dimensions.
        wrong = (extent != whole[d]) & (sizes.prod(-1) > 0)
        if wrong.any():
            raise ValueError(
                f"{name}, of the shape {list(whole)} and the placements {dtensor.placements}: parts along dimension {d} add up to "
                f"{sorted(set(extent.flatten().tolist()))}, not to {whole[d]}; give each rank its part, and the DTensor the whole shape"
            )
        offsets.append(int(offset[here]))
    if int(sizes.prod(-1).sum()) != math.prod(whole):
        raise ValueError(
            f"{name}, of the shape {list(whole)}: its parts have {int(sizes.prod(-1).sum())} elements; are they of the placements "
            f"{dtensor.placements}?"
        )
    mine = sizes[here].tolist()
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(mine))


def _boxes(dtensors: Mapping[str, DTensor]) -> dict[str, ChunkStorageMetadata]:
    """Each DTensor's box on this rank, by name. One exchange for those on the same mesh that are cut by the same dimensions.

    Collective on all of their meshes. Ranks that are not in a DTensor's mesh get no box of it.

    Raises:
        ValueError: on all ranks of a mesh, if these have other names, or parts that are not the tensor.
    """
    found: dict[str, ChunkStorageMetadata] = {}
    exchanges: dict[tuple[DeviceMesh, tuple[int, ...]], dict[str, _Cuts]] = {}
    for name in sorted(dtensors):
        dtensor = dtensors[name]
        cuts = _cuts_of(dtensor, name)
        if dtensor.device_mesh.get_coordinate() is None:
            continue
        if dist.get_backend(dtensor.device_mesh.get_group(0)) == "fake":  # Its ranks do not exist, and can't exchange anything.
            sizes, offsets = compute_local_shape_and_global_offset(
                dtensor.shape, dtensor.device_mesh, dtensor.placements
            )
            found[name] = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            continue
        exchanges.setdefault((dtensor.device_mesh, tuple(cuts.mesh_dims)), {})[name] = cuts
    for (mesh, mesh_dims), of_it in exchanges.items():
        everyone = _gather([(name, _local_shape(dtensors[name])) for name in of_it], mesh, mesh_dims)
        names = {tuple(name for name, _ in one) for one in everyone}
        if len(names) > 1:
            differing = sorted(set().union(*names) - set.intersection(*map(set, names)))
            raise ValueError(
                f"not all ranks have the DTensors {differing}: give each rank the same names, with empty parts where it has none"
            )
        for i, (name, cuts) in enumerate(of_it.items()):
            found[name] = _compute_box(name, dtensors[name], cuts, [one[i][1] for one in everyone])
    return found


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> ChunkStorageMetadata:
    """Where this rank's part lies. Collective over the mesh dimensions that cut the tensor.

    Args:
        dtensor: a DTensor whose parts, of any size, are the whole together.

    Returns:
        Offsets and sizes, in elements of each dimension.

    Raises:
        ValueError: on all ranks, if the parts are not the tensor, or a placement is none of Shard and Replicate.
    """
    box = _boxes({"DTensor": dtensor}).get("DTensor")
    return box or ChunkStorageMetadata(offsets=torch.Size([0] * dtensor.ndim), sizes=torch.Size([0] * dtensor.ndim))


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Lets torch.distributed.checkpoint know where this rank's part lies. Collective, as above.

    DTensor asks its local tensor for ``__create_chunk_list__`` and ``__create_write_items__``; these are set there.

    Args:
        dtensor: a DTensor whose parts, of any size, are the whole together.
    """
    _attach(dtensor, gather_and_compute_chunk_metadata(dtensor))


def _attach(dtensor: DTensor, box: ChunkStorageMetadata) -> None:
    # Where a part is empty, there is nothing to write and nothing to read. Every rank writes a tensor without elements, because a
    # checkpoint must have its name; DCP takes one of them.
    boxes = [box] if math.prod(box.sizes) > 0 or dtensor.numel() == 0 else []

    def create_write_items(name: str, tensor: DTensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(tensor._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(name, one.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=one, properties=properties, size=tensor.size()),
            )
            for one in boxes
        ]

    local: Any = dtensor._local_tensor
    setattr(local, "__create_chunk_list__", lambda: list(boxes))  # noqa: B010  # a class would mangle the name
    setattr(local, "__create_write_items__", create_write_items)  # noqa: B010


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Checks that the parts of all ranks are the tensor: none reaches out of it, and nothing of it is missing. Collective.

    Raises:
        ValueError: on all ranks, if not.
    """
    gather_and_compute_chunk_metadata(dtensor)


def filter_unflattened_state_dict(
    state_dict: Mapping[Any, Any],
    key_chain: Sequence[Any] = (),
    visit_condition: Callable[[Any], bool] = lambda _: False,
) -> list[list[Any]]:
    """Returns the paths of those values in nested dictionaries for which ``visit_condition`` is true.

    Args:
        state_dict: a dictionary of values and dictionaries.
        key_chain: the keys with which all paths begin.
        visit_condition: called with each value that is not a dictionary.

    Returns:
        Lists of keys, in the order of the dictionaries.
    """
    paths: list[list[Any]] = []
    for key, value in state_dict.items():
        path = [*key_chain, key]
        if isinstance(value, dict):
            paths += filter_unflattened_state_dict(value, path, visit_condition)
        elif visit_condition(value):
            paths.append(path)
    return paths


def get_unflattened_state_dict(state_dict: Any, key_chain: Sequence[Any] = ()) -> Any:
    """Returns the value at a path in nested dictionaries.

    Raises:
        KeyError: if there is none.
    """
    value = state_dict
    for key in key_chain:
        if not isinstance(value, dict) or key not in value:
            raise KeyError(f"there is no {list(key_chain)} in the state dict: {key!r} is missing")
        value = value[key]
    return value


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[Any, Any]) -> dict[Any, Any]:
    """Lets torch.distributed.checkpoint know where the parts of all DTensors of a state dict lie.

    Collective: all ranks have the same names. One exchange for all of them, if they are cut alike.

    Args:
        state_dict: a dictionary of values and dictionaries.

    Returns:
        The same object.

    Raises:
        ValueError: on all ranks, if names differ, or parts are not their tensor.
    """
    paths = filter_unflattened_state_dict(state_dict, visit_condition=lambda value: isinstance(value, DTensor))
    dtensors = {".".join(map(str, path)): get_unflattened_state_dict(state_dict, path) for path in paths}
    boxes = _boxes(dtensors)
    nothing = ChunkStorageMetadata(offsets=torch.Size([]), sizes=torch.Size([0]))
    for name, dtensor in dtensors.items():
        _attach(dtensor, boxes.get(name, nothing))
    return state_dict


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> Tensor:
    """The whole tensor, on every rank. Collective over the mesh dimensions that cut it.

    Args:
        dtensor: a DTensor whose parts, of any size, are the whole together.

    Returns:
        A plain tensor, not recorded by autograd. At its peak, twice its memory is in use.

    Raises:
        TypeError: if it is no DTensor.
        ValueError: on all ranks, if the parts are not the tensor.
    """
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"uneven_dtensor_to_full_tensor takes a DTensor, not {type(dtensor).__name__}")
    gather_and_compute_chunk_metadata(dtensor)
    cuts, mesh = _cuts_of(dtensor, "DTensor"), dtensor.device_mesh
    piece = dtensor._local_tensor.detach().reshape(_local_shape(dtensor))
    # Each step undoes the last remaining cut of one dimension.
    for d, order in cuts.by_dim.items():
        for m in reversed(order):
            piece = _join(piece, d, mesh, m)
    whole = piece.reshape(dtensor.shape)
    return whole.clone() if whole.data_ptr() == dtensor._local_tensor.data_ptr() else whole


def _join(piece: Tensor, d: int, mesh: DeviceMesh, m: int) -> Tensor:
    """Joins the pieces of the ranks along one mesh dimension. Each is sent in its size, without padding."""
    group = mesh.get_group(m)
    shapes = _gather(tuple(piece.shape), mesh, [m])
    mine = mesh.get_local_rank(m)
    pieces = [piece.contiguous() if rank == mine else piece.new_empty(shape) for rank, shape in enumerate(shapes)]
    works = [
        # Pieces are sent as bytes, because backends do not know all dtypes.
        dist.broadcast(
            one.view(-1).view(torch.uint8), src=dist.get_global_rank(group, rank), group=group, async_op=True
        )
        for rank, one in enumerate(pieces)
        if one.numel() > 0
    ]
    for work in works:
        assert work is not None
        work.wait()
    # An empty piece may differ in the other dimensions.
    return torch.cat([one for one in pieces if one.numel() > 0], dim=d) if works else piece.new_empty(shapes[0])


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """The tensor as a DTensor that all ranks of the mesh have as a whole. Collective, as above.

    Args:
        dtensor: a DTensor whose parts, of any size, are the whole together.

    Returns:
        Another DTensor on the same mesh.
    """
    whole = uneven_dtensor_to_full_tensor(dtensor)
    return DTensor.from_local(whole, dtensor.device_mesh, [Replicate()] * dtensor.device_mesh.ndim, run_check=False)


def gather_uneven_dtensor_to_full_tensor(dtensor: DTensor) -> DTensor:
    """The older name of redistribute_uneven_dtensor_to_replicated."""
    warnings.warn(
        "gather_uneven_dtensor_to_full_tensor is called redistribute_uneven_dtensor_to_replicated now",
        DeprecationWarning,
        stacklevel=2,
    )
    return redistribute_uneven_dtensor_to_replicated(dtensor)


def split_dtensor(
    dtensor: DTensor,
    split_size_or_sections: int | list[int],
    dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:
    """Splits as torch.split does. Each rank keeps what it has: nothing is moved or copied.

    Collective over the mesh dimensions that cut the tensor, at once, not as the parts are taken.

    Args:
        dtensor: a DTensor whose parts, of any size, are the whole together.
        split_size_or_sections: the length of all sections but the last, or of each.
        dim: the dimension along which it is split.
        update_uneven_dtensor_chunk_meta: the results are ready for torch.distributed.checkpoint.

    Returns:
        DTensors with the same placements, of which ranks may have empty parts. Their memory is the tensor's.

    Raises:
        ValueError: if the sections do not add up to the tensor's length, or its parts are not the tensor.
    """
    dim = dim % dtensor.ndim
    length = dtensor.shape[dim]
    if isinstance(split_size_or_sections, int):
        if split_size_or_sections <= 0:
            raise ValueError(f"split_dtensor: sections of the length {split_size_or_sections}; it must be positive")
        size = split_size_or_sections
        sections = [min(size, length - start) for start in range(0, length, size)]
    else:
        sections = list(split_size_or_sections)
        if sum(sections) != length or any(section < 0 for section in sections):
            raise ValueError(
                f"split_dtensor: the sections {sections} are none of dimension {dim}, whose length is {length}"
            )
    box = gather_and_compute_chunk_metadata(dtensor)
    return _sections(dtensor, sections, dim, box, attach=update_uneven_dtensor_chunk_meta)


def _sections(
    dtensor: DTensor, sections: list[int], dim: int, box: ChunkStorageMetadata, *, attach: bool
) -> Iterator[DTensor]:
    local = dtensor._local_tensor.reshape(_local_shape(dtensor))
    first, last = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    start = 0
    for section in sections:
        begin = min(max(start, first), last)
        end = max(min(start + section, last), begin)
        shape, offsets, sizes = list(dtensor.shape), list(box.offsets), list(box.sizes)
        shape[dim], offsets[dim], sizes[dim] = section, max(begin - start, 0), end - begin
        stride = torch.empty(shape, device="meta").stride()
        part = DTensor.from_local(
            local.narrow(dim, begin - first, end - begin),
            dtensor.device_mesh,
            dtensor.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
        if attach:
            _attach(part, ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))
        yield part
        start += section
