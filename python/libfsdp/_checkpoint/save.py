"""Saves checkpoints. Python gives the values of this rank their names, and the C++ library writes and commits them."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from libfsdp import _C
from libfsdp._checkpoint.arguments import (
    as_list,
    check_counts,
    check_functions,
    check_grad_scaler,
    check_metric,
    check_model,
    check_path,
    check_values,
)
from libfsdp._checkpoint.checkpoint_ranks import CheckpointRanks, device_of_model
from libfsdp._checkpoint.failed_load import failed_load_of
from libfsdp._checkpoint.items import OPTIMIZER, ModelState, OptimizerState, model_state, optimizer_state
from libfsdp._checkpoint.phases import Phases

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist
    from torch import nn

    from libfsdp._checkpoint.arguments import Optimizers
    from libfsdp._checkpoint.phases import PhaseReport

_NOTHING_SAVED = "nothing was saved:"
# As in C++: the thread gets a tenth of a core that training also uses, and all of an idle core.
_NICE_WHILE_WRITING = 10


@dataclass(frozen=True)
class _OfProgram:
    """What a program saves beside model and optimizers: see save."""

    extra: Mapping[str, Any] | None
    rank_extra: Mapping[str, Any] | None
    metric: float | None
    grad_scaler: torch.amp.GradScaler | None
    rng: bool


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    keep_last: int = 0,
    keep_every: int = 0,
    keep_best: int = 0,
    metric: float | None = None,
    rng: bool = True,
    rank_extra: Mapping[str, Any] | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    on_phase: Callable[[PhaseReport], None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a checkpoint into the new folder ``path``, on a file system that all ranks share.

    It appears complete or not at all: files are written to a hidden folder beside it and synced, and one rename commits them. An
    older checkpoint of that name is replaced in the same way. Its format is that of torch.distributed.checkpoint, with checksums.
    Collective.

    Args:
        path: the checkpoint's own folder, such as "run/step-1000".
        model: sharded by ``fully_shard``.
        optimizer: an optimizer of its parameters, or a list of several; their state is saved, too.
        extra: values of the program, such as the step. Rank 0's are saved, and every rank gets them: None, bool, int, float, str,
            bytes, tensors, and lists, tuples and dictionaries of these (tensors not in tuples, and below text keys only).
        keep_last: how many checkpoints of a series ("step-" of "step-1000") are kept, this one included; 0: all. Older complete ones
            are removed after this one is complete.
        keep_every: with ``keep_last``: checkpoints whose number is a multiple of this are kept as well.
        keep_best: with ``keep_last``: this many of the checkpoints with the least ``metric`` are kept as well.
        metric: a loss, or the negative of an accuracy. Rank 0's is saved.
        rng: save each rank's random generators: torch's default one of the CPU, and that of the model's device.
        rank_extra: this rank's own values, such as the position of its data loader. Names may differ among ranks.
        grad_scaler: a scaler whose state is saved.
        on_phase: called on every rank at the end of each phase, with a report.
        process_group: the ranks that have the model; None: all. With pipeline parallelism, all stages save together.

    Raises:
        Error: on all ranks, if it failed on any. Earlier checkpoints are then unchanged.
        CommError: if a rank has failed, or does something else.
    """
    path = check_path("path", path)
    check_model(model)
    optimizers = as_list(optimizer)
    check_counts(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    check_functions("a report", on_phase=on_phase)
    check_grad_scaler(grad_scaler)
    together = CheckpointRanks(model, process_group, own=False)
    phases = Phases(on_phase)
    parts = _collect(together, model, optimizers, _OfProgram(extra, rank_extra, metric, grad_scaler, rng), None)
    phases.end("collect", parts.bytes)
    _C.write_checkpoint(
        path,
        parts,
        together.ranks,
        saved=0,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        on_phase=phases.tell,
    )


class _BackgroundSave:
    """One save at a time, beside training."""

    def __init__(self, model: nn.Module, process_group: dist.ProcessGroup | None) -> None:
        self.together = CheckpointRanks(model, process_group, own=True)
        self._buffer = _C.HostBuffer(device_of_model(model))
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def begin(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        of_program: _OfProgram,
        phases: Phases,
        write: Callable[[_C.Snapshot], None],
    ) -> None:
        """Copies this rank's part, and begins to write it. Call it after wait()."""
        parts = _collect(self.together, model, optimizers, of_program, self._buffer)
        phases.end("collect", parts.bytes)

        def work() -> None:
            # On Linux, each thread has its own priority.
            with contextlib.suppress(OSError, AttributeError):
                me = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + _NICE_WHILE_WRITING)
            try:
                write(parts)
            except Exception as error:
                self._failure = error

        self._thread = threading.Thread(target=work, name="libfsdp.AsyncSaver")
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class AsyncSaver:
    """Saves in the background.

    ``save`` copies this rank's part to host memory, which is kept for the next save, and returns; a thread writes it. The checkpoint has
    the values from when ``save`` was called. The thread writes with a lower priority, so that training gets the cores. Only one save
    runs at a time, and the next one waits for it.

    With ``memory``, checkpoints also lie in the memory of the ranks' hosts, where they survive the ranks, and copies of each host's files
    in that of another host. ``libfsdp.load_latest([memory, folder], ...)`` finds them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        *,
        memory: str | os.PathLike[str] | None = None,
        distance: int = 1,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Makes connections of its own between the ranks. Collective.

        Args:
            model: sharded by ``fully_shard``.
            optimizer: an optimizer of its parameters, or a list of several.
            memory: a folder in tmpfs, such as "/dev/shm/my-run". Its name stands for the run, which finds it again when it is restarted;
                no other run on this host may use it. Ranks that see the same folder are on one host. Each host holds two steps at most,
                with the files of its ranks and the copies for other hosts.
            distance: each rank's file is also sent to the host that is this many hosts after its own. One host has no copies.
            process_group: the ranks that have the model; None: all.

        Raises:
            Error: on all ranks, if the folder can't be used on one.
        """
        check_model(model)
        check_counts(distance=distance)
        folder = "" if memory is None else os.path.abspath(check_path("memory", memory))
        self._model = model
        self._optimizers = as_list(optimizer)
        self._disk = _BackgroundSave(model, process_group)
        self._memory: _BackgroundSave | None = None
        if any(self._disk.together.exchange(bool(folder), "checkpoint: whether there is memory")):
            self._memory = _BackgroundSave(model, process_group)
            self._tier = _C.MemoryTier(self._memory.together.ranks, folder, distance)

    def save(
        self,
        path: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        keep_best: int = 0,
        metric: float | None = None,
        rng: bool = True,
        rank_extra: Mapping[str, Any] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        on_phase: Callable[[PhaseReport], None] | None = None,
    ) -> None:
        """Saves like libfsdp.save. Waits for the save before. With ``memory``, also saves there, under the last part of the path.

        Args:
            path: see libfsdp.save, which has the same arguments. A relative path is resolved now.
            extra: see there.
            keep_last: see there.
            keep_every: see there.
            keep_best: see there.
            metric: see there.
            rng: see there.
            rank_extra: see there.
            grad_scaler: see there.
            on_phase: after "collect", it is called on the saver's thread.

        Raises:
            Error: also the error of the save before; then no new save begins.
        """
        target = os.path.abspath(check_path("path", path))
        check_counts(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
        check_functions("a report", on_phase=on_phase)
        check_grad_scaler(grad_scaler)
        self.wait()
        of_program = _OfProgram(extra, rank_extra, metric, grad_scaler, rng)
        saved = _C.new_saved()  # of both, so that neither is newer
        if self._memory is not None:
            self._begin_in_memory(os.path.basename(target), of_program, Phases(None), saved)
        phases = Phases(on_phase)

        def write(parts: _C.Snapshot) -> None:
            _C.write_checkpoint(
                target,
                parts,
                self._disk.together.ranks,
                saved=saved,
                keep_last=keep_last,
                keep_every=keep_every,
                keep_best=keep_best,
                on_phase=phases.tell,
            )

        self._disk.begin(self._model, self._optimizers, of_program, phases, write)

    def save_in_memory(
        self,
        name: str,
        extra: Mapping[str, Any] | None = None,
        *,
        metric: float | None = None,
        rng: bool = True,
        rank_extra: Mapping[str, Any] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        on_phase: Callable[[PhaseReport], None] | None = None,
    ) -> None:
        """Saves in memory only. Waits for the save in memory before, but not for one to the disk.

        Args:
            name: of the step, such as "step-7".
            extra: see libfsdp.save, which has the same arguments.
            metric: see there.
            rng: see there.
            rank_extra: see there.
            grad_scaler: see there.
            on_phase: after "collect", it is called on the saver's thread.

        Raises:
            Error: also the error of the save in memory before; then no new save begins.
        """
        if self._memory is None:
            raise _C.Error(
                "save_in_memory: this saver has no folder in memory, or no longer: make it with AsyncSaver(..., memory=FOLDER)"
            )
        check_functions("a report", on_phase=on_phase)
        check_grad_scaler(grad_scaler)
        self._memory.wait()
        of_program = _OfProgram(extra, rank_extra, metric, grad_scaler, rng)
        self._begin_in_memory(check_path("name", name), of_program, Phases(on_phase), _C.new_saved())

    def _begin_in_memory(self, name: str, of_program: _OfProgram, phases: Phases, saved: int) -> None:
        assert self._memory is not None

        def write(parts: _C.Snapshot) -> None:
            self._tier.write(name, parts, saved=saved, on_phase=phases.tell)

        self._memory.begin(self._model, self._optimizers, of_program, phases, write)

    def wait(self) -> None:
        """Returns when the last saves are complete.

        Raises:
            Error: the error of a save, on every rank.
        """
        self._disk.wait()
        self.wait_for_memory()

    def wait_for_memory(self) -> None:
        """Waits for the last save in memory only. A restart then repeats the steps since that save at most.

        Raises:
            Error: the error of the save, on every rank.
        """
        if self._memory is not None:
            self._memory.wait()

    def remove_memory(self) -> None:
        """Waits, and removes all steps from memory: call it when the run has ended and will not be restarted. Collective.

        Raises:
            Error: on all ranks, if it fails on one.
        """
        self.wait()
        if self._memory is not None:
            self._tier.remove()
            self._memory = None


@torch.no_grad()
def _collect(
    together: CheckpointRanks,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    of_program: _OfProgram,
    buffer: _C.HostBuffer | None,
) -> _C.Snapshot:
    """Returns this rank's part, whose values are copied to the buffer if one is given."""
    metric, grad_scaler = of_program.metric, of_program.grad_scaler

    def named() -> tuple[ModelState, OptimizerState]:
        if any(failed_load_of(thing) is not None for thing in (model, *optimizers)):
            raise _C.Error("a load failed halfway, and model or optimizer are partly loaded: load again before")
        of_model = model_state(model)
        return of_model, optimizer_state(optimizers, of_model.names)

    of_model, of_optimizer = together.run(_NOTHING_SAVED, named)
    items = of_model.items + of_optimizer.items
    values: dict[tuple[str, ...], Any] = {("model", key.removeprefix("model.")): v for key, v in of_model.extra.items()}
    values |= of_optimizer.values
    # If ranks outside of a tensor's mesh have the same part of it (other tensor-parallel ranks, if the tensor is not cut by them), the
    # first one writes it. Ranks of a pipeline have other names, and other groups.
    shared = [item.writes and item.ranks < together.size for item in items]
    mine = [item.part for item, is_shared in zip(items, shared, strict=True) if is_shared]
    mine += [".".join(path) for path in values]
    every = together.exchange([mine, of_optimizer.groups], "checkpoint: names")
    first_of: dict[str, int] = {}
    for rank, (keys, _) in enumerate(every):
        for key in keys:
            first_of.setdefault(key, rank)

    def collect() -> _C.Snapshot:
        check_values(extra=of_program.extra, rank_extra=of_program.rank_extra)
        check_metric(metric)
        parts = _C.Snapshot()
        for item, is_shared in zip(items, shared, strict=True):
            if first_of[item.part] == together.index if is_shared else item.writes:
                _check_text(item.path)
                parts.add_tensor(item.path, item.shape, item.offsets, item.values)
        for path, value in values.items():
            if first_of[".".join(path)] == together.index:
                _add(parts, path, value)
        if of_program.rng:
            for name, state in _C.generator_states(device_of_model(model)).items():
                _add(parts, ("fsdp", f"{name}.{together.index}"), state)
        for name, value in (of_program.rank_extra or {}).items():
            _add(parts, ("rank_extra", str(together.index), name), value)
        if together.index == 0:
            _add_groups(parts, optimizers, [groups for _, groups in every])
            parts.add_value(("fsdp", "ranks"), together.size)
            if metric is not None:
                parts.add_value(("fsdp", "metric"), float(metric))
            for name, value in (grad_scaler.state_dict() if grad_scaler is not None else {}).items():
                parts.add_value(("scaler", name), value)
            for name, value in (of_program.extra or {}).items():
                _add(parts, ("extra", name), value)
        parts.check_names()
        if buffer is not None:
            buffer.take(parts)
        return parts

    return together.run(_NOTHING_SAVED, collect)


def _add(parts: _C.Snapshot, path: tuple[str | int, ...], value: Any) -> None:
    """Adds a value of the program. As in torch.distributed.checkpoint, containers with tensors are taken apart."""
    _check_text(path)
    if isinstance(value, torch.Tensor):
        parts.add_tensor(path, list(value.shape), [0] * value.ndim, value)
    elif isinstance(value, dict) and _holds_tensors(value) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            _add(parts, (*path, key), item)
    elif isinstance(value, list) and _holds_tensors(value):
        for i, item in enumerate(value):
            _add(parts, (*path, i), item)
    else:
        parts.add_value(path, value)


def _check_text(path: tuple[str | int, ...]) -> None:
    """Raises Error for a name with surrogates, which no other program could read."""
    name = ".".join(map(str, path))
    try:
        name.encode()
    except UnicodeEncodeError:
        raise _C.Error(f"the name {name!r} has surrogates, which have no place in a checkpoint; rename it") from None


def _holds_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(isinstance(item, torch.Tensor) or _holds_tensors(item) for item in items)


def _add_groups(
    parts: _C.Snapshot, optimizers: list[torch.optim.Optimizer], groups_of_ranks: list[list[list[str]]]
) -> None:
    for g, group in enumerate(group for optimizer in optimizers for group in optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                _add(parts, (OPTIMIZER, "param_groups", g, name), value)
        names = [name for groups in groups_of_ranks if g < len(groups) for name in groups[g]]
        parts.add_value((OPTIMIZER, "param_groups", g, "params"), list(dict.fromkeys(names)))
