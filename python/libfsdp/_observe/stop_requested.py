"""Ends a training in an orderly way after Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
from functools import cache

import torch
import torch.distributed as dist

_received: list[int] = []


def stop_requested(group: dist.ProcessGroup | None = None) -> bool:
    """True on every rank of the group after one of them has received SIGINT (Ctrl-C) or SIGTERM.

    Ask it after each step, and save and leave the loop if it is true: the ranks then end after the same step. torchrun passes these signals
    on to its ranks. The first call makes this process listen, in place of handlers that the program has set. Until then both signals end
    the process, as they do by default, and afterwards they do nothing else. Collective.

    Args:
        group: a group of torch.distributed; None stands for the default group, or for this process alone if there is none.

    Raises:
        ValueError: the first call does not come from the main thread, which alone can set handlers.
    """
    _listen()
    requested = bool(_received)
    if not dist.is_initialized():
        return requested
    device = dist.distributed_c10d._get_object_coll_device(group)
    flag = torch.tensor([requested], dtype=torch.int32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


@cache
def _listen() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: _received.append(received))
