"""Schedules of torch.distributed.pipelining with sharded stages: two stages of two ranks each, as with FSDP2 to the last bit."""

from __future__ import annotations

import pytest
import torch
from support.comparison import differences  # noqa: F401  # it makes MKL's products independent of addresses
from support.ranks import ComparedRanks, run_both
from support.states import assert_equal
from support.training import Gradients, full, full_gradients, installed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

import libfsdp

WIDTH, MICROBATCHES, STEPS = 6, 4, 2
# By schedule: how many stages a rank has.
SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
}


def stage_module(number: int) -> nn.Sequential:
    """Two layers, the same wherever they are built."""
    torch.manual_seed(number)
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh(), nn.Linear(11, WIDTH)), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    )


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all microbatches of a data-parallel rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs, targets = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=generator)
    return inputs, targets


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Of a microbatch."""
    return (output - target).square().mean()


def run_pipeline(implementation: str, schedule_name: str) -> tuple[list[list[float]], list[Gradients], int]:
    """Losses by step (on the last stage), then gradients and values of this rank's stages, and how often ours gathered."""
    with installed(implementation):
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stages, at = SCHEDULES[schedule_name], mesh.get_local_rank("pp")
        modules = [stage_module(i * 2 + at) for i in range(stages)]
        for module in modules:
            fully_shard(module[0], mesh=mesh["dp"], reshard_after_forward=False)
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        made = [
            PipelineStage(module, i * 2 + at, 2 * stages, torch.device("cpu"), group=mesh.get_group("pp"))
            for i, module in enumerate(modules)
        ]
        schedule = getattr(schedules, schedule_name)(made[0] if stages == 1 else made, MICROBATCHES, loss_fn=loss_of)
        optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=0.01)
        losses: list[list[float]] = []
        seen: list[Gradients] = []
        for step in range(STEPS):
            inputs, targets = batch(step, mesh.get_local_rank("dp"))
            of_step: list[Tensor] = []
            if at == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets, losses=of_step)
            losses.append([loss.item() for loss in of_step])
            seen += [full_gradients(module) for module in modules]
            optimizer.step()
            optimizer.zero_grad()
        seen += [{name: full(p) for name, p in module.named_parameters()} for module in modules]
        gathers = 0 if implementation == "fsdp2" else sum(libfsdp.wire_stats(m)["all_gathers"] for m in modules)
        return losses, seen, gathers


def in_one_process(stages: int) -> tuple[list[Gradients], list[list[float]]]:
    """The first step's gradients by stage, and its losses by data-parallel rank."""
    models = [stage_module(i) for i in range(stages)]
    whole = nn.Sequential(*models)
    losses: list[list[float]] = []
    for rank in range(2):
        inputs, targets = batch(0, rank)
        of_rank = []
        for x, target in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            loss = loss_of(whole(x), target)
            (loss / (2 * MICROBATCHES)).backward()
            of_rank.append(loss.item())
        losses.append(of_rank)
    return [{name: p.grad for name, p in model.named_parameters()} for model in models], losses


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_fsdp2(compared_ranks: ComparedRanks, schedule: str) -> None:
    ours, theirs = run_both(compared_ranks, 4, run_pipeline, schedule)
    stages = SCHEDULES[schedule]
    expected, losses = in_one_process(2 * stages)
    assert_equal([mine[:2] for mine in ours], [other[:2] for other in theirs])
    for rank, mine in enumerate(ours):
        pp, dp = divmod(rank, 2)
        if pp == 1:
            assert mine[0][0] == pytest.approx(losses[dp])
        for i in range(stages):
            for name, gradient in expected[i * 2 + pp].items():
                torch.testing.assert_close(mine[1][i][name], gradient)
