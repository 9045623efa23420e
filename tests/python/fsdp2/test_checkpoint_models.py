"""libfsdp.save and load with modules, front ends and groups of ranks of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.megatron import ranks_of
from support.ranks import StartRanks
from support.training import full
from torch import nn

import libfsdp
from libfsdp.megatron import fully_shard


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


def unusual_modules(path: str) -> None:
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


def test_modules_with_more_than_tensors(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(2).run(unusual_modules, str(tmp_path / "a"))


def of_megatron(path: str) -> None:
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


def test_megatrons_front_end(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(2).run(of_megatron, str(tmp_path / "a"))


def of_a_group(folder: str) -> None:
    """Two models on ranks of their own, and two stages that save together."""
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


def test_groups_and_stages(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(4).run(of_a_group, str(tmp_path))
