"""libfsdp.save and load with modules, front ends and groups of ranks of all kinds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.marks import on_ranks
from support.megatron import ranks_of
from support.ranks import StartRanks
from support.training import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import libfsdp
from libfsdp.megatron import fully_shard

DIMS = ("replicate", "shard", "tp")


class WithExtraState(nn.Module):
    """A module that has more than tensors, and a buffer whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))
        self.register_buffer("table", torch.zeros(1, 3).expand(2, 3))
        self.history: list[int] = []

    def get_extra_state(self) -> Any:
        return {"history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.history = state["history"]


@on_ranks(2)
def test_modules_with_more_than_tensors(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    model, other = WithExtraState(), WithExtraState()
    model.history = [1, 2]
    model.table = torch.arange(3.0).view(1, 3).expand(2, 3)
    for one in (model, other):
        libfsdp.fully_shard(one)
    compiled = torch.compile(model)  # its names do not count
    libfsdp.save(path, compiled)
    libfsdp.load(path, other)
    assert other.history == [1, 2]
    assert torch.equal(other.table, model.table)


@on_ranks(2)
def test_megatrons_front_end(tmp_path: Path) -> None:
    path = str(tmp_path / "a")

    def make() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return fully_shard(model, optimizer, fsdp_unit_modules=[nn.Linear], **ranks_of("fsdp"))

    def steps(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(2):
            loss = model(torch.ones(2, 5) * (step + dist.get_rank())).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = make()
    steps(model, optimizer)
    libfsdp.save(path, model, optimizer)
    expected = steps(model, optimizer)
    other, its = make()
    libfsdp.load(path, other, its)
    assert steps(other, its) == expected


@on_ranks(4)
def test_groups_and_stages(tmp_path: Path) -> None:
    """Two models on ranks of their own, and two stages that save together."""
    folder = str(tmp_path)
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    mesh = dist.device_mesh.DeviceMesh.from_group(mine, "cpu")
    stage: Any = nn.ModuleDict({f"stage_{rank // 2}": nn.Linear(4, 4)})
    libfsdp.fully_shard(stage[f"stage_{rank // 2}"], mesh=mesh)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    libfsdp.save(f"{folder}/of_group_{rank // 2}", stage, optimizer, process_group=mine)
    libfsdp.save(f"{folder}/together", stage, optimizer)
    expected = [full(p) for p in stage.parameters()]
    for path, group in ((f"{folder}/of_group_{rank // 2}", mine), (f"{folder}/together", None)):
        with torch.no_grad():
            for p in stage.parameters():
                p.zero_()
        libfsdp.load(path, stage, optimizer, process_group=group, strict=group is None)
        assert all(map(torch.equal, map(full, stage.parameters()), expected))

    # All ranks know what one stage misses.
    if rank // 2 == 1:
        stage["more"] = nn.Linear(4, 4)
        libfsdp.fully_shard(stage["more"], mesh=mesh)
    with pytest.raises(libfsdp.Error, match=r"missing in the checkpoint:\n    model.more.bias\n    model.more.weight\n  \("):
        libfsdp.load(f"{folder}/together", stage)
    assert libfsdp.load(f"{folder}/together", stage, strict=False).missing == ["model.more.bias", "model.more.weight"]


def partly_tensor_parallel(sizes: tuple[int, int, int], seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """A model of which tensor parallelism cuts two layers, and leaves an embedding, two norms and a bias as they are."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=DIMS)
    torch.manual_seed(seed)
    layers = [nn.Embedding(5, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)]
    model: Any = nn.Sequential(*layers)
    parallelize_module(model, mesh["tp"], {"2": ColwiseParallel(), "3": RowwiseParallel()})
    libfsdp.fully_shard(model, mesh=mesh["replicate", "shard"] if sizes[0] > 1 else mesh["shard"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def values_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The whole values of all parameters and buffers, and of their state."""
    values = {name: full(value) for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        values |= {f"{name}.{kind}": full(value) for kind, value in optimizer.state[p].items()}
    return {name: value.clone() for name, value in values.items()}


def save_partly_tensor_parallel(path: str, sizes: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    model, optimizer = partly_tensor_parallel(sizes, seed=0)
    for step in range(2):
        model((torch.arange(5) + step) % 5).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    libfsdp.save(path, model, optimizer)
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for name, p in model.named_parameters():  # each element once, which the files have once, too
        chunks = stored[f"model.{name}"].chunks
        assert sum(torch.Size(chunk.sizes).numel() for chunk in chunks) == p.numel()
    return values_of(model, optimizer)


def load_partly_tensor_parallel(path: str, sizes: tuple[int, int, int], expected: dict[str, torch.Tensor]) -> None:
    model, optimizer = partly_tensor_parallel(sizes, seed=1)
    libfsdp.load(path, model, optimizer)
    loaded = values_of(model, optimizer)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    other, _ = partly_tensor_parallel(sizes, seed=2)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state["model"])
    assert all(torch.equal(full(value), expected[name]) for name, value in other.state_dict().items())


def test_parameters_that_tensor_parallelism_leaves_as_they_are(ranks: StartRanks, tmp_path: Path) -> None:
    """Ranks of several meshes hold the same parts of them."""
    for saved, loads in (
        ((1, 2, 2), ((1, 2, 2), (1, 4, 1), (1, 1, 2), (1, 2, 1))),
        ((2, 1, 2), ((1, 2, 1),)),
        ((1, 1, 2), ((1, 2, 2),)),
    ):
        path = str(tmp_path / str(saved))
        expected = ranks(math.prod(saved)).run(save_partly_tensor_parallel, path, saved)[0]
        for sizes in loads:
            ranks(math.prod(sizes)).run(load_partly_tensor_parallel, path, sizes, expected)
