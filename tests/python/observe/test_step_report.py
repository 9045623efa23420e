"""Step reports: who was late, for what a rank waited, and that times, bytes and memory are those of the statistics."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.strategies import a_step, every_strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import libfsdp

SLEEPY = 1
SLEEP_S = 0.3
MOST_OF_IT_MS = 200.0


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.sleeps = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(self.in_backward)
        if self.sleeps == "forward":
            time.sleep(SLEEP_S)
        return y

    def in_backward(self, gradient: torch.Tensor) -> None:
        if self.sleeps == "backward":
            time.sleep(SLEEP_S)


def sharded_blocks(mesh: DeviceMesh | None = None) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block() for _ in range(4)))
    for block in model:
        libfsdp.fully_shard(block, mesh=mesh)
    return libfsdp.fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 1), (4, 2)])
@on_ranks("size")
def test_a_late_rank_is_named(replicas: int) -> None:
    """With replicas, rank 2 waits for rank 0, which waits for the late one: that one is the cause."""
    shape = (replicas, dist.get_world_size() // replicas)
    model = sharded_blocks(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if replicas > 1 else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(model, optimizer, 3)
    for number, place, expected in (
        (1, "forward", "in forward of '1'"),
        (2, "forward", "in forward of '2'"),
        (2, "backward", "in backward"),
    ):
        for _chance in range(3):  # A busy machine may make another rank late, too.
            model[number].sleeps = place if dist.get_rank() == SLEEPY else ""
            steps(model, optimizer, 1)
            model[number].sleeps = ""
            report = libfsdp.step_report(model)
            longest = report.waits[0]
            told = report.slowest_ranks[0][0] == SLEEPY
            if dist.get_rank() != SLEEPY:
                told = told and longest.late_rank == SLEEPY and longest.late_rank_was.startswith(expected)
                told = told and f"'{number}'" in longest.late_rank_was
                told = told and longest.reasons["late rank"] > MOST_OF_IT_MS and str(SLEEPY) in report.line
            everywhere = torch.tensor(float(told))
            dist.all_reduce(everywhere, dist.ReduceOp.MIN)
            if everywhere.item():
                break
        else:
            raise AssertionError(f"{place} of {number}: {report}")


@on_ranks(2)
def test_numbers_are_those_of_the_statistics() -> None:
    model = sharded_blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="first forward"):
        libfsdp.step_report(model)
    steps(model, optimizer, 2)
    before = libfsdp.wire_stats(model)
    steps(model, optimizer, 3)
    after = libfsdp.wire_stats(model)
    report = libfsdp.step_report(model, steps=3)
    assert report.steps == 3
    total = sum(after[name] - before[name] for name in after if name.endswith("_bytes") and name != "shared_memory_bytes")
    assert 3 * (report.sent_bytes + report.shared_memory_bytes) == total
    assert report.forward_ms + report.backward_ms + report.between_ms == pytest.approx(report.step_ms)
    assert report.compute_ms + report.exposed_ms == pytest.approx(report.step_ms)
    assert sum(report.reasons.values()) == pytest.approx(report.exposed_ms)
    assert sum(waits.ms for waits in report.waits) == pytest.approx(report.exposed_ms)
    assert set(report.reasons) == {"late rank", "prefetch", "queue", "link", "host"}
    scalars = report.scalars()
    assert scalars["step_ms"] == report.step_ms
    assert scalars["waits/late_rank_ms"] == report.reasons["late rank"]
    assert all(isinstance(value, float) for value in scalars.values())
    assert str(report).startswith(report.line)
    with pytest.raises(libfsdp.Error, match="steps must be positive, got 0"):
        libfsdp.step_report(model, steps=0)
    with pytest.raises(ValueError, match="not sharded"):
        libfsdp.step_report(nn.Linear(1, 1))


@pytest.mark.parametrize("size", [2, 4])
@on_ranks("size")
def test_every_strategy_has_a_report() -> None:
    for model, optimizer, _ in every_strategy():
        for step in (1, 2):
            a_step(model, "transformer", step, optimizer)
        report = libfsdp.step_report(model, steps=2)
        assert report.steps == 2
        assert 0 < report.exposed_ms < report.step_ms
        assert 0 <= report.overlap <= 1
        assert len(report.slowest_ranks) == min(3, dist.get_world_size())
        assert report.peak_bytes > 0


@on_ranks(2)
def test_accumulation_is_one_step() -> None:
    model = sharded_blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(model, optimizer, 1)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 8)).square().mean().backward()
    model.set_requires_gradient_sync(True)
    steps(model, optimizer, 1)
    assert libfsdp.step_report(model, steps=10).steps == 2


@pytest.mark.parametrize(("before_the_first_forward", "inner"), [(True, False), (False, False), (False, True)])
@on_ranks(2)
def test_backwards_before_the_last_are_of_its_step(before_the_first_forward: bool, inner: bool) -> None:
    model = sharded_blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not before_the_first_forward:
        steps(model, optimizer, 1)
    for _ in range(2):
        for microbatch in range(3):
            (model[0] if inner else model).set_is_last_backward(microbatch == 2)
            model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert libfsdp.step_report(model, steps=10).steps == (2 if before_the_first_forward else 3)
