"""Counts what a training step launches and waits for on the simulated device, by libfsdp and by FSDP2: a table.

    PYTHONPATH=build/python:build/tests/device python tests/device/python/counts.py [--world 2] [--blocks 6] [--width 32]

The model is a stack of blocks (LayerNorm, Linear, GELU, Linear), a unit each, trained by AdamW. Each row is of rank 0's fourth step.
Simulated time is given twice: where launches bound the step, and where memory does.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import sim_device
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

LAUNCHES = {"launch": 4_000, "kernel": 2_000, "collective": 8_000}  # nanoseconds
MEMORY = {**LAUNCHES, "kernel_byte": 2.0, "collective_byte": 8.0}
STEPS = 4


class Block(nn.Module):
    """A unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


def sharded(implementation: str, precision: str, blocks: int, width: int, mesh: DeviceMesh) -> nn.Module:
    """A new model."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(blocks)]).to(mesh.device_type)
    if implementation == "FSDP2":
        shard: Any = fsdp2
    else:
        from libfsdp import fully_shard as shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if precision == "bf16" else MixedPrecisionPolicy()
    for block in model:
        shard(block, mesh=mesh, mp_policy=policy)
    shard(model, mesh=mesh, mp_policy=policy)
    return model


def measured(model: nn.Module, optimizer: torch.optim.Optimizer, width: int, cost: dict[str, Any]) -> dict[str, Any]:
    """The last of some steps."""
    rank = dist.get_rank()
    sim_device.set_cost(**cost)
    row: dict[str, Any] = {}
    for step in range(STEPS):
        x = torch.randn(8, width, generator=torch.Generator().manual_seed(100 * rank + step)).to("sim")
        torch.accelerator.synchronize()
        sim_device.reset_stats(rank)
        begin = sim_device.now()
        model(x).float().square().mean().backward()
        row["forward and backward"] = sum(sim_device.kernels(rank).values())
        optimizer.step()
        optimizer.zero_grad()
        row["kernels"] = sum(sim_device.kernels(rank).values())
        row["by name"] = dict(sim_device.kernels(rank))
        row["host waits"] = sum(sim_device.host_waits(rank).values())
        row["reasons"] = dict(sim_device.host_waits(rank))
        torch.accelerator.synchronize()
        row["time"] = (sim_device.now() - begin) / 1000
    sim_device.set_cost()
    return row


def rank_main(rank: int, world: int, store: str, options: argparse.Namespace) -> None:
    """Measures, and prints on rank 0."""
    torch.set_num_threads(1)
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:gloo,sim:simccl", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("sim", (world,))
    lines = []
    for precision in ("fp32", "bf16"):
        for implementation in ("FSDP2", "libfsdp"):
            model = sharded(implementation, precision, options.blocks, options.width, mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False, foreach=True)
            launches = measured(model, optimizer, options.width, LAUNCHES)
            memory = measured(model, optimizer, options.width, MEMORY)
            cells = [
                f"{implementation}, {precision}",
                launches["forward and backward"],
                launches["kernels"],
                launches["host waits"],
                f"{launches['time']:,.0f}",
                f"{memory['time']:,.0f}",
            ]
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
            if options.names:
                names = sorted(launches["by name"].items(), key=lambda item: -item[1])
                lines.append(f"    {names} {launches['reasons']}")
    reports = sim_device.take_reports()
    assert not reports, reports
    if rank == 0:
        print(
            "| | kernels of forward and backward | of the whole step | host waits | us, launches bound | us, memory bounds |"
        )
        print("|---|---|---|---|---|---|")
        print("\n".join(lines), flush=True)
    dist.barrier()
    os._exit(0)  # Whoever ends first must not end the other's groups.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--names", action="store_true", help="also the kernels by name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(options.world, f"{folder}/store", options), nprocs=options.world)


if __name__ == "__main__":
    main()
