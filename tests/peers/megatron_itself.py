"""Lets Megatron-FSDP itself run where no accelerator is, as the reference for its tests.

Streams and events do nothing, since on the CPU all is in order; what only NCCL has is made of what Gloo has.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any


class Idle:
    """A stream or an event: every method does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        import torch

        self.device = torch.device("cpu")

    def query(self) -> bool:
        """All has ended."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """The event that was given, or another one."""
        return event or Event()

    def _nothing(self, *_: object, **__: object) -> None:
        """For all of them."""

    wait = wait_stream = wait_event = synchronize = record = _nothing


class Stream(Idle):
    """In place of torch.cuda's."""


class Event(Idle):
    """In place of torch.cuda's."""


def stand_in_for_cuda() -> None:
    """Before the package is imported."""
    import torch
    import torch.distributed as dist

    current = Stream()
    replaced: dict[str, Any] = {
        "is_available": lambda: False,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda _=None: contextlib.nullcontext(),
        "current_stream": lambda *_, **__: current,
        "current_device": lambda: 0,
        # A function for each: torch.compile wants to tell them apart.
        **{name: (lambda *_, **__: None) for name in ("set_device", "synchronize", "empty_cache")},
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_, **__: 0)
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = lambda self, *_, **__: self
    dist.all_reduce = by_sums(dist.all_reduce, "tensor")
    dist.reduce_scatter_tensor = by_sums(dist.reduce_scatter_tensor, "output")
    dist.all_gather = of_any_sizes(dist.all_gather)


def by_sums(collective: Callable[..., Any], output: str) -> Callable[..., Any]:
    """Gloo has no averages."""
    import torch.distributed as dist

    @functools.wraps(collective)
    def wrapper(*args: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **more: Any) -> Any:
        if op != dist.ReduceOp.AVG:
            return collective(*args, op=op, group=group, **more)
        assert not more.get("async_op")
        collective(*args, op=dist.ReduceOp.SUM, group=group, **more)
        (args[0] if args else more[output]).div_(dist.get_world_size(group))
        return None

    return wrapper


def of_any_sizes(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """NCCL gathers tensors of different sizes; with Gloo, each rank sends its own to all."""
    import torch.distributed as dist

    @functools.wraps(all_gather)
    def wrapper(outputs: list[Any], tensor: Any, group: Any = None, **more: Any) -> Any:
        if len({one.shape for one in outputs}) == 1:
            return all_gather(outputs, tensor, group=group, **more)
        outputs[dist.get_rank(group)].copy_(tensor)
        for rank, one in enumerate(outputs):
            if one.numel() > 0:
                dist.broadcast(one, group=group, group_src=rank)
        return None

    return wrapper


def send_to_cpu(package: str) -> None:
    """After the package can be imported: where it takes CUDA for granted, it gets the CPU."""
    import torch

    def module(name: str) -> Any:
        return importlib.import_module(f"{package}.{name}")

    def after(owner: Any, method: str, then: Callable[[Any], None]) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **more: Any) -> None:
            original(self, *args, **more)
            then(self)

        setattr(owner, method, wrapper)

    def divides_itself(config: Any) -> None:
        config.gradient_reduce_div_fusion = False  # Gloo does not multiply before it adds.

    def has_stream(buffer: Any) -> None:
        buffer.allocation_stream = getattr(buffer, "allocation_stream", None) or torch.cuda.current_stream()

    after(module("distributed_data_parallel_config").DistributedDataParallelConfig, "__post_init__", divides_itself)
    model = module("megatron_fsdp").MegatronFSDP
    model.__init__ = with_default(model.__init__, "device", torch.device("cpu"))
    v1 = module("fully_shard")
    make_mesh = v1.init_device_mesh
    v1.init_device_mesh = lambda device_type=None, *args, **more: make_mesh("cpu", *args, **more)
    buffer = module("experimental.dbuffer").DBuffer
    after(buffer, "__init__", has_stream)
    from_local = buffer.from_local.__func__

    def from_local_with_stream(cls: Any, *args: Any, **more: Any) -> Any:
        made = from_local(cls, *args, **more)
        has_stream(made)
        return made

    buffer.from_local = classmethod(from_local_with_stream)
    make_context = module("experimental.fully_shard").fully_shard_context
    for owner in (module("experimental.fully_shard"), module("experimental")):
        # It asks for an accelerator, and then does not use it.
        owner.fully_shard_context = lambda device=None, **more: make_context(device=torch.device("cuda", 0), **more)


def with_default(function: Callable[..., Any], name: str, default: Any) -> Callable[..., Any]:
    """An argument that is None gets another default."""

    @functools.wraps(function)
    def wrapper(*args: Any, **more: Any) -> Any:
        if more.get(name) is None:
            more[name] = default
        return function(*args, **more)

    return wrapper
