"""Compares simulated steps with steps of real ranks that sleep where they would compute.

Each rank sleeps in forward and backward of each block: for as long as the block takes, times a factor of its own. Both are
drawn by a seed. Sleeping takes no processor, so 4 ranks on 2 processors are as good as 4 machines. The simulation knows the
plan, these times and factors, and one number of the machine, which is calibrated first with other sleeps that are equal on all
blocks and ranks: what a block takes beside its sleeps, for its operators and the collectives of its few bytes. Printed are this number, the
median of the measured steps with their range, the simulated step, and the ratio of the two; for each world and draw.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from harness.machine import describe_machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import libfsdp

WORLDS = {"2 ranks": (1, 2), "4 ranks": (1, 4), "2 replicas of 2 ranks": (2, 2)}
BLOCKS, WIDTH, STEPS, WARM_UP = 6, 8, 12, 4
CALIBRATION = [libfsdp.UnitTime(10, 20)] * BLOCKS


class SleepInBackward(torch.autograd.Function):
    """Passes a tensor on; backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()  # A view would be warned of.

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    """A layer whose forward and backward take a while."""

    def __init__(self, unit: libfsdp.UnitTime) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.unit = unit
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.factor * self.unit.forward_ms / 1e3)
        return SleepInBackward.apply(torch.tanh(self.layer(x)), self.factor * self.unit.backward_ms / 1e3)


def drawn(seed: int, ranks: int) -> tuple[list[libfsdp.UnitTime], list[float]]:
    """The times of the blocks, and the factors of the ranks."""
    draw = random.Random(seed)
    units = [libfsdp.UnitTime(draw.uniform(5, 25), draw.uniform(10, 50)) for _ in range(BLOCKS)]
    return units, [draw.uniform(0.7, 1.3) for _ in range(ranks)]


def measured(units: list[libfsdp.UnitTime], factor: float, replicas: int, ranks: int) -> list[float]:
    """Milliseconds of each step, on the rank that ends last."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(unit) for unit in units))
    names = ("replicate", "shard") if replicas > 1 else ("shard",)
    sizes = (replicas, ranks) if replicas > 1 else (ranks,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for block in model:
        libfsdp.fully_shard(block, mesh=mesh)
        block.factor = factor
    model = libfsdp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ends = torch.zeros(STEPS + WARM_UP, dtype=torch.float64)
    for step in range(STEPS + WARM_UP):
        model(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends[step] = time.time()
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return [1e3 * float(later - earlier) for earlier, later in zip(ends[WARM_UP - 1 : -1], ends[WARM_UP:], strict=True)]


def run_as_a_rank(draws: int, replicas: int, ranks: int) -> None:
    """Measures the calibration and each draw; rank 0 prints the times as JSON."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    times = [measured(CALIBRATION, 1.0, replicas, ranks)]
    for seed in range(draws):
        units, factors = drawn(seed, replicas * ranks)
        times.append(measured(units, factors[dist.get_rank()], replicas, ranks))
    if dist.get_rank() == 0:
        print(json.dumps(times), flush=True)
    dist.destroy_process_group()


def simulated(seed: int, replicas: int, ranks: int, host_ms: float) -> float:
    """Milliseconds of a step; `host_ms` are those that a block takes beside its sleeps, half of it in forward."""
    units, factors = drawn(seed, replicas * ranks)
    with torch.device("meta"):
        model = nn.Sequential(*(Block(unit) for unit in units))
    plan = libfsdp.plan(model, libfsdp.PlannedMesh(ranks, replicas=replicas, device_type="cpu"), units=Block)
    host = host_ms / 2 / max(factors)  # No rank's host is slower: of the one that determines the step, it is the number itself.
    simulation = plan.simulate(
        units={str(k): libfsdp.UnitTime(unit.forward_ms + host, unit.backward_ms + host) for k, unit in enumerate(units)},
        slow_ranks=dict(enumerate(factors)),
        steps=STEPS + WARM_UP,
    )
    return statistics.median(simulation.step_ms[WARM_UP:])


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--draws", type=int, default=3)
    arguments.add_argument("--rank-of", type=int, nargs=2, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.rank_of is not None:
        run_as_a_rank(given.draws, *given.rank_of)
        return 0
    print("\n".join(f"{key}: {value}" for key, value in describe_machine().items()))
    for name, (replicas, ranks) in WORLDS.items():
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={replicas * ranks}"]
        ran = subprocess.run(
            [*launcher, sys.argv[0], "--draws", str(given.draws), "--rank-of", str(replicas), str(ranks)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        calibration, *draws = json.loads(ran.stdout.splitlines()[-1])
        slept = sum(unit.forward_ms + unit.backward_ms for unit in CALIBRATION)
        host_ms = (statistics.median(calibration) - slept) / BLOCKS
        print(f"{name}: {host_ms:.2f} ms per block beside sleeps")
        for seed, times in enumerate(draws):
            median, step = statistics.median(times), simulated(seed, replicas, ranks, host_ms)
            print(
                f"{name}, draw {seed}: measured {median:.1f} ms ({min(times):.1f} to {max(times):.1f}), simulated {step:.1f} ms, "
                f"{step / median:.3f} of it",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
