"""Whether simulated steps order the variants of bench_levers as measured ones do: Kendall's tau, which is 1 for the same order. Steps that
differ by less than a tenth are in no order.

    python bench/order.py [--levers build/bench/bench_levers] [--ranks 2] [--rounds 5] [--context 128]

bench_levers measures; the simulation has a plan of the same transformer, and knows three numbers of this machine, which
are measured here: how long a block computes on one thread, how fast ranks gather, and how long a small gather takes. Of
the variants, those count whose options a plan knows and whose computation is the same. The table has the steps in
multiples of the base's, and the MiB that each plan gathers beside what the run has gathered, which must be equal.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness.machine import describe_machine
from torch import nn

import libfsdp

DIM, HIDDEN, HEADS, LAYERS, VOCAB, BATCH = 256, 704, 8, 8, 4096, 4
BASE = "optim_grads_params (the base)"
RESOLUTION = 0.1  # Steps that differ by less are in no order: those of one variant differ by as much from run to run.
LEVERS: dict[str, dict[str, Any]] = {
    BASE: {},
    "placements = optim_grads": {"placements": "optim_grads"},
    "placements = optim": {"placements": "optim"},
    "placements = no_shard": {"placements": "no_shard"},
    "reshard_after_forward = false": {"reshard_after_forward": False},
    "keep_gathered_bytes = 12 MiB": {"keep_gathered_bytes": 12 << 20},
    "prefetch_depth = 0": {"prefetch_depth": 0},
    "prefetch_depth = 2": {"prefetch_depth": 2},
    "grad_comm_dtype = bf16": {"mp_policy": libfsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "HSDP, 2 rows": {"replicas": 2},
    "HFSDP, 2 rows": {"replicas": 2, "outer_placements": "optim"},
    "reshard_after_forward_size = 2": {"reshard_after_forward": 2},
}


class Block(nn.Module):
    """The parameters and the work of a block of examples/gpt.h."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.attention_out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.gate_up, self.mlp_out = nn.Linear(DIM, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, context, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, context, DIM))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp_out(nn.functional.silu(gate) * up)


def gpt() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCAB, DIM), *(Block() for _ in range(LAYERS)), nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
    )


def least_ms(work: Any, repeats: int = 7) -> float:
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        took.append(1e3 * (time.perf_counter() - begin))
    return min(took)


def times(context: int) -> libfsdp.UnitTime:
    """Of a block, on one thread."""
    block, x = Block(), torch.randn(BATCH, context, DIM, requires_grad=True)
    forward = least_ms(lambda: block(x))
    return libfsdp.UnitTime(forward_ms=forward, backward_ms=least_ms(lambda: block(x).sum().backward()) - forward)


def measure(rank: int, given: argparse.Namespace, results: Any) -> None:
    """Puts the time of a block, and the rate of gathers, into `results`."""
    ranks = given.ranks
    dist.init_process_group("gloo", init_method=given.at, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block = times(given.context)
    took = []
    for rows in (8, 4096):  # Little, and much to gather.
        model: Any = libfsdp.fully_shard(nn.Linear(1024, rows, bias=False))

        def gather(model: Any = model) -> None:
            dist.barrier()
            model.unshard()
            model.reshard()

        gather()
        took.append(least_ms(gather))
    barrier = least_ms(dist.barrier)
    if rank == 0:
        sent = (ranks - 1) / ranks * 4096 * 1024 * 4
        latency = max(took[0] - barrier, 0.01)
        results.put((block.forward_ms, block.backward_ms, 1e3 * latency, 1e3 * sent / max(took[1] - took[0], 0.01)))
    dist.destroy_process_group()


def simulated(options: dict[str, Any], ranks: int, machine: tuple[float, float, float, float]) -> tuple[float, float]:
    """Milliseconds of a step, and the MiB that it gathers."""
    forward, backward, latency_us, rate = machine
    options = dict(options)
    replicas = options.pop("replicas", 1)
    with torch.device("meta"):
        model = gpt()
    mesh = libfsdp.PlannedMesh(ranks // replicas, replicas=replicas, device_type="cpu")
    plan = libfsdp.plan(model, mesh, units=Block, **options)
    head = VOCAB * DIM / sum(parameter.numel() for parameter in model[1].parameters())
    units = {unit.name: libfsdp.UnitTime(forward, backward) for unit in plan.units}
    units["(root)"] = libfsdp.UnitTime(head * forward, head * backward)
    links = {dim: libfsdp.LinkRate(latency_us=latency_us, bytes_per_s=rate) for dim in plan.links}
    return plan.simulate(units=units, links=links).average_ms, plan.wire["all_gather_bytes"] / 2**20


def tau(pairs: list[tuple[float, float]]) -> tuple[float, int]:
    """Kendall's tau of the pairs of variants that both the measurement and the simulation tell apart, and how many these are."""
    agreements = []
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        if min(max(a / c, c / a), max(b / d, d / b)) < 1 + RESOLUTION:
            continue
        agreements.append(1 if (a - c) * (b - d) > 0 else -1)
    return sum(agreements) / max(len(agreements), 1), len(agreements)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levers", default="build/bench/bench_levers")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=128, help="tokens of a sequence: with fewer, ranks wait for more of what they send")
    parser.add_argument("--at", default="tcp://127.0.0.1:29532", help="where the ranks meet")
    given = parser.parse_args()
    print("\n".join(f"{key}: {value}" for key, value in describe_machine().items()))
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(measure, (given, results), nprocs=given.ranks)
    machine = results.get()
    print("a block {:.2f} and {:.2f} ms, a gather {:.0f} us and {:.2e} bytes/s".format(*machine), flush=True)
    command = [given.levers, *(str(number) for number in (given.ranks, given.rounds, given.context))]
    printed = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ).stdout
    rows = re.findall(r"^\| `(.*?)` \| ([\d.]+) .*?\| ([\d.]+) \| [\d.]+ \|$", printed, re.MULTILINE)
    base, _ = simulated({}, given.ranks, machine)
    pairs: list[tuple[float, float]] = []
    print("| variant | measured | simulated | gathered, MiB | planned |\n|---|---|---|---|---|")
    for name, step, gathered in rows:
        if name not in LEVERS:
            continue
        ms, planned = simulated(LEVERS[name], given.ranks, machine)
        pairs.append((float(step), ms / base))
        print(f"| {name} | {float(step):.2f} | {ms / base:.2f} | {gathered} | {planned:.1f} |")
    agreement, told_apart = tau(pairs)
    print(f"Kendall's tau of {len(pairs)} variants: {agreement:.2f}, by {told_apart} pairs that are told apart")
    return 0


if __name__ == "__main__":
    sys.exit(main())
