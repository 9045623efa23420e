"""Transfers weights from the ranks that train to ranks that divide them differently, without unsharded tensors anywhere."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from libfsdp import _C
from libfsdp._checkpoint.items import MODEL, Item, clean, model_state, values_of
from libfsdp._core.model import states_in
from libfsdp._core.packed_weights import is_of_packed, is_packed
from libfsdp._weights.changed_weights import WeightSnapshot
from libfsdp._weights.chunks import LocalChunk, local_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    Box = tuple[str, Sequence[int], Sequence[int], torch.dtype]

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


class TransferPlan:
    """A plan of which rank sends which parts of the weights to which other rank: see transfer_plan."""

    def __init__(
        self, transfer: _C.PlannedTransfer, group: dist.ProcessGroup, model: nn.Module | None, timeout: timedelta
    ) -> None:
        """For the library's own use."""
        self._transfer, self._group, self._model, self._timeout = transfer, group, model, timeout

    @property
    def bytes_sent(self) -> dict[tuple[int, int], int]:
        """The bytes that travel in a run, by sender and receiver (ranks of the group)."""
        return self._transfer.bytes_of_pairs()

    @property
    def boxes(self) -> list[tuple[int, int, list[Box]]]:
        """The boxes that this rank sends and receives, in this order: sender, receiver, name, offsets, sizes and dtype of each box."""
        return self._transfer.messages()

    @property
    def rounds(self) -> int:
        """The number of rounds. In each, a rank sends one message at most, and receives one at most."""
        return self._transfer.rounds

    @property
    def largest_bytes(self) -> int:
        """The size of the largest box that travels. No message is larger; a rank has buffers for two of them at most."""
        return self._transfer.largest_bytes

    @property
    def travelled_bytes(self) -> int:
        """The bytes that this rank has sent in the last run."""
        return self._transfer.travelled_bytes

    def run(self, *, since: WeightSnapshot | None = None) -> None:
        """Sends the weights of now. Every rank of the group calls it, between steps or between microbatches; nothing of the model changes.

        When it returns, all receivers have everything.

        Args:
            since: what the receivers have, a snapshot of each rank's own, on all ranks. Only what is not the same is sent: of a box
                positions and values of single elements where that has fewer bytes, nothing where nothing has changed, and the
                whole box where not. Bits are compared, in the dtype that travels, so receivers have the bits of a whole run. The
                first run of a snapshot sends everything. A snapshot belongs to one plan.

        Raises:
            CommError: on all ranks, if one did not call it in time; nothing was sent then, and the plan can run again.
                Also if one has died on the way: receivers may then have some of the new values, and another run needs a
                new group and a new plan.
            Error: on all ranks, if one of them can't take part; nothing was sent.
        """
        held: list[_C.HeldChunk] = []
        problem = ""
        try:
            if since is not None and not isinstance(since, WeightSnapshot):
                raise _C.Error(f"since must be a WeightSnapshot or None, got {since!r}")
            held, _ = _held_of(self._model)
        except Exception as error:  # Of any kind: the others wait for this rank.
            problem = _text_of(error)
        snapshot = since._snapshot if isinstance(since, WeightSnapshot) else None
        self._transfer.run(held, problem=problem, timeout=self._timeout, since=snapshot)


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

    The ranks of the group exchange once which parts they have and want. Each ``run()`` of the plan then sends every
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
            is outside of its tensor, or if a tensor is not converted to a dtype. Training can continue.
        CommError: on all ranks, with the number of a rank that did not call it in time.
    """
    group = group or dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise _C.Error("transfer_plan: this rank is not in the group")
    held: list[_C.HeldChunk] = []
    targets: list[_C.TransferTarget] = []
    aliases: dict[str, str] = {}
    settings = _C.TransferSettings([], 0, _TIMEOUT)
    problem = ""
    try:
        settings = _settings(group, receivers, message_bytes, timeout)
        _check(model)
        targets = [_target_of(box) for box in wanted]
        held, aliases = _held_of(model)
    except Exception as error:  # Of any kind: the others wait for this rank.
        problem = _text_of(error)
    side = _C.TransferSide(held=held, targets=targets, aliases=list(aliases.items()), problem=problem)
    return TransferPlan(_C.PlannedTransfer(_peers_of(group), side, settings), group, model, timeout)


_peers: weakref.WeakKeyDictionary[dist.ProcessGroup, _C.TransferPeers] = weakref.WeakKeyDictionary()


def _peers_of(group: dist.ProcessGroup) -> _C.TransferPeers:
    """Returns the ranks of a group, for all of its plans in this process: they count their calls together."""
    if group not in _peers:
        store = dist.distributed_c10d._get_process_group_store(group)
        device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
        _peers[group] = _C.TransferPeers(group, store, device)
    return _peers[group]


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def _settings(group: dist.ProcessGroup, receivers: Any, message_bytes: Any, timeout: Any) -> _C.TransferSettings:
    """Checks the settings that are the same on all ranks, and each rank's timeout.

    Raises:
        Error: if it can't be.
    """
    receivers = list(receivers) if isinstance(receivers, Iterable) else [receivers]
    if not isinstance(message_bytes, int) or isinstance(message_bytes, bool) or not 16 <= message_bytes < 1 << 63:
        raise _C.Error(f"message_bytes must be an int of at least 16, got {message_bytes!r}")
    if not isinstance(timeout, timedelta):
        raise _C.Error(f"timeout must be a timedelta, got {timeout!r}")
    if timeout < timedelta(milliseconds=1):
        raise _C.Error(f"timeout must be at least a millisecond, got {timeout}")
    if not all(isinstance(rank, int) and 0 <= rank < group.size() for rank in receivers):
        raise _C.Error(f"receivers must be ranks of the group, below {group.size()}, got {receivers!r}")
    return _C.TransferSettings(receivers, message_bytes, timeout)


def _check(model: nn.Module | None) -> None:
    if model is not None and not any(True for _ in states_in(model)):
        raise _C.Error(
            f"{type(model).__name__} is not sharded: call fully_shard on it first, or give None on a rank that only receives"
        )


def _target_of(box: WantedBox) -> _C.TransferTarget:
    if not isinstance(box.into, torch.Tensor) or isinstance(box.into, DTensor):
        raise _C.Error(
            f"'{box.name}' is to go into a {type(box.into).__name__}; it takes a tensor with memory of its own, or a view of one"
        )
    return _C.TransferTarget(box.name, box.into, None if box.offsets is None else list(box.offsets), box.dtype)


def _held_of(model: nn.Module | None) -> tuple[list[_C.HeldChunk], dict[str, str]]:
    """Returns this rank's boxes of the tensors of the model, and the other names of tied ones.

    Raises:
        Error: for tensors whose values are no plain tensor, or of which it is not known where this rank's part lies.
    """
    if model is None:
        return [], {}
    for _, state, _ in states_in(model):
        if state.post_optim_event is not None:  # The next forward waits for it, too.
            torch.get_device_module(state.mesh.device.type).current_stream().wait_event(state.post_optim_event)
    held: list[_C.HeldChunk] = []
    packed = [clean(name) for name, p in model.named_parameters(remove_duplicate=False) if is_packed(p)]

    def add(path: tuple[str, ...], tensor: torch.Tensor) -> Item:
        name = ".".join(path[1:])
        shape = list(tensor.shape)
        local = values_of(name, tensor)
        if local.numel() > 0:
            as_is = is_of_packed(name, packed)
            held.extend(_C.HeldChunk(name, shape, *chunk, as_is) for chunk in _chunks_of(name, tensor, local))
        return Item(path, shape, [0] * len(shape), local)

    found = model_state(model, add)
    of_prefix = len(MODEL) + 1
    return held, {alias[of_prefix:]: name[of_prefix:] for alias, name in found.aliases.items()}


def _chunks_of(name: str, tensor: torch.Tensor, local: torch.Tensor) -> list[LocalChunk]:
    if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
        return [LocalChunk([0] * tensor.ndim, local)]
    chunks = local_chunks(tensor, local)
    if chunks is None:
        raise _C.Error(
            f"'{name}': this rank's part, of the shape {list(local.shape)}, is not what its placements {tensor.placements} make of the "
            f"shape {list(tensor.shape)}"
        )
    return chunks
