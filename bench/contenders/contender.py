"""One rank of a Python contender: libfsdp's package, FSDP2, DDP, plain training, or c10d's collectives.

bench/run.py starts the ranks with torchrun's variables and drives each through stdin: a line `VERB COUNT` is answered
by one line of JSON on stdout. Between two lines the process sleeps in a read. contender.cpp speaks the same protocol.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from contenders.gpt import BatchPlace, GPTConfig
from contenders.optimizer_steps import OPTIONS, WORLD, OptimizerSteps
from contenders.workloads import OTHERS, Batch, Workload, gpt

Reply = dict[str, Any]
CONTENDERS = (
    *("libfsdp_python", "libfsdp_python_no_reshard", "libfsdp_python_fuse", "empty_hooks"),
    *("fsdp2", "fsdp2_no_reshard", "fsdp2_tuned", "fsdp2_tuned_2", "fsdp2_tuned_no_reshard", "fsdp2_instant"),
    *("libfsdp_megatron", "megatron_fsdp"),
    *("ddp", "ddp_powersgd", "local", "collectives"),
    *(f"optimizer_{kind}" for kind in OPTIONS),
)
COLLECTIVE_NUMEL = 16 * 1024 * 1024  # fp32 elements of the whole buffer: 64 MiB.


def read_memory() -> dict[str, int]:
    """Resident set now, its anonymous part, and its high-water mark, in KiB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"now_kib": "VmRSS", "anonymous_kib": "RssAnon", "high_water_kib": "VmHWM"}
    return {key: int(status[name].split()[0]) for key, name in names.items()}


def timed(work: Callable[[], object]) -> float:
    """Wall time of work, in milliseconds."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def thread_timed(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Milliseconds that this thread has spent on a core, and what came out: what else the machine does counts for little.

    A backward on the CPU runs on the thread that calls it.
    """
    start = time.thread_time()
    result = work()
    return (time.thread_time() - start) * 1e3, result


class Trainer:
    """A model with its optimizer, wrapped as the contender's name says."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.batches_drawn = 0
        self.sharded_over_peers = args.contender != "local" and not args.fake_world
        if args.contender != "local":
            join_ranks(args.fake_world)
        self.base = read_memory()
        self.work = workload_of(args)
        self.microbatches: int = args.microbatches
        self.parameters = sum(p.numel() for p in self.work.model.parameters())
        megatron = megatron_of(args.contender)
        self.model = wrap_as_megatron(megatron, self.work) if megatron else wrap(args, self.work)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        if megatron:
            self.optimizer = megatron.fully_shard_optimizer(optimizer=self.optimizer)
        if args.contender.endswith("_fuse"):
            self.optimizer = libfsdp().fuse(self.optimizer)
        self.plain = workload_of(args).model if args.fake_world else None
        gc.collect()
        gc.freeze()  # What lives as long as the process is not looked at again.
        gc.disable()

    def handle(self, verb: str, count: int) -> Reply:
        """Answers one line of the protocol."""
        if verb == "step":
            return self.repeat(count)
        if verb == "host":
            return self.beside_plain(count)
        if verb in ("sharded", "plain"):  # for bench/instructions.py, which counts what happens until the answer
            model = self.model if verb == "sharded" else self.plain
            assert model is not None
            self.forward_backward(model, [self.draw()])
            return {}
        if verb == "memory":
            return {
                "base_kib": self.base["now_kib"],
                "anonymous_base_kib": self.base["anonymous_kib"],
                "high_water_kib": read_memory()["high_water_kib"],
            }
        raise ValueError(f"no such verb: {verb}")

    def repeat(self, count: int) -> Reply:
        """Times `count` steps, each on the next batches; drawing them, the collector and the barrier are not timed."""
        times, losses = [], []
        for _ in range(count):
            batches = [self.draw() for _ in range(self.microbatches)]
            gc.collect()
            if self.sharded_over_peers:
                dist.barrier()
            start = time.perf_counter()
            loss = self.train(batches)
            times.append((time.perf_counter() - start) * 1e3)
            losses.append(loss.item())
        return {"ms": times, "loss": losses}

    def beside_plain(self, count: int) -> Reply:
        """Forward and backward of the model, and of the same one unsharded, in turns.

        In one process both find the same memory and caches. The losses are the unsharded one's: no data arrive at the other.
        """
        assert self.plain is not None
        reply: dict[str, list[float]] = {"ms": [], "plain_ms": [], "loss": []}
        for place in range(count):
            batch = self.draw()
            steps = [("ms", self.model), ("plain_ms", self.plain)]
            for key, model in steps if place % 2 == 0 else reversed(steps):
                gc.collect()
                time_of_step, loss = thread_timed(functools.partial(self.forward_backward, model, [batch]))
                reply[key].append(time_of_step)
                model.zero_grad()
                if model is self.plain:
                    reply["loss"].append(loss.item())
        return reply

    def draw(self) -> Batch:
        """The next batch of this rank."""
        self.batches_drawn += 1
        return self.work.draw(BatchPlace(self.batches_drawn - 1, self.rank, self.world))

    def forward_backward(self, model: nn.Module, batches: list[Batch]) -> Tensor:
        """Leaves the gradients; they are reduced with the last batch."""
        for batch in batches:
            is_last = batch is batches[-1]
            with self.reducing(is_last):
                loss = self.work.loss(model, batch) / len(batches)
                loss.backward()
        return loss

    def reducing(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Around a batch: whether its gradients are reduced, as users of each contender say it."""
        if self.microbatches == 1:
            return contextlib.nullcontext()
        if isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext() if is_last else self.model.no_sync()
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    def train(self, batches: list[Batch]) -> Tensor:
        """A whole training step."""
        loss = self.forward_backward(self.model, batches)
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


def libfsdp() -> Any:
    """The package, which run.py puts on the path."""
    return importlib.import_module("libfsdp")


def fully_shard_of(contender: str) -> Callable[..., Any]:
    """torch's own, or libfsdp's."""
    return cast(Callable[..., Any], libfsdp().fully_shard) if contender.startswith("libfsdp") else fully_shard


def register_empty_hooks(module: nn.Module) -> None:
    """Hooks as fully_shard registers them, which do nothing: what calling them takes can't be saved."""
    module.register_forward_pre_hook(lambda *_: None, prepend=True, with_kwargs=True)
    module.register_forward_hook(lambda *_: None, always_call=True)


def megatron_of(contender: str) -> Any:
    """The package with Megatron-FSDP's names, its own or libfsdp's; None for other contenders."""
    if contender == "megatron_fsdp":
        return importlib.import_module("contenders.megatron_on_cpu").peer()
    return importlib.import_module("libfsdp.megatron") if contender == "libfsdp_megatron" else None


def wrap_as_megatron(megatron: Any, work: Workload) -> nn.Module:
    """The model as a user of Megatron-FSDP shards it: units by their classes."""
    units = list({type(unit) for unit in work.units})
    sharded = megatron.fully_shard_model(module=work.model, fsdp_unit_modules=units, device=torch.device("cpu"))
    return cast(nn.Module, sharded)


def workload_of(args: argparse.Namespace) -> Workload:
    """What is trained; with --recompute, units keep their inputs alone."""
    torch.manual_seed(0)  # Biases keep what torch draws for them.
    if args.model != "gpt":
        return OTHERS[args.model]()
    work = gpt(GPTConfig(args.vocab, args.dim, args.layers, args.heads, args.context), args.batch)
    if args.recompute:
        for unit in work.units:
            recompute(unit)
    return work


def recompute(unit: nn.Module) -> None:
    """The unit's forward runs once more in backward."""
    forward = unit.forward
    unit.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)


def wrap(args: argparse.Namespace, work: Workload) -> nn.Module:
    """The model as the contender trains it: the rest, beside the units, is the root's."""
    contender, model = args.contender, work.model
    if contender == "local":
        return model
    if contender == "empty_hooks":
        for module in (*work.units, model):
            register_empty_hooks(module)
        return model
    if contender.startswith("ddp"):
        if args.bf16:  # Its gradients are of fp32, as its parameters are.
            model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        bucket_mb = None
        if contender == "ddp_powersgd":  # Gloo confuses the all-reduces of several buckets, which the hook starts in any order.
            bucket_mb = 1 << 20
            dist._DEFAULT_FIRST_BUCKET_BYTES = bucket_mb << 20
        replicated = DistributedDataParallel(
            model, forward_sync_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
        )
        if contender == "ddp_powersgd":  # From the third step on.
            state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            replicated.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return replicated
    world = dist.get_world_size()
    mesh: DeviceMesh = (
        init_device_mesh("cpu", (args.replicas, world // args.replicas), mesh_dim_names=("replicate", "shard"))
        if args.replicas
        else init_device_mesh("cpu", (world,))
    )
    shard = fully_shard_of(contender)
    options: dict[str, Any] = {"mesh": mesh}
    if args.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in work.units:
        shard(unit, reshard_after_forward=not contender.endswith("_no_reshard"), **options)
    shard(model, **options)  # The root stays gathered from forward into backward, as is FSDP2's default.
    if contender == "fsdp2_instant":
        for module in (model, *work.units):
            module.set_custom_all_gather(InstantCollective())
            module.set_custom_reduce_scatter(InstantCollective())
    if contender.startswith("fsdp2_tuned"):
        tune(model, work.units, ahead=2 if contender.endswith("_2") else 1)
    return model


def tune(model: Any, units: Sequence[Any], ahead: int) -> None:
    """FSDP2 as its experts run it: each unit names those that follow, in forward and in backward, and gathers are started at once."""
    model._set_unshard_async_op(True)
    model.set_modules_to_forward_prefetch(list(units[:ahead]))
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[place + 1 : place + 1 + ahead]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, place - ahead) : place])))


def parse_arguments() -> argparse.Namespace:
    """The sizes come from bench/harness/cases.py; the C++ contenders take the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--model", choices=tuple(chain(("gpt",), OTHERS)), default="gpt")
    for name in ("vocab", "dim", "layers", "heads", "context", "batch", "fake-world", "bf16", "recompute", "replicas"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--microbatches", type=int, default=1)
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
