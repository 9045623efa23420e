"""Plans over parameters that are tensor-parallel pieces: a shard is a box of the piece, and the piece a box of the whole, even or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import libfsdp
from libfsdp import WantedBox, transfer_plan
from libfsdp._weights.chunks import local_chunks

ALL = [0, 1, 2, 3]


def make(hidden: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, hidden), nn.Linear(hidden, 4), nn.Linear(4, 3))


def pieces_of(hidden: int, mesh: DeviceMesh) -> nn.Sequential:
    """The layers by rows, by columns, and on all tensor-parallel ranks."""
    model = make(hidden)
    layers: Any = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], layers, src_data_rank=None)
    return model


def wholes(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in model.state_dict().items()
    }


def check_plan(model: nn.Module, expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Every rank gets all, and columns of some."""
    into = {name: torch.full(value.shape, -1.0, dtype=dtype) for name, value in expected.items()}
    columns = torch.full((6, 4), -1.0, dtype=dtype).t()
    wanted = [WantedBox(name, tensor) for name, tensor in into.items()]
    wanted.append(WantedBox("1.weight", columns, offsets=(0, 1)))
    plan = transfer_plan(model, ALL, wanted=wanted, message_bytes=64)
    plan.run()
    for name, value in expected.items():
        assert torch.equal(into[name], value.to(dtype)), name
    assert torch.equal(columns, expected["1.weight"][:, 1:7].to(dtype))
    bytes_of = sum(value.numel() for value in expected.values()) * dtype.itemsize
    for rank in ALL:  # What a rank has itself does not travel, and the rest does once.
        received = sum(n for (_, receiver), n in plan.bytes_sent.items() if receiver == rank)
        assert 0 < received < bytes_of


@pytest.mark.parametrize(
    ("hidden", "replicas", "shard_dim", "dtype"),
    [
        (8, 1, 0, torch.float32),
        (8, 1, 1, torch.bfloat16),
        (8, 2, 0, torch.float32),
        (7, 1, 0, torch.float32),
        (9, 1, 0, torch.bfloat16),
    ],
    ids=["even", "columns", "replicas", "uneven", "uneven-bf16"],
)
@on_ranks(4)
def test_tensor_parallel_pieces(hidden: int, replicas: int, shard_dim: int, dtype: torch.dtype) -> None:
    torch.set_default_device(device.of_rank(dist.get_rank()))
    mesh = init_device_mesh(device.TYPE, (replicas, 2 // replicas, 2), mesh_dim_names=("replicate", "dp", "tp"))
    data = mesh["replicate", "dp"] if replicas > 1 else mesh["dp"]
    plain = wholes(make(hidden))
    model = pieces_of(hidden, mesh)

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(min(shard_dim, parameter.ndim - 1))

    for layer in (*model, model):
        libfsdp.fully_shard(layer, mesh=data, shard_placement_fn=place)
    check_plan(model, plain, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    check_plan(model, {name: value - 0.1 for name, value in plain.items()}, dtype)
    check_plan(model, wholes(model), dtype)


@on_ranks(4)
def test_boxes_of_all_placements() -> None:
    mesh = init_device_mesh(device.TYPE, (2, 2), mesh_dim_names=("dp", "tp"))
    choices: list[tuple[Placement, Placement]] = [
        (first, second)
        for first in (Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2))
        for second in (Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3))
    ]
    several = 0
    for shape in ((8, 6), (7, 5), (3, 1), (1, 9), (12, 13)):
        whole = torch.arange(shape[0] * shape[1]).view(shape)
        counts = torch.zeros(shape, dtype=torch.int32)
        for placements in choices:
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            boxes = local_chunks(tensor, tensor._local_tensor)
            assert boxes is not None, (shape, placements)
            several += len(boxes) > 1
            counts.zero_()
            for offsets, values in boxes:
                part = tuple(slice(begin, begin + size) for begin, size in zip(offsets, values.shape, strict=True))
                assert torch.equal(whole[part], values), (shape, placements)
                counts[part] += 1
            assert counts.sum() == tensor._local_tensor.numel(), (shape, placements)
            dist.all_reduce(counts)
            times = 1
            for placement in placements:
                times *= 2 if isinstance(placement, Replicate) else 1
            assert torch.equal(counts, torch.full(shape, times, dtype=torch.int32)), (shape, placements)
    assert several > 0
    narrow = tensor._local_tensor[:-1]
    assert local_chunks(tensor, narrow) is None


@on_ranks(4)
def test_parts_that_are_several_boxes_and_parts_that_are_none() -> None:
    mesh = init_device_mesh(device.TYPE, (2, 2), mesh_dim_names=("dp", "tp"))
    model = make(8)
    libfsdp.fully_shard(model, mesh=mesh["dp"])
    model.register_buffer("pending", DTensor.from_local(torch.ones(2), mesh["tp"], [Partial()]))
    model.register_buffer("glued", distribute_tensor(torch.arange(8), mesh["tp"], [_StridedShard(0, split_factor=2)]))
    with pytest.raises(libfsdp.Error, match=r"rank 0 of the group: 'pending' has the placements .* a sum that is pending"):
        transfer_plan(model, ALL)
    model.pending = None
    into = torch.empty(8, dtype=torch.long)
    transfer_plan(model, ALL, wanted=[WantedBox("glued", into)]).run()
    assert torch.equal(into, torch.arange(8))
    model.glued = DTensor(torch.ones(3), model.glued._spec, requires_grad=False)
    with pytest.raises(libfsdp.Error, match=r"'glued': this rank's part, of the shape \[3\], is not what its placements"):
        transfer_plan(model, ALL)
