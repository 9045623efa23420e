"""Weights from the ranks that train to ranks that divide them otherwise, without a whole tensor anywhere."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from libfsdp import _C
from libfsdp._checkpoint._items import MODEL, model_state
from libfsdp._meetings import meetings_of
from libfsdp._model import states_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    Box = tuple[str, Sequence[int], Sequence[int], torch.dtype]
    _Range = tuple[Sequence[int], Sequence[int]]  # offsets and sizes


_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class WantedBox:
    """A part of a tensor that a rank wants, and where it is to go.

    Attributes:
        name: the tensor's name in ``state_dict()`` of the model that is trained.
        into: where the values go, of the box's sizes: a tensor, or a view of one with any strides, which stays where it is.
            Several views of one tensor take the parts of a fused weight.
        offsets: where the box begins in the tensor, by dimension; None: at its first element.
        dtype: the dtype in which it is sent; None: that of ``into``. Only floating-point tensors are converted.
    """

    name: str
    into: torch.Tensor
    offsets: Sequence[int] | None = None
    dtype: torch.dtype | None = None


class _Held(NamedTuple):
    """This rank's box of a tensor."""

    shape: list[int]
    offsets: list[int]
    values: torch.Tensor

    def part(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return _part(self.values, self.offsets, offsets, sizes)


class _Target(NamedTuple):
    """A box of a rank's wishes."""

    offsets: list[int]
    sizes: list[int]
    dtype: torch.dtype
    into: torch.Tensor


class _Side(NamedTuple):
    """What this rank is in a transfer."""

    model: nn.Module | None
    held: dict[str, _Held]
    targets: dict[str, list[_Target]]


class _Message(NamedTuple):
    round: int
    peer: int
    sends: bool
    bytes: int
    boxes: list[Box]


class TransferPlan:
    """Who sends which parts of the weights to whom: see transfer_plan."""

    def __init__(
        self,
        plan: _C.TransferPlan,
        group: dist.ProcessGroup,
        side: _Side,
        timeout: timedelta,
    ) -> None:
        """For the library's own use."""
        self._plan, self._group, self._timeout = plan, group, timeout
        self._model, self._targets = side.model, side.targets
        self._signature = _signature(side.held)
        self._number = meetings_of(group).count
        self._messages = [_Message(*message) for message in plan.messages_of(group.rank())]
        self._own = plan.own_of(group.rank())
        self._device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
        self._failure = ""

    @property
    def bytes_sent(self) -> dict[tuple[int, int], int]:
        """The bytes that travel in a run, by sender and receiver (ranks of the group)."""
        return self._plan.bytes_of_pairs()

    @property
    def boxes(self) -> list[tuple[int, int, list[Box]]]:
        """What this rank sends and receives, in this order: sender, receiver, and the name, offsets, sizes and dtype of each box."""
        me = self._group.rank()
        return [(me, m.peer, m.boxes) if m.sends else (m.peer, me, m.boxes) for m in self._messages]

    @property
    def rounds(self) -> int:
        """The number of rounds. In each, a rank sends one message at most, and receives one at most."""
        return self._plan.rounds

    @property
    def largest_bytes(self) -> int:
        """The size of the largest box that travels. No message is larger; a rank has buffers for two of them at most."""
        return self._plan.largest_bytes

    @torch.no_grad()
    def run(self) -> None:
        """Sends the weights of now. Every rank of the group calls it, between steps or between microbatches; nothing of the model changes.

        When it returns, all receivers have everything.

        Raises:
            CommError: on all ranks, if one did not come in time; nothing was sent then, and the plan can run again. Also
                if one has died on the way: receivers may then have some of the new values, and another run needs a new
                group and a new plan.
            Error: on all ranks, if one of them can't take part; nothing was sent.
        """
        what = f"run of plan {self._number}"

        def prepare() -> dict[str, _Held]:
            if self._failure:
                raise _C.Error(f"an earlier run has failed ({self._failure}): make a new group and a new plan")
            held, _ = _held_of(self._model)
            if _signature(held) != self._signature:
                raise _C.Error("the model's shards are not those of which the plan was made: make a new plan")
            return held

        held = _together(self._group, what, self._timeout, prepare)
        failure = ""
        try:
            self._copy_own(held)
            self._exchange(held)
        except Exception as error:  # Of any kind: the others wait for this rank.
            failure = str(error)
        try:
            failures = meetings_of(self._group).meet(failure, self._timeout)
        except _C.CommError as error:
            self._failure = str(error)
            raise _C.CommError(f"{error}, during the {what}" + (f"; here: {failure}" if failure else "")) from None
        for rank, text in enumerate(failures):
            if text:
                self._failure = f"rank {rank}: {text}"
                raise _C.CommError(f"transfer_plan: the {what} has failed on rank {rank}: {text}")

    def _copy_own(self, held: dict[str, _Held]) -> None:
        for name, offsets, sizes, dtype in self._own:
            values = held[name].part(offsets, sizes)
            for target, part in self._places(name, offsets, sizes, dtype, values.to(dtype)):
                target.copy_(part)

    def _places(
        self, name: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, values: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns where a box goes, with the part of its values that goes there."""
        places = []
        for target in self._targets[name]:
            common = _intersection((offsets, sizes), (target.offsets, target.sizes))
            if common is not None and target.dtype == dtype:
                into = _part(target.into, target.offsets, *common)
                places.append((into, _part(values, offsets, *common)))
        return places

    def _exchange(self, held: dict[str, _Held]) -> None:
        buffers: dict[bool, torch.Tensor] = {}
        for sends in (True, False):
            size = max(
                (m.bytes for m in self._messages if m.sends == sends and self._straight(m, held) is None), default=0
            )
            buffers[sends] = torch.empty(size, dtype=torch.uint8, device=self._device)
        for _, messages in itertools.groupby(self._messages, lambda message: message.round):
            operations, peers, arriving = [], [], []
            for message in messages:
                straight = self._straight(message, held)
                flat = (
                    buffers[message.sends][: message.bytes]
                    if straight is None
                    else straight.reshape(-1).view(torch.uint8)
                )
                if message.sends and straight is None:
                    for (name, offsets, sizes, _), values in _over(flat, message.boxes):
                        values.copy_(held[name].part(offsets, sizes))
                elif straight is None:
                    arriving.append((flat, message.boxes))
                operation = dist.isend if message.sends else dist.irecv
                operations.append(dist.P2POp(operation, flat, group=self._group, group_peer=message.peer))
                peers.append(f"{'to' if message.sends else 'from'} rank {message.peer}")
            try:
                works = dist.batch_isend_irecv(operations)
            except RuntimeError as error:
                raise RuntimeError(f"the messages {' and '.join(peers)}: {error}") from error
            for i, work in enumerate(works):  # NCCL has one for all.
                peer = peers[i] if len(works) == len(peers) else " and ".join(peers)
                try:
                    work.wait(self._timeout)
                except RuntimeError as error:
                    raise RuntimeError(f"the message {peer}: {error}") from error
            for flat, boxes in arriving:
                for (name, offsets, sizes, dtype), values in _over(flat, boxes):
                    for target, part in self._places(name, offsets, sizes, dtype, values):
                        target.copy_(part)

    def _straight(self, message: _Message, held: dict[str, _Held]) -> torch.Tensor | None:
        """Returns the memory that a message can be sent from, or received into, without a buffer; None if there is none."""
        if len(message.boxes) != 1:
            return None
        name, offsets, sizes, dtype = message.boxes[0]
        if message.sends:
            found = held[name].part(offsets, sizes)
        else:
            targets = [
                t
                for t in self._targets[name]
                if _intersection((offsets, sizes), (t.offsets, t.sizes)) and t.dtype == dtype
            ]
            if len(targets) != 1 or _intersection((offsets, sizes), (targets[0].offsets, targets[0].sizes)) != (
                list(offsets),
                list(sizes),
            ):
                return None
            found = _part(targets[0].into, targets[0].offsets, offsets, sizes)
        return (
            found if found.is_contiguous() and found.dtype == dtype and found.device.type == self._device.type else None
        )


def transfer_plan(
    model: nn.Module | None,
    receivers: Sequence[int],
    *,
    wanted: Iterable[WantedBox] = (),
    group: dist.ProcessGroup | None = None,
    message_bytes: int = 32 << 20,
    timeout: timedelta = _TIMEOUT,
) -> TransferPlan:
    """Plans how weights get from the ranks that train to ranks that want other parts of them, such as those of an inference engine.

    The ranks of the group tell each other once which parts they have and want. Each ``run()`` of the plan then sends every
    element that a receiver wants to it once, straight from the shard of one of the ranks that have it, already in the dtype
    that is wanted. What a rank both wants and has, it copies by itself. Boxes above ``message_bytes`` are divided; a rank
    has buffers for two messages at most.

    Every rank of the group calls it.

    Args:
        model: the sharded model on ranks that train (the root, as names are those of its ``state_dict()``); None on others.
        receivers: the ranks of the group that want something; the same on all ranks.
        wanted: what this rank wants, if it is one of them.
        group: a group that all ranks have joined, those that train and those that receive; None: the default group.
        message_bytes: the most bytes of a message, at least 16; the same on all ranks.
        timeout: how long a rank waits for another one, here and in each run.

    Raises:
        Error: on all ranks, if an argument is wrong on one, if they differ, if no parameter or buffer has a name, if a box
            is outside of its tensor, or if a tensor is not converted to a dtype. Training can go on.
        CommError: on all ranks, with the number of a rank that did not come in time.
    """
    group = group or dist.distributed_c10d._get_default_group()
    receivers = list(receivers) if isinstance(receivers, Iterable) else [receivers]
    if not isinstance(group, dist.ProcessGroup):
        raise _C.Error("transfer_plan: this rank is not in the group")
    me = group.rank()

    def prepare() -> tuple[dict[str, _Held], dict[str, str], list[tuple[str, _Target]]]:
        _check(model, message_bytes, timeout)
        if not all(isinstance(rank, int) and 0 <= rank < group.size() for rank in receivers):
            raise _C.Error(f"receivers must be ranks of the group, below {group.size()}, got {receivers!r}")
        targets = [(box.name, _target_of(box)) for box in wanted]
        if targets and me not in receivers:
            raise _C.Error(f"it wants {len(targets)} boxes, but is none of the receivers {receivers}")
        return *_held_of(model), targets

    waits = timeout if isinstance(timeout, timedelta) else _TIMEOUT
    settings = f"receivers {receivers} and message_bytes {message_bytes}"
    held, aliases, targets = _together(group, "plan", waits, prepare, settings=settings)
    mine = (
        [(name, has.shape, has.values.dtype, has.offsets, list(has.values.shape)) for name, has in held.items()],
        [(name, target.offsets, target.sizes, target.dtype) for name, target in targets],
        aliases,
    )
    every: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(every, mine, group=group)
    except RuntimeError as error:
        raise _C.CommError(
            f"transfer_plan: a rank has gone while the ranks told each other what they want: {error}"
        ) from error
    # The second name of a tied parameter is the first one's.
    names = {alias: name for *_, of_rank in every for alias, name in of_rank.items()}
    plan = _C.TransferPlan(
        [(has, [(names.get(name, name), *box) for name, *box in wants]) for has, wants, _ in every],
        message_bytes=message_bytes,
    )
    by_name: dict[str, list[_Target]] = {}
    for name, target in targets:
        by_name.setdefault(names.get(name, name), []).append(target)
    return TransferPlan(plan, group, _Side(model, held, by_name), timeout)


def _together(
    group: dist.ProcessGroup, what: str, timeout: timedelta, work: Callable[[], Any], *, settings: Any = None
) -> Any:
    """Does the work on each rank, and returns its result if all have come for the same and none has failed.

    Raises:
        Error: on all ranks otherwise.
    """
    result, problem = None, ""
    try:
        result = work()
    except Exception as error:  # Of any kind: the others wait for this rank.
        problem = str(error)
    said = json.dumps([what, problem, settings])
    every = [json.loads(text) for text in meetings_of(group).meet(said, timeout)]
    for rank, (other, text, _) in enumerate(every):
        if other != every[0][0]:
            raise _C.Error(
                f"transfer_plan: rank 0 of the group has come for a {every[0][0]}, and rank {rank} for a {other}"
            )
        if text:
            raise _C.Error(f"transfer_plan: rank {rank} of the group: {text.removeprefix('transfer_plan: ')}")
    for rank, (*_, of_rank) in enumerate(every):
        if of_rank != every[0][2]:
            raise _C.Error(
                f"transfer_plan: the ranks of the group do not agree: rank 0 has {every[0][2]}, and rank {rank} has {of_rank}"
            )
    return result


def _check(model: nn.Module | None, message_bytes: Any, timeout: Any) -> None:
    if not isinstance(message_bytes, int) or isinstance(message_bytes, bool) or message_bytes < 16:
        raise _C.Error(f"message_bytes must be an int of at least 16, got {message_bytes!r}")
    if not isinstance(timeout, timedelta):
        raise _C.Error(f"timeout must be a timedelta, got {timeout!r}")
    if model is not None and not any(True for _ in states_in(model)):
        raise _C.Error(
            f"{type(model).__name__} is not sharded: call fully_shard on it first, or give None on a rank that only receives"
        )


def _target_of(box: WantedBox) -> _Target:
    """Checks what a rank says of a box that it wants.

    Raises:
        Error: if it can't be.
    """
    into = box.into
    if not isinstance(into, torch.Tensor) or isinstance(into, DTensor) or into.is_meta:
        raise _C.Error(
            f"'{box.name}' is to go into a {type(into).__name__}; it takes a tensor with memory of its own, or a view of one"
        )
    offsets = [0] * into.ndim if box.offsets is None else list(box.offsets)
    if len(offsets) != into.ndim:
        raise _C.Error(f"'{box.name}' is wanted at {offsets}, but goes into a tensor of the shape {list(into.shape)}")
    dtype = into.dtype if box.dtype is None else box.dtype
    if dtype != into.dtype and not (dtype.is_floating_point and into.dtype.is_floating_point):
        raise _C.Error(
            f"'{box.name}' is to travel as {dtype} into a tensor of {into.dtype}; only floating-point tensors are converted"
        )
    return _Target(offsets, list(into.shape), dtype, into.detach())


def _held_of(model: nn.Module | None) -> tuple[dict[str, _Held], dict[str, str]]:
    """Returns this rank's box of each tensor of the model, and the other names of tied ones.

    Raises:
        Error: for tensors whose values are no plain tensor.
    """
    if model is None:
        return {}, {}
    for _, state, _ in states_in(model):
        if state.post_optim_event is not None:  # The next forward waits for it, too.
            torch.get_device_module(state.mesh.device.type).current_stream().wait_event(state.post_optim_event)
    found = model_state(model)
    held = {
        item.key.removeprefix(f"{MODEL}."): _Held(item.shape, list(item.offsets), item.values)
        for item in found.items
        if item.values.numel() > 0
    }
    of_prefix = len(MODEL) + 1
    return held, {alias[of_prefix:]: name[of_prefix:] for alias, name in found.aliases.items()}


def _signature(held: dict[str, _Held]) -> dict[str, Any]:
    return {name: (has.shape, has.offsets, has.values.shape, has.values.dtype) for name, has in held.items()}


def _intersection(a: _Range, b: _Range) -> _Range | None:
    begins = [max(x, y) for x, y in zip(a[0], b[0], strict=True)]
    ends = [min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True)]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return (begins, sizes) if all(size > 0 for size in sizes) else None


def _part(values: torch.Tensor, begin: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Returns a box out of the values of the box that begins at ``begin``, as a view."""
    for dimension, (first, offset, size) in enumerate(zip(begin, offsets, sizes, strict=True)):
        if size != values.size(dimension):
            values = values.narrow(dimension, offset - first, size)
    return values


def _over(flat: torch.Tensor, boxes: Sequence[Box]) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yields the boxes of a message with their values in its bytes."""
    begin = 0
    for box in boxes:
        *_, sizes, dtype = box
        end = begin + math.prod(sizes) * dtype.itemsize
        yield box, flat[begin:end].view(dtype).view(sizes)
        begin = end
