"""One rank of a Python contender: libfsdp's package, FSDP2, DDP, plain training, or c10d's collectives.

bench/run.py starts the ranks with torchrun's variables and drives each through stdin: a line `VERB COUNT` is answered
by one line of JSON on stdout. Between two lines the process sleeps in a read. contender.cpp speaks the same protocol.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from gpt import GPT, BatchPlace, GPTConfig, cross_entropy, draw_batch, fill_parameters
from optimizer_steps import OPTIONS, WORLD, OptimizerSteps
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

Reply = dict[str, Any]
CONTENDERS = (
    *("libfsdp_python", "libfsdp_python_no_reshard", "fsdp2", "fsdp2_no_reshard", "fsdp2_instant"),
    *("libfsdp_megatron", "megatron_fsdp"),
    *("ddp", "local", "collectives"),
    *(f"optimizer_{kind}" for kind in OPTIONS),
)
COLLECTIVE_NUMEL = 16 * 1024 * 1024  # fp32 elements of the whole buffer: 64 MiB.


def read_memory() -> dict[str, int]:
    """Resident set now and its high-water mark, in KiB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(status[name].split()[0]) for key, name in (("now_kib", "VmRSS"), ("high_water_kib", "VmHWM"))}


def timed(work: Callable[[], object]) -> float:
    """Wall time of work, in milliseconds."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


class Trainer:
    """A model with its optimizer, wrapped as the contender's name says."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.config = GPTConfig(args.vocab, args.dim, args.layers, args.heads, args.context)
        self.sequences: int = args.batch
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.steps_done = 0
        self.sharded_over_peers = args.contender != "local" and not args.fake_world
        if args.contender != "local":
            join_ranks(args.fake_world)
        self.base_kib = read_memory()["now_kib"]
        model = GPT(self.config)
        fill_parameters(model)
        self.parameters = sum(p.numel() for p in model.parameters())
        megatron = megatron_of(args.contender)
        self.model = wrap_as_megatron(megatron, model) if megatron else wrap(args.contender, model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        if megatron:
            self.optimizer = megatron.fully_shard_optimizer(optimizer=self.optimizer)
        gc.collect()
        gc.freeze()  # What lives as long as the process is not looked at again.
        gc.disable()

    def handle(self, verb: str, count: int) -> Reply:
        """Answers one line of the protocol."""
        if verb == "step":
            return self.repeat(self.train, count)
        if verb == "host":
            return self.repeat(self.forward_backward, count)
        if verb == "memory":
            return {"base_kib": self.base_kib, **read_memory()}
        raise ValueError(f"no such verb: {verb}")

    def repeat(self, work: Callable[[Tensor, Tensor], Tensor], count: int) -> Reply:
        """Times `count` steps, each on the next batch; drawing it, the collector and the barrier are not timed."""
        times, losses = [], []
        for _ in range(count):
            place = BatchPlace(self.steps_done, self.rank, self.world)
            tokens, targets = draw_batch(self.config, self.sequences, place)
            gc.collect()
            if self.sharded_over_peers:
                dist.barrier()
            start = time.perf_counter()
            loss = work(tokens, targets)
            times.append((time.perf_counter() - start) * 1e3)
            losses.append(loss.item())
            self.optimizer.zero_grad()  # Nothing is left to drop after a training step.
            self.steps_done += 1
        return {"ms": times, "loss": losses}

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Leaves the gradients to be looked at, or dropped."""
        loss = cross_entropy(self.model(tokens), targets)
        loss.backward()
        return loss

    def train(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """A whole training step."""
        loss = self.forward_backward(tokens, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Collectives:
    """c10d's own collectives over two buffers of 64 MiB, and a plain copy of one."""

    parameters = 0

    def __init__(self) -> None:
        join_ranks(fake_world=0)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.full = torch.zeros(COLLECTIVE_NUMEL)
        self.shard = torch.full((COLLECTIVE_NUMEL // world,), rank + 1.0)
        self.unreduced = torch.full((COLLECTIVE_NUMEL,), rank + 1.0)
        self.reduced = torch.zeros(COLLECTIVE_NUMEL // world)
        self.source, self.copy = torch.ones(COLLECTIVE_NUMEL), torch.zeros(COLLECTIVE_NUMEL)

    def handle(self, verb: str, count: int) -> Reply:
        """Answers one line of the protocol; `check` shows that the operation did what it should."""
        work, result = {
            "all_gather": (lambda: dist.all_gather_into_tensor(self.full, self.shard), self.full),
            "reduce_scatter": (lambda: dist.reduce_scatter_tensor(self.reduced, self.unreduced), self.reduced),
            "memcpy": (lambda: self.copy.copy_(self.source), self.copy),
        }[verb]
        times = []
        for _ in range(count):
            dist.barrier()
            times.append(timed(work))
        return {"ms": times, "check": [result[0].item(), result[-1].item()]}


class InstantCollective:
    """A custom all-gather or reduce-scatter for FSDP2 that leaves its output as it is: it costs no more than the call.

    The fake process group does not do that: its all-gather copies the input once for each rank of the world.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As FSDP2's own collectives allocate."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        """Takes what FSDP2 passes; None says that there is nothing to wait for."""


def join_ranks(fake_world: int) -> None:
    """Gloo among the ranks that were started, or a process group of any size that moves no data."""
    if fake_world:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.set_flush_denormal(True)  # What a fake all-gather leaves in a buffer must not slow arithmetic down.
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=fake_world)
    else:
        dist.init_process_group("gloo")


def fully_shard_of(contender: str) -> Callable[..., Any]:
    """torch's own, or that of libfsdp's package, which run.py puts on the path."""
    if not contender.startswith("libfsdp"):
        return fully_shard
    libfsdp: Any = importlib.import_module("libfsdp")
    return cast(Callable[..., Any], libfsdp.fully_shard)


def megatron_of(contender: str) -> Any:
    """The package with Megatron-FSDP's names, its own or libfsdp's; None for other contenders."""
    if contender == "megatron_fsdp":
        return importlib.import_module("megatron_on_cpu").peer()
    return importlib.import_module("libfsdp.megatron") if contender == "libfsdp_megatron" else None


def wrap_as_megatron(megatron: Any, model: GPT) -> nn.Module:
    """The model as a user of Megatron-FSDP shards it: each block is a unit."""
    units = [type(model.blocks[0])]
    sharded = megatron.fully_shard_model(module=model, fsdp_unit_modules=units, device=torch.device("cpu"))
    return cast(nn.Module, sharded)


def wrap(contender: str, model: GPT) -> nn.Module:
    """The model as the contender trains it: each block is a unit; embedding, norm and head are the root's."""
    if contender == "local":
        return model
    if contender == "ddp":
        return DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = fully_shard_of(contender)
    for block in model.blocks:
        shard(block, mesh=mesh, reshard_after_forward=not contender.endswith("_no_reshard"))
    shard(model, mesh=mesh)  # The root stays gathered from forward into backward, as is FSDP2's default.
    if contender == "fsdp2_instant":
        for module in (model, *model.blocks):
            module.set_custom_all_gather(InstantCollective())
            module.set_custom_reduce_scatter(InstantCollective())
    return model


def parse_arguments() -> argparse.Namespace:
    """The sizes come from bench/cases.py; the C++ contenders take the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    for name in ("vocab", "dim", "layers", "heads", "context", "batch", "fake-world"):
        parser.add_argument(f"--{name}", type=int, default=0)
    return parser.parse_args()


def make_contender(args: argparse.Namespace) -> Trainer | Collectives | OptimizerSteps:
    """What answers the lines."""
    if args.contender == "collectives":
        return Collectives()
    if args.contender.startswith("optimizer_"):
        join_ranks(WORLD)
        return OptimizerSteps(args.contender.removeprefix("optimizer_"))
    return Trainer(args)


def main() -> None:
    """Answers lines until stdin ends."""
    args = parse_arguments()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print goes to the log, not between the replies.
    torch.set_num_threads(1)
    contender = make_contender(args)
    print(json.dumps({"parameters": contender.parameters}), file=replies)
    for line in sys.stdin:
        verb, count = line.split()
        print(json.dumps(contender.handle(verb, int(count))), file=replies)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
