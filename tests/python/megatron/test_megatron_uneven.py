"""DTensors with parts of any size: whole tensors, splits, and checkpoints that are loaded on other numbers of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.marks import at_night, on_ranks
from support.ranks import RankError, StartRanks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from libfsdp.megatron import uneven_dtensor as uneven

# Rows of each rank of two and of four: equal, none for some, all for one.
CUTS = {2: ([4, 3], [0, 7], [7, 0]), 4: ([2, 2, 2, 1], [0, 5, 0, 2], [0, 0, 0, 7], [3, 0, 4, 0]), 1: ([7],)}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Different ones, as far as the dtype goes."""
    count = int(torch.tensor(shape).prod())
    return torch.arange(count, dtype=torch.float32).reshape(shape).to(dtype)


def cut(whole: Tensor, sizes: list[int], dim: int = 0) -> DTensor:
    """Of all ranks: as many rows, or columns, as `sizes` says."""
    rank = dist.get_rank()
    local = whole.split(sizes, dim)[rank].clone()
    mesh = init_device_mesh("cpu", (len(sizes),))
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())


def bits(tensor: Tensor) -> list[int]:
    """All bytes."""
    return list(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("size", [1, 2, at_night(4)])
@on_ranks("size")
def test_parts_become_the_whole_and_sections() -> None:
    """One dimension cut by one mesh dimension."""
    world = dist.get_world_size()
    for sizes, dim, dtype in itertools.product(CUTS[world], (0, 1), DTYPES):
        whole = numbers((7, 5) if dim == 0 else (5, 7), dtype)
        dtensor = cut(whole, sizes, dim)
        box = uneven.gather_and_compute_chunk_metadata(dtensor)
        assert box.offsets[dim] == sum(sizes[: dist.get_rank()])
        assert box.sizes == dtensor.to_local().shape
        assert bits(uneven.uneven_dtensor_to_full_tensor(dtensor)) == bits(whole)
        everywhere = uneven.redistribute_uneven_dtensor_to_replicated(dtensor)
        assert everywhere.placements == (Replicate(),)
        assert bits(everywhere.to_local()) == bits(whole)
        for along, sections in ((dim, [3, 0, 4]), (dim, 3), (1 - dim, 2), (-1, 4)):
            expected = whole.split(sections, along)
            found = list(uneven.split_dtensor(dtensor, sections, along, update_uneven_dtensor_chunk_meta=True))
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert one.shape == other.shape
                assert one.stride() == torch.empty(other.shape).stride()
                assert bits(uneven.uneven_dtensor_to_full_tensor(one)) == bits(other)


@on_ranks(4)
def test_two_mesh_dimensions() -> None:
    """As torch cuts, which is the reference: every pair of placements, on lengths that four ranks do not divide."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = numbers((7, 5, 3))
    pairs: list[tuple[Placement, Placement]] = [
        *itertools.product((Shard(0), Shard(1), Shard(2), Replicate()), repeat=2),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (_StridedShard(1, split_factor=2), Shard(1)),
    ]
    for pair in pairs:
        strided = isinstance(pair[0], _StridedShard)
        if strided:
            # The second mesh dimension cut first, then the first one what was left.
            d = pair[0].dim
            row, column = mesh.get_coordinate() or (0, 0)
            local = whole.tensor_split(2, d)[column].tensor_split(2, d)[row].contiguous()
            dtensor = DTensor.from_local(local, mesh, pair, run_check=False, shape=whole.shape, stride=whole.stride())
        else:
            dtensor = distribute_tensor(whole, mesh, pair)
        box = uneven.gather_and_compute_chunk_metadata(dtensor)
        here = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        assert torch.equal(whole[here], dtensor.to_local()), pair
        assert torch.equal(uneven.uneven_dtensor_to_full_tensor(dtensor), whole), pair


@on_ranks(2)
def test_a_state_dict_takes_one_exchange() -> None:
    """Ranks talk to each other once to describe ten DTensors, and a value."""
    world = dist.get_world_size()
    state: dict[str, Any] = {str(i): {"a": cut(numbers((7, 5)), CUTS[world][1])} for i in range(10)}
    state["lr"] = 0.1
    with mock.patch.object(dist, "all_gather_object", side_effect=dist.all_gather_object) as gather:
        assert uneven.preprocess_state_dict_for_uneven_dtensor(state) is state
    assert gather.call_count == 1


def state_of(sizes: list[int], fill: bool) -> dict[str, Any]:
    """Cut rows and columns, something empty, something replicated."""
    wholes = {"rows": numbers((7, 5)), "cube": numbers((7, 2, 2), torch.bfloat16), "line": numbers((7,), torch.int64)}
    state: dict[str, Any] = {
        name: cut(whole if fill else torch.zeros_like(whole), sizes) for name, whole in wholes.items()
    }
    columns = numbers((5, 7))
    state["nested"] = {"columns": cut(columns if fill else torch.zeros_like(columns), sizes, dim=1)}
    state["nothing"] = cut(torch.zeros(0, 5), [0] * len(sizes))
    mesh = init_device_mesh("cpu", (len(sizes),))
    everywhere = numbers((3,)) if fill else torch.zeros(3)
    state["everywhere"] = DTensor.from_local(everywhere, mesh, [Replicate()], run_check=False)
    return uneven.preprocess_state_dict_for_uneven_dtensor(state)


def save(path: Path, sizes: list[int]) -> None:
    dcp.save(state_of(sizes, fill=True), checkpoint_id=path)


def load(path: Path, sizes: list[int]) -> None:
    found, expected = state_of(sizes, fill=False), state_of(sizes, fill=True)
    dcp.load(found, checkpoint_id=path)
    for name in ("rows", "cube", "line", "everywhere"):
        assert torch.equal(found[name].to_local(), expected[name].to_local()), name
    assert torch.equal(found["nested"]["columns"].to_local(), expected["nested"]["columns"].to_local())


def test_checkpoints_are_loaded_on_other_numbers_of_ranks(ranks: StartRanks, tmp_path: Path) -> None:
    """From any cut of two and of four ranks to any of one, two and four; and into plain tensors."""
    for writers in (2, 4):
        for i, written in enumerate(CUTS[writers]):
            path = tmp_path / f"{writers}-{i}"
            ranks(writers).run(save, path, written)
            for readers, cuts in CUTS.items():
                for wanted in cuts:
                    ranks(readers).run(load, path, wanted)
            plain = {"rows": torch.zeros(7, 5), "nested.columns": torch.zeros(5, 7), "nothing": torch.zeros(0, 5)}
            dcp.load(plain, checkpoint_id=path, no_dist=True)
            assert torch.equal(plain["rows"], numbers((7, 5)))
            assert torch.equal(plain["nested.columns"], numbers((5, 7)))


@on_ranks(2)
def test_empty_parts_write_and_read_nothing() -> None:
    """The last rank has all of the tensor."""
    dtensor: Any = cut(numbers((7, 5)), CUTS[dist.get_world_size()][1])
    uneven.update_uneven_dtensor_chunk_metadata(dtensor)
    items = dist.get_rank()
    assert len(dtensor.__create_write_items__("x", dtensor)) == len(dtensor.__create_chunk_list__()) == items


@on_ranks(2)
def test_every_rank_is_told_what_is_wrong() -> None:
    """Seven rows are said to be eight."""
    local = torch.zeros([4, 3][dist.get_rank()], 5)
    mesh = init_device_mesh("cpu", (2,))
    wrong = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 5)), stride=(5, 1))
    with pytest.raises(ValueError, match=r"dimension 0 add up to \[7\], not to 8"):
        uneven.validate_uneven_dtensor(wrong)
    partial = DTensor.from_local(local, mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match="none of Shard"):
        uneven.uneven_dtensor_to_full_tensor(partial)
    right = cut(numbers((7, 5)), [4, 3])
    uneven.validate_uneven_dtensor(right)
    mine = {"a": right} if dist.get_rank() == 0 else {"a": right, "b": right}
    with pytest.raises(ValueError, match=r"not all ranks have the DTensors \['b'\]"):
        uneven.preprocess_state_dict_for_uneven_dtensor(mine)
    with pytest.raises(ValueError, match=r"sections \[3, 3\] are none of dimension 0"):
        uneven.split_dtensor(right, [3, 3])
    with pytest.raises(TypeError, match="takes a DTensor, not Tensor"):
        uneven.uneven_dtensor_to_full_tensor(torch.zeros(2))
    with pytest.warns(DeprecationWarning, match="redistribute_uneven"):
        uneven.gather_uneven_dtensor_to_full_tensor(right)


def test_a_load_without_the_description_goes_wrong(ranks: StartRanks, tmp_path: Path) -> None:
    """DTensor's own rule puts these parts elsewhere: without what is tested here, values land in other rows or an error comes."""
    with pytest.raises(RankError):
        ranks(2).run(save_and_load_by_rule, tmp_path / "by-rule")


def save_and_load_by_rule(path: Path) -> None:
    state = {"rows": cut(numbers((7, 5)), [0, 7])}
    dcp.save(state, checkpoint_id=path)
    plain = {"rows": torch.zeros(7, 5)}
    dcp.load(plain, checkpoint_id=path, no_dist=True)
    assert torch.equal(plain["rows"], numbers((7, 5)))


def test_paths_of_nested_dictionaries() -> None:
    state = {"a": {"b": 1, "c": {"d": 2.5}}, "e": 3}
    assert uneven.filter_unflattened_state_dict(state, visit_condition=lambda v: isinstance(v, int)) == [
        ["a", "b"],
        ["e"],
    ]
    assert uneven.get_unflattened_state_dict(state, ["a", "c", "d"]) == 2.5
    with pytest.raises(KeyError, match="'x' is missing"):
        uneven.get_unflattened_state_dict(state, ["a", "x"])
