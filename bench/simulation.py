"""Compares simulated steps with steps of real ranks that sleep where they would compute.

Each rank sleeps in forward and backward of each block: for as long as the block takes, times a factor of its own. Both are
drawn by a seed. Sleeping takes no processor, so 4 ranks on 2 processors are as good as 4 machines. The simulation knows the
plan, these times and factors, and no rates of links: collectives of these small blocks take little beside the sleeps. Printed are the
median of the measured steps with their range, the simulated step, and the ratio of the two; for each world, prefetch
depth and draw.
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


def measured(seed: int, replicas: int, ranks: int) -> list[float]:
    """Milliseconds of each step, on the rank that ends last."""
    units, factors = drawn(seed, replicas * ranks)
    model = nn.Sequential(*(Block(unit) for unit in units))
    names = ("replicate", "shard") if replicas > 1 else ("shard",)
    sizes = (replicas, ranks) if replicas > 1 else (ranks,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for block in model:
        libfsdp.fully_shard(block, mesh=mesh)
        block.factor = factors[dist.get_rank()]
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


def simulated(seed: int, replicas: int, ranks: int) -> float:
    """Milliseconds of a step."""
    units, factors = drawn(seed, replicas * ranks)
    with torch.device("meta"):
        model = nn.Sequential(*(Block(unit) for unit in units))
    plan = libfsdp.plan(model, libfsdp.PlannedMesh(ranks, replicas=replicas, device_type="cpu"), units=Block)
    simulation = plan.simulate(
        units={str(k): unit for k, unit in enumerate(units)}, slow_ranks=dict(enumerate(factors)), steps=STEPS + WARM_UP
    )
    return statistics.median(simulation.step_ms[WARM_UP:])


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--draws", type=int, default=3)
    arguments.add_argument("--measured", type=int, nargs=3, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.measured is not None:
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        times = measured(*given.measured)
        if dist.get_rank() == 0:
            print(json.dumps(times), flush=True)
        dist.destroy_process_group()
        return 0
    print("\n".join(f"{key}: {value}" for key, value in describe_machine().items()))
    for name, (replicas, ranks) in WORLDS.items():
        for seed in range(given.draws):
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={replicas * ranks}",
            ]
            ran = subprocess.run(
                [*command, sys.argv[0], "--measured", str(seed), str(replicas), str(ranks)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            times = json.loads(ran.stdout.splitlines()[-1])
            median, step = statistics.median(times), simulated(seed, replicas, ranks)
            print(
                f"{name}, draw {seed}: measured {median:.1f} ms ({min(times):.1f} to {max(times):.1f}), simulated {step:.1f} ms, "
                f"{step / median:.3f} of it",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
