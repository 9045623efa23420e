"""Lets NVIDIA's Megatron-FSDP, which insists on CUDA, train on CPU and Gloo, to be measured beside others.

What it computes and sends stays its own. On a CPU everything is in order anyway, so streams and events do nothing; and Gloo's
reductions, which do not average, are followed by a division.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist


class Idle:
    """A stream or an event that has nothing to wait for."""

    device = torch.device("cpu")

    def __init__(self, *_: object, **__: object) -> None:
        """Takes what both take."""

    def query(self) -> bool:
        return True

    def record_event(self, event: Idle | None = None) -> Idle:
        return event or self

    def _nothing(self, *_: object) -> None: ...

    record = wait = synchronize = wait_stream = wait_event = _nothing


def _nothing(*_: object, **__: object) -> None: ...


def _same(self: Any, *_: object, **__: object) -> Any:
    return self


def _average_by_division(name: str) -> None:
    """Gives a blocking reduction of torch.distributed the operation AVG."""
    collective = getattr(dist, name)

    def reduce(output: torch.Tensor, *inputs: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        if op != dist.ReduceOp.AVG:
            return collective(output, *inputs, op=op, group=group, **options)
        if options.get("async_op"):
            raise NotImplementedError(f"{name} that averages and does not block")
        collective(output, *inputs, op=dist.ReduceOp.SUM, group=group, **options)
        return output.div_(dist.get_world_size(group))

    setattr(dist, name, reduce)


def stand_in_for_cuda() -> None:
    """Before megatron_fsdp is imported."""
    cuda: Any = torch.cuda
    idle = Idle()
    cuda.Stream = cuda.Event = Idle
    cuda.is_available = lambda: False
    cuda.current_device = lambda: 0
    cuda.current_stream = lambda *_, **__: idle
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.set_device = cuda.synchronize = cuda.empty_cache = _nothing
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _nothing
    torch.Tensor.cuda = torch.nn.Module.cuda = _same
    _average_by_division("all_reduce")
    _average_by_division("reduce_scatter_tensor")


def peer() -> Any:
    """The package, changed where it would ask for CUDA."""
    importlib.import_module("torch._dynamo")  # It looks at torch.cuda as it really is.
    # Where Megatron-Core is installed, the package takes names from there, which may be those of another release.
    modules: dict[str, Any] = sys.modules
    modules["megatron"] = None
    stand_in_for_cuda()
    package: Any = importlib.import_module("megatron_fsdp")
    config: Any = importlib.import_module("megatron_fsdp.distributed_data_parallel_config").DistributedDataParallelConfig
    made = config.__post_init__

    def without_scaled_sums(self: Any) -> None:  # NCCL alone has them.
        made(self)
        self.gradient_reduce_div_fusion = False

    config.__post_init__ = without_scaled_sums
    functions: Any = importlib.import_module("megatron_fsdp.fully_shard")
    make_mesh = functions.init_device_mesh
    functions.init_device_mesh = lambda device_type="cpu", **options: make_mesh("cpu", **options)
    return package
