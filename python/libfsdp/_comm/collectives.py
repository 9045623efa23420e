"""Collectives by torch.distributed, for process groups that the engine can't call directly."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


# From torch 2.13 on, calls of the older names warn (FutureWarning), and FSDP2 uses the newer ones.
_GATHER, _REDUCE = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)
_ORIGINALS = {
    name: getattr(dist, name) for name in ("all_gather_into_tensor", "reduce_scatter_tensor", _GATHER, _REDUCE)
}


def are_replaced() -> bool:
    """True if a program has replaced functions of torch.distributed by its own."""
    return any(getattr(dist, name) is not original for name, original in _ORIGINALS.items())


def _function(name: str, older: str) -> Callable[..., dist.Work | None]:
    """Returns torch's function of this name, or that of the older name if a program has replaced it to observe calls."""
    return getattr(dist, name if getattr(dist, older) is _ORIGINALS[older] else older)


def all_gather(
    output: torch.Tensor, shard: torch.Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """Gathers every rank's `shard` into `output`, in rank order."""
    return _function(_GATHER, "all_gather_into_tensor")(output, shard, group=group, async_op=async_op)


def has_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's backend for a device has an allocator of its own, whose memory its collectives need not copy."""
    try:
        return bool(group._get_backend(device).supports_tensor_alloc(device))
    except (AttributeError, RuntimeError):  # a group or backend that is written in Python
        return False


class Collectives:
    """The collectives of one process group that the engine calls. Each gather and each reduction of a unit is one call.

    Args:
        group: the ranks, in order; None for a single rank, which needs no collectives.
        device: the device of the tensors.
    """

    _all: ClassVar[weakref.WeakSet[Collectives]] = weakref.WeakSet()

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        Collectives._all.add(self)
        self._group = group
        self._device = device
        self._size = 1 if group is None else dist.get_world_size(group)
        self._is_connected = False  # by use_memory
        self.custom_all_gather: Callable[..., dist.Work | None] | None = None
        self.custom_reduce_scatter: Callable[..., dist.Work | None] | None = None

    @staticmethod
    def let_go_of_groups() -> None:
        """Drops the references to process groups, after ``destroy_process_group()``: no collective is possible any more."""
        for collectives in Collectives._all:
            collectives._group = None

    def use_memory(self) -> bool:
        """Whether the group's backend has an allocator of its own, which is then ready."""
        if self._group is None or not has_memory(self._group, self._device):
            return False
        if not self._is_connected:
            # NCCL registers memory with the connections, which the first collective makes.
            dist.barrier(self._group, device_ids=None if self._device.index is None else [self._device.index])
            self._is_connected = True
        return True

    def allocate(self, size: int) -> torch.Tensor:
        """Allocates memory of this many bytes by the backend's allocator."""
        assert self._group is not None
        backend = self._group._get_backend(self._device)
        return backend.allocate_tensor(size, dtype=torch.uint8, device=self._device)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> dist.Work | None:
        """Starts an all-gather. When it is done, `output` holds every rank's `shard`, in rank order."""
        if self.custom_all_gather is not None:
            return self.custom_all_gather(output_tensor=output, input_tensor=shard, group=self._group, async_op=True)
        return all_gather(output, shard, group=self._group, async_op=True)

    def reduce_scatter(self, output: torch.Tensor, unreduced: torch.Tensor) -> dist.Work | None:
        """Starts a reduce-scatter. When it is done, `output` holds the sum over the ranks of this rank's part of `unreduced`."""
        options: dict[str, Any] = {"op": dist.ReduceOp.SUM, "group": self._group, "async_op": True}
        if self.custom_reduce_scatter is not None:
            return self.custom_reduce_scatter(output_tensor=output, input_tensor=unreduced, **options)
        return _function(_REDUCE, "reduce_scatter_tensor")(output, unreduced, **options)

    def exchange(self, every: torch.Tensor, value: torch.Tensor) -> None:
        """Fills `every` [ranks, ...] with each rank's `value`. Both lie on the host; blocks."""
        moved = value.contiguous().to(self._device).view(torch.uint8).flatten()
        gathered = torch.empty(self._size * moved.numel(), dtype=torch.uint8, device=self._device)
        all_gather(gathered, moved, group=self._group)
        every.view(torch.uint8).view(-1).copy_(gathered)

    def scatter(self, into: torch.Tensor, shards: list[torch.Tensor], root: int) -> None:
        """Sends each rank its shard from rank `root` of the group; blocks."""
        source = dist.get_global_rank(self._group, root)
        mine = dist.get_rank(self._group) == root
        dist.scatter(into, shards if mine else None, src=source, group=self._group)

    def global_rank(self, rank: int) -> int:
        """Returns the global rank of rank `rank` of the group, for errors."""
        return dist.get_global_rank(self._group, rank)

    def barrier(self) -> None:
        """Blocks until all ranks have arrived."""
        dist.barrier(self._group)
