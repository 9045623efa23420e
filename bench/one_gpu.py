"""Steps of a Llama-like model on one GPU: plain, by a peer, and by libfsdp with and without collectives (docs/run/gpu.md).

    one_gpu.py             (the kit's stage 2; GPU_KIT_ROWS and GPU_KIT_OUT name where rows and traces go)
    one_gpu.py --ranks 2   (its stage 8: ranks that share the GPU, where NCCL allows that)
    one_gpu.py --peer Megatron-FSDP    (and libfsdp.megatron, its counterpart; the other peer is FSDP2)

On one rank nothing has to be sent, so what differs from plain training is what sharding costs by itself. Contenders take turns, each in a
process of its own, so that none leaves memory to the next, and with the GPU for itself. Ranks that share it without CUDA's MPS take turns
on it, too: of these, memory and the host's time tell something, steps little. With FSDP_TEST_DEVICE=cpu the models are tiny, and wall time
takes the place of CUDA's events.

A user of Megatron-FSDP gives it a model in bf16, of which it keeps main parameters in fp32; FSDP2's and libfsdp's fully_shard take a model
in fp32, and compute in bf16. All reduce gradients in fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from contenders.gpt import GPT, BatchPlace, GPTConfig, cross_entropy, draw_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "gpu"), str(TESTS / "python")]

rows: Any = importlib.import_module("rows")
device: Any = importlib.import_module("support.device")

ON_GPU = device.TYPE != "cpu"
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # Dense bf16, of the data sheets.
COLLECTIVES = "FSDP_SINGLE_RANK_COLLECTIVES"
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Case:
    """A model, and how much of it is measured."""

    name: str
    config: GPTConfig
    sequences: int
    steps: int
    rounds: int
    traced: bool = False
    counted: bool = True


# The first has so little arithmetic that the host is what takes time. The last launches as much as the second.
CASES = [
    Case("48 small units", GPTConfig(128, 64, 48, 2, 64), sequences=1, steps=12, rounds=2),
    Case("350M", GPTConfig(32_000, 1024, 24, 16, 2048), sequences=8, steps=8, rounds=2, traced=True),
    Case("1.3B", GPTConfig(32_000, 2048, 24, 16, 2048), sequences=4, steps=6, rounds=2, counted=False),
]
REHEARSED = [
    Case("48 small units", GPTConfig(64, 16, 48, 2, 4), sequences=1, steps=2, rounds=2),
    Case("rehearsal", GPTConfig(64, 32, 3, 2, 16), sequences=2, steps=2, rounds=2, traced=True),
    Case("another", GPTConfig(64, 64, 3, 2, 16), sequences=2, steps=2, rounds=2, counted=False),
]
SHARED = [replace(CASES[1], sequences=4, steps=4, traced=False, counted=False), replace(CASES[0], steps=4, counted=False)]
PLAIN = "plain, autocast"
# Each peer, and the function of libfsdp's that takes its place.
PEERS = {"FSDP2": "libfsdp", "Megatron-FSDP": "libfsdp.megatron"}


def contenders_of(peer: str) -> tuple[str, ...]:
    ours = PEERS[peer]
    return (PLAIN, peer, ours, *((f"{ours}, with collectives",) if RANKS == 1 else ()))


@dataclass
class Measured:
    """Of one contender in one case, over all rounds."""

    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    loss: float = 0.0
    card: str = ""
    counted: dict[str, float] = field(default_factory=dict)

    def add(self, turn: Measured) -> None:
        self.step_ms += turn.step_ms
        self.host_ms += turn.host_ms
        self.peak_mib = max(self.peak_mib, turn.peak_mib)
        self.loss, self.card = turn.loss, turn.card
        self.counted |= turn.counted


def flops_per_token(config: GPTConfig) -> float:
    """Forward and backward: 6 per weight of a matrix product, and causal attention. The embedding is looked up."""
    block = config.dim * (4 * config.dim + 3 * config.hidden)
    return 6.0 * (config.layers * block + config.vocab * config.dim) + 6.0 * config.layers * config.dim * config.context


def shard(model: GPT, contender: str) -> None:
    """Each block is a unit; they compute in bf16 and are reduced in fp32."""
    function: Callable[..., Any] = fully_shard
    if contender.startswith("libfsdp"):
        function = importlib.import_module("libfsdp").fully_shard
    options = {
        "mesh": init_device_mesh(device.TYPE, (RANKS,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.blocks:
        function(block, **options)
    function(model, **options)


def megatron_of(contender: str) -> Any:
    """The package with Megatron-FSDP's names, its own or libfsdp's; None for other contenders."""
    if contender == "Megatron-FSDP":
        on_cpu = "contenders.megatron_on_cpu"
        return importlib.import_module("megatron_fsdp") if ON_GPU else importlib.import_module(on_cpu).peer()
    return importlib.import_module("libfsdp.megatron") if contender.startswith("libfsdp.megatron") else None


def shard_by_megatron(megatron: Any, model: GPT) -> nn.Module:
    """Each block is a unit; main parameters and their gradients are in fp32."""
    policy = megatron.MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    sharded = megatron.fully_shard_model(
        module=model.bfloat16(),
        fsdp_unit_modules=[type(model.blocks[0])],
        device=device.of_rank(RANK),
        mixed_precision_policy=policy,
    )
    return cast(nn.Module, sharded)


@contextlib.contextmanager
def collectives_of(contender: str, turn: int) -> Iterator[None]:
    """libfsdp's collectives of a rank that is alone do nothing, unless this variable is set when its mesh is made."""
    os.environ[COLLECTIVES] = "1" if contender.endswith("with collectives") else "0"
    device.join(RANK, RANKS, init_method=f"file://{os.environ['MEETING']}/{turn}")
    try:
        yield
    finally:
        dist.destroy_process_group()


class Trainer:
    """A contender's model and optimizer, filled by the same draws."""

    def __init__(self, case: Case, contender: str) -> None:
        self.case, self.plain = case, contender == PLAIN
        torch.manual_seed(0)
        with torch.device(device.TYPE):
            model = GPT(case.config)
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)
        self.model: nn.Module = model
        megatron = megatron_of(contender)
        if megatron:
            self.model = shard_by_megatron(megatron, model)
        elif not self.plain:
            shard(model, contender)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if megatron:
            self.optimizer = megatron.fully_shard_optimizer(optimizer=self.optimizer)
        tokens, targets = draw_batch(case.config, case.sequences, BatchPlace(0, RANK, RANKS))
        self.batch = tokens.to(device.TYPE), targets.to(device.TYPE)

    def forward_and_backward(self) -> Tensor:
        with torch.autocast(device.TYPE, torch.bfloat16, enabled=self.plain):
            loss = cross_entropy(self.model(self.batch[0]).float(), self.batch[1])
        loss.backward()
        return loss

    def step(self) -> Tensor:
        loss = self.forward_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def step_times(trainer: Trainer, count: int) -> list[float]:
    """Milliseconds on the GPU from one step's begin to the next one's, as the host runs ahead of it."""
    if not ON_GPU:
        begun = time.perf_counter()
        for _ in range(count):
            trainer.step()
        return [(time.perf_counter() - begun) / count * 1e3] * count
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        trainer.step()
        mark.record()
    synchronize()
    return [first.elapsed_time(last) for first, last in itertools.pairwise(marks)]


def host_times(trainer: Trainer, count: int) -> list[float]:
    """Milliseconds of processor time of this process until all of a step was launched: backward has a thread of its own.

    Each step begins with an idle GPU. Else one would wait for room in the queue of launches, which would count as the host's time.
    """
    times = []
    for _ in range(count):
        synchronize()
        busy = time.process_time()
        trainer.step()
        times.append((time.process_time() - busy) * 1e3)
    return times


def measure(case: Case, contender: str) -> Measured:
    """A model is made, warmed up and measured."""
    found = Measured()
    trainer = Trainer(case, contender)
    for _ in range(3):
        loss = trainer.step()
    found.loss = float(loss.item())
    if ON_GPU:  # Of steps, not of making the model.
        torch.cuda.reset_peak_memory_stats()
    gc.disable()
    found.step_ms = step_times(trainer, case.steps)
    found.host_ms = host_times(trainer, case.steps)
    gc.enable()
    if ON_GPU:
        found.peak_mib = torch.cuda.max_memory_allocated() / 2**20
        found.card = torch.cuda.get_device_name()
    return found


def count_launches(case: Case, contender: str) -> dict[str, float]:
    """What a step asks of the device, as the profiler saw it, and the time of its kernels; and its trace, for whoever wants to look."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    trainer = Trainer(case, contender)
    for _ in range(3):
        trainer.step()
    synchronize()
    with profile(activities=activities) as recorded:
        trainer.step()
        synchronize()
    names = [event.name for event in recorded.events()]
    out = Path(os.environ.get("GPU_KIT_OUT", "."))
    if case.traced and contender != PLAIN:
        file = out / f"{contender.replace(', ', ' ').replace(' ', '_')}.json"
        recorded.export_chrome_trace(str(file))
        with zipfile.ZipFile(out / "traces.zip", "a", zipfile.ZIP_DEFLATED) as packed:
            packed.write(file, file.name)
        file.unlink()
    return {
        "launches": sum(name in ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx") for name in names),
        "copies": sum(name.startswith(("cudaMemcpy", "cudaMemset")) for name in names),
        "waits": sum(name in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize") for name in names),
        "operators": sum(name.startswith("aten::") for name in names),
        "kernels_ms": round(sum(event.self_device_time_total for event in recorded.key_averages()) / 1e3, 2),
    }


def turn_of(case: Case, contender: str, number: int, counts: bool, result: Any) -> None:
    """A contender's turn, in a process of its own. It says what it has measured, or why it has not."""
    try:
        with collectives_of(contender, number):
            found = measure(case, contender)
            if counts:
                found.counted = count_launches(case, contender)
        result.send(found)
    except Exception as error:
        result.send(f"{type(error).__name__}: {error}"[:300])


def report(case: Case, peer: str, measured: dict[str, Measured]) -> None:
    """A row per contender, with ratios to plain training and to the peer."""
    tokens = case.sequences * case.config.context
    plain, of_peer = measured.get(PLAIN), measured.get(peer)
    for contender, of_it in measured.items():
        step, host = statistics.median(of_it.step_ms), statistics.median(of_it.host_ms)
        flops = next((flops for name, flops in PEAK_FLOPS.items() if name in of_it.card), None)
        row: dict[str, Any] = {"case": case.name, "step_ms": round(step, 3), "host_ms": round(host, 3), "host_us_per_unit": ""}
        if plain is not None and contender != PLAIN:
            units = case.config.layers + 1
            row["host_us_per_unit"] = round((host - statistics.median(plain.host_ms)) / units * 1e3, 1)
        row["step_to_peer"] = round(step / statistics.median(of_peer.step_ms), 3) if of_peer else ""
        row["tokens_per_s"] = round(tokens / step * 1e3)
        row["mfu"] = round(flops_per_token(case.config) * tokens / step * 1e3 / flops, 3) if flops else ""
        row["peak_mib"] = round(of_it.peak_mib) if ON_GPU else ""
        row["peak_to_peer"] = round(of_it.peak_mib / of_peer.peak_mib, 3) if ON_GPU and of_peer else ""
        rows.record(contender, "measured", **row, loss=round(of_it.loss, 4), **of_it.counted)


def train(peer: str) -> None:
    """All cases, on one of the ranks. What all turns import is imported before they are forked, which takes most of a process's start."""
    torch.set_num_threads(1)
    for package in ("torch._dynamo", "torch.distributed.tensor"):
        importlib.import_module(package)
    contenders = contenders_of(peer)
    cases = (CASES if RANKS == 1 else SHARED) if ON_GPU else (REHEARSED if RANKS == 1 else REHEARSED[:1])
    numbers = itertools.count()
    forks = multiprocessing.get_context("fork")
    for case in cases:
        measured: dict[str, Measured] = {}
        for number in range(case.rounds):
            for contender in contenders[number % 2 :] + contenders[: number % 2]:
                result, into = forks.Pipe(duplex=False)
                counts = case.counted and number == case.rounds - 1
                turn = forks.Process(target=turn_of, args=(case, contender, next(numbers), counts, into))
                turn.start()
                into.close()
                try:
                    found = result.recv()
                except EOFError:
                    found = "the process has died"
                turn.join()
                if isinstance(found, str):
                    rows.record(contender, "failed", case=case.name, why=found)
                else:
                    measured.setdefault(contender, Measured()).add(found)
        report(case, peer, {name: measured[name] for name in contenders if name in measured})


def main() -> int:
    """Starts the ranks, the first of which writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--peer", choices=PEERS, default="FSDP2")
    given = parser.parse_args()
    if "MEETING" in os.environ:
        train(given.peer)
        return 0
    ranks: int = given.ranks
    with tempfile.TemporaryDirectory() as meeting:
        common = {**os.environ, "MEETING": meeting, "WORLD_SIZE": str(ranks)}
        started = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **({"GPU_KIT_ROWS": os.devnull} if rank else {})}
            started.append(subprocess.Popen([sys.executable, *sys.argv], env={**common, **own}))
        return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
