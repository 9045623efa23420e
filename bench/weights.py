"""Measures whole weights out of a sharded model of the Llama family: full_weights against FSDP2's ways.

Each round, every contender gives all whole tensors on all ranks, one contender after the other; the numbers are medians
and ranges over rounds of the slowest rank, and the median of the processor's time that it has used, which other load on the
machine changes less. Contenders: libfsdp's full_weights, also in bfloat16; and with FSDP2, a loop
of full_tensor() over the state dict, also converted to bfloat16, and torch's get_model_state_dict. Once over messages
(FSDP_SHARED_MEMORY=0), and once over the memory that ranks of a host share, which FSDP2 does not use; each with 2 and with 4 ranks.
"hidden" is how much of the gathers lies behind a consumer that takes as long as they do, in each round:
1 - (together - consumer) / gathers. The consumer sleeps, so that it takes nothing from the gathers. Beside it stands how much could be
hidden at most on this machine: not what comes before the first bucket, for which every consumer waits; and not more than the processors
have time for while the consumer sleeps. A second consumer computes for as long: it and the gathers share the processors, and what
these have no time for stands there, too.

With FSDP_TEST_DEVICE=cuda, ranks train on GPUs, over NCCL; of the kit for GPUs (docs/run/gpu.md), this is a program of stage 8.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.machine import describe_machine
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "gpu"), str(TESTS / "python")]

device: Any = importlib.import_module("support.device")

OURS, OURS_BF16 = "full_weights", "full_weights, bf16"
LOOP, LOOP_BF16 = "loop of full_tensor()", "loop of full_tensor(), bf16"
STATE_DICT = "get_model_state_dict"
CONSUMED = "full_weights, consumed"
CONSUMED_BUSILY = "full_weights, consumed by one that computes"


class Layer(nn.Module):
    """The nine parameters of a layer; nothing is computed with them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)


def build(layers: int, dim: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(2048, dim), *(Layer(dim, 8 * dim // 3) for _ in range(layers)), nn.RMSNorm(dim))


def synchronize() -> None:
    """Waits for the device."""
    if device.TYPE != "cpu":
        torch.accelerator.synchronize()


def shard(model: nn.Sequential, by: Callable[..., Any]) -> Any:
    for layer in model:
        if isinstance(layer, Layer):
            by(layer)
    return by(model)


def measure(rounds: int, layers: int, dim: int, bucket_bytes: int) -> dict[str, list[list[float]]]:
    """By contender and round, of the slowest rank.

    Seconds; seconds of the processor; those that the consumer has taken last, and of the processor; and those to the first bucket.
    """
    import libfsdp  # only ranks need it

    ours, theirs = (shard(build(layers, dim).to(device.TYPE), by) for by in (libfsdp.fully_shard, fsdp2))
    pause = 0.0  # what the consumer means to take for a bucket
    consumed = (0.0, 0.0)  # what it has taken, in its last round, and of the processor
    first = 0.0  # what the last stream has taken until its first bucket came

    def stream(dtype: torch.dtype | None = None) -> None:
        nonlocal first
        begin = time.perf_counter()
        for k, _ in enumerate(libfsdp.full_weights(ours, bucket_bytes=bucket_bytes, dtype=dtype)):
            first = time.perf_counter() - begin if k == 0 else first

    def compute(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def consume(use: Callable[[float], object]) -> None:
        nonlocal consumed
        seconds = of_processor = 0.0
        for _ in libfsdp.full_weights(ours, bucket_bytes=bucket_bytes):
            begin = time.perf_counter(), time.thread_time()
            use(pause)
            seconds += time.perf_counter() - begin[0]
            of_processor += time.thread_time() - begin[1]
        consumed = (seconds, of_processor)

    def loop(dtype: torch.dtype) -> None:
        for value in theirs.state_dict().values():
            value.full_tensor().to(dtype)

    contenders: dict[str, Callable[[], object]] = {
        OURS: stream,
        LOOP: lambda: loop(torch.float32),
        STATE_DICT: lambda: get_model_state_dict(theirs, options=StateDictOptions(full_state_dict=True)),
        OURS_BF16: lambda: stream(torch.bfloat16),
        LOOP_BF16: lambda: loop(torch.bfloat16),
        CONSUMED: lambda: consume(time.sleep),
        CONSUMED_BUSILY: lambda: consume(compute),
    }
    expected = theirs.state_dict()
    for bucket in libfsdp.full_weights(ours, bucket_bytes=bucket_bytes):
        for name, tensor in bucket:
            assert torch.equal(tensor, expected[name].full_tensor()), name
    buckets = len(libfsdp.full_weights(ours, bucket_bytes=bucket_bytes))
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            synchronize()
            dist.barrier()
            begin = time.perf_counter(), time.process_time()
            run()
            synchronize()
            end = time.perf_counter(), time.process_time()
            taken = [end[0] - begin[0], end[1] - begin[1], *consumed, first]
            seconds = torch.tensor(taken, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number > 0:  # The first round warms up.
                times[name].append(seconds.tolist())
            if name == OURS:
                pause = seconds[0].item() / buckets
    return times


def part(values: list[float]) -> str:
    """A median with its range."""
    return f"{statistics.median(values):.0%} ({min(values):.0%} to {max(values):.0%})"


def hidden_of(consumer: str, times: dict[str, list[list[float]]], ranks: int) -> str:
    """How much is hidden behind a consumer, and how much could be."""
    hidden, most, time_left = [], [], []
    cores = len(os.sched_getaffinity(0))
    for consumed, (alone, of_processor, _, _, first) in zip(times[consumer], times[OURS], strict=True):
        together, _, seconds, of_consumer, _ = consumed
        hidden.append(1 - (together - seconds) / alone)
        most.append(1 - first / alone)
        time_left.append(min((cores * seconds - ranks * of_consumer) / (ranks * of_processor), 1.0))
    return f"{part(hidden)}; could be: {part(most)}; processors had time for {part(time_left)} of the gathers meanwhile"


def summary(times: dict[str, list[list[float]]], ranks: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for each contender, and how much is hidden, by consumer."""
    median = {name: [statistics.median(values) for values in zip(*of, strict=True)] for name, of in times.items()}
    best = {False: [min(median[LOOP][k], median[STATE_DICT][k]) for k in (0, 1)], True: median[LOOP_BF16]}
    found = []
    for name, of in times.items():
        wall, used, *_ = median[name]
        of_wall, of_used = (round(median[name][k] / best["bf16" in name][k], 2) for k in (0, 1))
        least, most = min(one[0] for one in of), max(one[0] for one in of)
        row = {"ms": f"{wall * 1e3:.0f}", "range": f"{least * 1e3:.0f} to {most * 1e3:.0f}", "to FSDP2's best": of_wall}
        found.append({"name": name, **row, "processor ms": f"{used * 1e3:.0f}", "its ratio": of_used})
    return found, {consumer: hidden_of(consumer, times, ranks) for consumer in (CONSUMED, CONSUMED_BUSILY)}


def report(transport: str, ranks: int, times: dict[str, list[list[float]]]) -> None:
    found, hidden = summary(times, ranks)
    print(f"\n{ranks} ranks, {transport}:\n| {' | '.join(found[0])} |\n{'|---' * len(found[0])}|")
    for row in found:
        print(f"| {' | '.join(str(value) for value in row.values())} |")
    for consumer, text in hidden.items():
        print(f"\nHidden in {consumer}: {text}", flush=True)
    if "GPU_KIT_ROWS" in os.environ:
        rows: Any = importlib.import_module("rows")
        for row in found:
            rows.record(f"weights on {ranks} ranks: {row.pop('name')}", "measured", **row)
        for consumer, text in hidden.items():
            rows.record(f"weights on {ranks} ranks, hidden in {consumer}", "measured", part=text)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--layers", type=int, default=166)
    arguments.add_argument("--dim", type=int, default=234)
    arguments.add_argument("--bucket-bytes", type=int, default=16 << 20)
    given = arguments.parse_args()
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        device.join(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        times = measure(given.rounds, given.layers, given.dim, given.bucket_bytes)
        if dist.get_rank() == 0:
            print(json.dumps(times), flush=True)
        dist.destroy_process_group()
        return 0
    model = build(given.layers, given.dim)
    count, size = len(list(model.parameters())), sum(4 * p.numel() for p in model.parameters())
    print("\n".join(f"{key}: {value}" for key, value in describe_machine().items()))
    print(f"{count} parameters, {size / 1e6:.0f} MB, {given.rounds} rounds")
    transports = (("messages", "0"), ("shared memory", "1")) if device.TYPE == "cpu" else ((device.BACKEND, "0"),)
    for ranks, (transport, setting) in itertools.product(given.ranks, transports):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        ran = subprocess.run(
            [*command, *sys.argv],
            env={**os.environ, "FSDP_SHARED_MEMORY": setting, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        report(transport, ranks, json.loads(ran.stdout.splitlines()[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
