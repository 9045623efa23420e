"""Steps within memory budgets, beside the best of all sets of units that could stay gathered.

    python bench/budget.py [--blocks 6] [--budgets 5] [--steps 6] [--dim 384]

Two ranks of this machine train a transformer. For each budget, every set of blocks is kept in turn whose peak, by the
engine's own counts and with the gradients that the program has, is within the budget; the sets take turns step by step.
The table says what the budget has chosen, the fastest set, and the ratio of their steps (medians of the slower rank). Of
many noisy medians, the least is too low, so the fastest is found in every other turn, and measured in the turns between.
"again" is its ratio in the turns in which it was found: how far off one set is from itself.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import libfsdp

RANKS = 2


@dataclass
class Kept:
    """A model with a set of units that stay gathered."""

    model: Any
    optimizer: torch.optim.Optimizer
    peak: int = 0
    at_update: int = 0
    seconds: list[float] = field(default_factory=list)


def trainee(options: argparse.Namespace, budget: libfsdp.MemoryBudget | None = None) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(options.dim, 4, (2 + k % 3) * options.dim, dropout=0.0, batch_first=True)
        for k in range(options.blocks)
    ]
    model: Any = nn.Sequential(*blocks, nn.Linear(options.dim, 64))
    for block in blocks:
        libfsdp.fully_shard(block)
    libfsdp.fully_shard(model, memory_budget=budget)
    return model, libfsdp.optim.AdamW(model.parameters(), lr=1e-4)


def step(one: Kept, x: torch.Tensor) -> float:
    dist.barrier()
    begin = time.perf_counter()
    one.model(x).square().mean().backward()
    own = sum(p.grad.to_local().nbytes for p in one.model.parameters())
    one.at_update = max(one.at_update, libfsdp.memory_stats(one.model)["total.live"] + own)
    one.optimizer.step()
    one.optimizer.zero_grad()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def keep(model: Any, blocks: tuple[int, ...]) -> None:
    """Does by hand what a budget does."""
    for k in range(len(model) - 1):
        model[k]._get_fsdp_state().unit.kept_by_budget = k in blocks


def run(rank: int, options: argparse.Namespace) -> None:
    dist.init_process_group("gloo", init_method=options.at, rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    x = torch.randn(4, 64, options.dim)
    sets: dict[tuple[int, ...], Kept] = {}
    # The last block stays from forward to backward anyway.
    for count in range(options.blocks):
        for blocks in itertools.combinations(range(options.blocks - 1), count):
            one = sets[blocks] = Kept(*trainee(options))
            step(one, x)  # forms the model
            keep(one.model, blocks)
    for turn in range(2 + options.steps):
        for one in sets.values():
            seconds = step(one, x)
            if turn >= 2:
                one.seconds.append(seconds)
    for one in sets.values():
        one.peak = max(libfsdp.memory_stats(one.model)["total.peak"], one.at_update)
    least, most = min(one.peak for one in sets.values()), max(one.peak for one in sets.values())
    if rank == 0:
        print("| budget, MiB | kept | fastest | its step, ms | ratio | again |\n|---|---|---|---|---|---|")
    for k in range(options.budgets):
        budget = least + (most - least) * (k + 1) // options.budgets * 11 // 10
        # What is measured are the engine's counts, which are without the optimizer's state.
        chosen = trainee(options, libfsdp.MemoryBudget(budget, optimizer_values=0))[0]
        chosen(x).square().mean().backward()
        units = [chosen[k]._get_fsdp_state().unit for k in range(options.blocks - 1)]
        kept = tuple(k for k, unit in enumerate(units) if unit.kept_by_budget)
        found, measured = (
            {blocks: statistics.median(one.seconds[half::2]) for blocks, one in sets.items() if one.peak <= budget}
            for half in (0, 1)
        )
        fastest = min(found, key=lambda blocks: found[blocks])
        ms = 1000 * measured[fastest]
        ratio, again = statistics.median(sets[kept].seconds[1::2]) * 1000 / ms, found[fastest] * 1000 / ms
        if rank == 0:
            print(f"| {budget / 2**20:.1f} | {kept} | {fastest} | {ms:.1f} | {ratio:.3f} | {again:.3f} |")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--budgets", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--at", default="tcp://127.0.0.1:29531", help="where the ranks meet")
    mp.spawn(run, (parser.parse_args(),), nprocs=RANKS)


if __name__ == "__main__":
    main()
