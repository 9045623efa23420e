"""Loads checkpoints. Once all ranks have found the data intact, values are read from the files straight to their places."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from libfsdp import _C
from libfsdp._checkpoint.arguments import (
    as_folders,
    as_list,
    check_functions,
    check_grad_scaler,
    check_model,
    check_path,
    check_prefixes,
)
from libfsdp._checkpoint.checkpoint_ranks import CheckpointRanks, device_of_model
from libfsdp._checkpoint.failed_load import FailedLoad, failed_load_of, forget
from libfsdp._checkpoint.items import Item, clean, model_state, optimizer_state
from libfsdp._checkpoint.phases import Phases
from libfsdp._core.arguments import check_flags
from libfsdp._core.model import states_in
from libfsdp._core.readers import before_write
from libfsdp.optim._optimizer_state import make_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from libfsdp._checkpoint.arguments import Optimizers
    from libfsdp._checkpoint.phases import PhaseReport

_NOTHING_LOADED = "nothing was loaded:"
# Settings of an optimizer that do not change its results: the program's own values are kept, for which the state was made.
_HOW = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class _Options:
    """The options of libfsdp.load."""

    strict: bool
    rename: Callable[[str], str] | None
    ignore: Callable[[str], bool] | None
    model_prefix: str
    optimizer_prefix: str
    check_first: bool
    optimizer_settings: bool
    rng: bool
    grad_scaler: torch.amp.GradScaler | None

    def __post_init__(self) -> None:
        check_flags(
            strict=self.strict, check_first=self.check_first, optimizer_settings=self.optimizer_settings, rng=self.rng
        )
        check_functions("a name", rename=self.rename, ignore=self.ignore)
        check_grad_scaler(self.grad_scaler)
        check_prefixes(model_prefix=self.model_prefix, optimizer_prefix=self.optimizer_prefix)

    def open(self, path: str, phases: Phases, held: _C.HeldStep | None) -> _C.LoadPlan:
        return _C.LoadPlan(
            path,
            strict=self.strict,
            rename=self.rename,
            ignore=self.ignore,
            model_prefix=self.model_prefix,
            optimizer_prefix=self.optimizer_prefix,
            check_first=self.check_first,
            rng=self.rng,
            on_phase=phases.tell,
            held=held,
        )


@dataclass
class Loaded:
    """The result of a load: what it found beside model and optimizer.

    Attributes:
        path: the path of the checkpoint.
        extra: the program's values that were saved.
        rank_extra: this rank's own, if as many ranks saved theirs; otherwise see ``libfsdp.read_rank_extra``.
        missing: names that the model has and the checkpoint has not. Empty if strict.
        unexpected: the reverse, within what was asked for (the model, or also the optimizer).
        metric: the metric that was saved.
        rng: whether the random generators were restored.
        skipped: newer checkpoints that ``load_latest`` did not take, and why.
        origin: where ``load_latest`` found it: "memory of this host", with the number of bytes that other hosts have sent from
            theirs, or the last folder.
    """

    path: str
    extra: dict[str, Any]
    rank_extra: dict[str, Any]
    missing: list[str]
    unexpected: list[str]
    metric: float | None = None
    rng: bool = False
    skipped: list[str] = field(default_factory=list)
    origin: str = ""


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
    ignore: Callable[[str], bool] | None = None,
    model_prefix: str = "model.",
    optimizer_prefix: str = "optim.",
    check_first: bool = True,
    optimizer_settings: bool = True,
    rng: bool = True,
    grad_scaler: torch.amp.GradScaler | None = None,
    on_phase: Callable[[PhaseReport], None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Reads a checkpoint into a sharded model and its optimizer.

    The checkpoint is one of ``libfsdp.save``, of ``fsdp::save``, of torch.distributed.checkpoint, or, for the model alone, Hugging Face's
    safetensors. Each rank reads only the byte ranges that it needs, straight into its shards. Values are converted if dtypes differ. All
    data are compared with their checksums. The number of ranks, the units and placements may be others than when it was saved.
    Collective.

    Args:
        path: the checkpoint's folder; or a file of safetensors.
        model: the model, sharded by ``fully_shard``.
        optimizer: an optimizer of its parameters, or a list of several. State that they do not have yet is made.
        strict: raise Error if a name of the model is missing in the checkpoint, or the reverse. With False, such values of the model
            stay, and such names of the checkpoint are left out.
        rename: takes a name of the model ("model.layers.0.weight", "optim.state.layers.0.weight.exp_avg"), and returns
            the checkpoint's.
        ignore: returns True for names of the model whose values stay, and for names in the checkpoint that are left
            out.
        model_prefix: replaces "model." at the beginning of names, after ``rename``.
        optimizer_prefix: replaces "optim." in the same way.
        check_first: check all data before any are assigned, so that a damaged checkpoint changes nothing. With False (on all ranks, and
            with ``strict``), data are checked while they are assigned, in half of the time. Where that fails, model and optimizer are
            partly loaded, and refuse to be used until another load succeeds.
        optimizer_settings: the groups of the optimizer get the saved settings of their parameters (learning rates, betas), as
            ``load_state_dict`` gives them: schedulers of torch count on that. What says how they compute (``foreach``,
            ``fused``, ``capturable``, ``differentiable``) stays the program's. With False all stay, as in C++.
        rng: restore each rank's random generators, if as many ranks saved theirs.
        grad_scaler: a scaler that gets the saved state.
        on_phase: called on every rank at the end of each phase, with a report.
        process_group: the ranks that have the model; None stands for all.

    Raises:
        Error: on all ranks, if it failed on any. Model and optimizer are then unchanged, unless the message says that they are partly
            loaded.
        CommError: if a rank has failed, or does something else.
    """
    options = _Options(
        strict, rename, ignore, model_prefix, optimizer_prefix, check_first, optimizer_settings, rng, grad_scaler
    )
    optimizers = _checked(model, optimizer, on_phase)
    path = check_path("path", path)
    together = CheckpointRanks(model, process_group, own=False)
    return _Load(path, model, optimizers, options, together, Phases(on_phase), None).run()


def load_latest(
    folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
    ignore: Callable[[str], bool] | None = None,
    model_prefix: str = "model.",
    optimizer_prefix: str = "optim.",
    check_first: bool = True,
    optimizer_settings: bool = True,
    rng: bool = True,
    grad_scaler: torch.amp.GradScaler | None = None,
    on_phase: Callable[[PhaseReport], None] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded | None:
    """Loads the newest complete checkpoint in a folder, as rank 0 sees it: the one that was saved last.

    If the newest one is damaged, the one before it is taken, and every rank prints a warning. It also names newer checkpoints that are
    not taken, because torch.distributed.checkpoint wrote them, or because their names do not end in a number. Collective.

    Args:
        folder: the folder of the checkpoints, whose names end in a number of any length; it need not exist. Or a list of two
            folders: that of ``AsyncSaver(memory=...)``, and the one that all ranks share. The first may be another path on each host.
            A step in memory is complete if each of its files is in the memory of some host; of equally new ones, it is preferred. A
            rank reads files from the memory of its own host, and gets the parts that it needs of others from their hosts. A file in
            memory that is damaged counts as absent: its copy on another host is read, or else the checkpoint before.
        model: see libfsdp.load, which has the same arguments.
        optimizer: see there.
        strict: see there.
        rename: see there.
        ignore: see there.
        model_prefix: see there.
        optimizer_prefix: see there.
        check_first: see there.
        optimizer_settings: see there.
        rng: see there.
        grad_scaler: see there.
        on_phase: see there.
        process_group: see there.

    Returns:
        None if there is none; rank 0 prints a warning then.

    Raises:
        Error: also if all are damaged, or if a disk error prevents the check whether one is complete.
    """
    options = _Options(
        strict, rename, ignore, model_prefix, optimizer_prefix, check_first, optimizer_settings, rng, grad_scaler
    )
    optimizers = _checked(model, optimizer, on_phase)
    folders = as_folders(folder)
    # Ranks of different hosts send each other parts over connections between hosts' memories.
    together = CheckpointRanks(model, process_group, own=len(folders) > 1)
    loaded: list[Loaded] = []

    def load_one(path: str, held: _C.HeldStep | None) -> None:
        loaded.append(_Load(path, model, optimizers, options, together, Phases(on_phase), held).run())

    taken, origin, skipped, warning = _C.take_newest(folders, together.ranks, load_one)
    if warning:
        warnings.warn(f"libfsdp: {warning}", stacklevel=2)
    if taken is None:
        return None
    loaded[-1].skipped = skipped
    loaded[-1].origin = origin
    return loaded[-1]


def _checked(model: Any, optimizer: Optimizers | None, on_phase: Any) -> list[torch.optim.Optimizer]:
    """Checks the arguments that all loads have."""
    check_model(model)
    check_functions("a report", on_phase=on_phase)
    return as_list(optimizer)


class _Load:
    """One load on this rank."""

    def __init__(
        self,
        path: str,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        options: _Options,
        together: CheckpointRanks,
        phases: Phases,
        held: _C.HeldStep | None,
    ) -> None:
        self._path = path
        self._held = held
        self._model = model
        self._optimizers = optimizers
        self._options = options
        self._together = together
        self._phases = phases
        self._names: dict[int, str] = {}  # of parameters, by id
        self._made: list[tuple[torch.optim.Optimizer, nn.Parameter]] = []
        self._failed_before = [
            failed for thing in (model, *optimizers) if (failed := failed_load_of(thing)) is not None
        ]
        # The values beside tensors that model and optimizers get.
        self._extra_states: dict[str, Any] = {}
        self._without_state: list[tuple[torch.optim.Optimizer, nn.Parameter]] = []
        self._numbers: list[tuple[dict[str, Any], str, Any]] = []
        self._settings: list[dict[str, Any]] = []
        self._scaler: dict[str, Any] = {}

    def run(self) -> Loaded:
        for failed in self._failed_before:
            failed.allow()  # its state must be readable here
        try:
            plan = self._together.run(_NOTHING_LOADED, self._open)
            # Where it has to be made, state may ask other ranks.
            self._together.run(_NOTHING_LOADED, lambda: self._take_state(plan))
            torn = {name for failed in self._failed_before for name in failed.names}
            extra, rank_extra, missing, unexpected, metric, rng = plan.check(
                self._together.ranks,
                device_of_model(self._model),
                bool(self._optimizers),
                torn,
                self._options.strict and not self._options.check_first,
            )
        except BaseException:
            self._forget_made()
            self._stop(set())
            raise
        try:
            plan.assign(self._together.ranks)
        except BaseException:
            self._stop(plan.replaced)
            raise
        for thing in (self._model, *self._optimizers):
            forget(thing)
        self._finish_optimizers()
        self._give_extra_states()
        if self._scaler and self._options.grad_scaler is not None:
            self._options.grad_scaler.load_state_dict(self._scaler)
        return Loaded(self._path, _nested(extra), _nested(rank_extra), missing, unexpected, metric, rng)

    def _open(self) -> _C.LoadPlan:
        """Compares names and shapes of the model. It changes nothing."""
        before_write(state for _, state, _ in states_in(self._model))
        plan = self._options.open(self._path, self._phases, self._held)
        state = model_state(self._model)
        aliases: dict[str, list[str]] = {}
        for alias, first in state.aliases.items():
            aliases.setdefault(first, []).append(alias)
        plan.add([_listed(item, aliases.get(item.key, [])) for item in state.items])
        self._extra_states = plan.values(list(state.extra))
        self._names = state.names
        scaler = self._options.grad_scaler
        if scaler is not None and scaler.is_enabled():
            self._scaler = plan.grad_scaler(list(scaler.state_dict()))
        return plan

    def _take_state(self, plan: _C.LoadPlan) -> None:
        """Compares the optimizers' state, which they get if they have none. Collective."""
        if not self._optimizers or not plan.has_optimizer(list(self._names.values())):
            return
        names = optimizer_state(self._optimizers, self._names).names
        updated = plan.updated(list(names.values()))
        for optimizer in self._optimizers:
            missing = [
                [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p) and updated[names[id(p)]]]
                for group in optimizer.param_groups
            ]
            if any(missing):
                self._made += [(optimizer, p) for p in make_state(optimizer, missing)]
        self._add_optimizers(plan, updated)

    def _groups(self) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        return [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]

    def _add_optimizers(self, plan: _C.LoadPlan, updated: dict[str, bool]) -> None:
        state = optimizer_state(self._optimizers, self._names)
        items: dict[str, list[_LoadItem]] = {}
        numbers: dict[str, list[str]] = {}
        for item in state.items:
            items.setdefault(item.path[2], []).append(_listed(item, []))
        for path in state.values:
            numbers.setdefault(path[2], []).append(".".join(path))
        parameters = [
            (optimizer, p, name)
            for (optimizer, group), names in zip(self._groups(), state.groups, strict=True)
            for p, name in zip(group["params"], names, strict=True)
        ]
        found = plan.add_states(
            [(name, updated[name], items.get(name, []), numbers.get(name, [])) for _, _, name in parameters]
        )
        made = {id(p) for _, p in self._made}
        for (optimizer, p, name), (is_there, values) in zip(parameters, found, strict=True):
            # State that was made here but is not in the checkpoint is removed, too.
            if not updated[name] or (not is_there and id(p) in made):
                self._without_state.append((optimizer, p))
            prefix = f"optim.state.{name}."
            self._numbers += [(optimizer.state[p], key.removeprefix(prefix), value) for key, value in values.items()]
        if self._options.optimizer_settings:
            for (_, group), names in zip(self._groups(), state.groups, strict=True):
                self._settings.append(plan.settings(names, sorted(group.keys() - {"params", *_HOW})))

    def _finish_optimizers(self) -> None:
        for state, kind, number in self._numbers:
            state[kind] = number
        for optimizer, p in self._without_state:
            optimizer.state.pop(p, None)
        for (_, group), settings in zip(self._groups(), self._settings, strict=False):
            for name, value in settings.items():
                if isinstance(group[name], torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value

    def _give_extra_states(self) -> None:
        for name, module in self._model.named_modules() if self._extra_states else ():
            key = "model." + clean(f"{name}._extra_state" if name else "_extra_state")
            if key in self._extra_states:
                module.set_extra_state(self._extra_states[key])

    def _forget_made(self) -> None:
        for optimizer, p in self._made:
            optimizer.state.pop(p, None)

    def _stop(self, replaced: set[str]) -> None:
        """Makes model and optimizer refuse to be used, if this load or an earlier one has replaced some of their values."""
        names = replaced.union(*(failed.names for failed in self._failed_before))
        of_model = {name for name in names if name.startswith("model.")}
        if of_model:
            forget(self._model)
            FailedLoad(of_model, "model").stop_model(self._model)
        for optimizer in self._optimizers if names - of_model else ():
            forget(optimizer)
            FailedLoad(names - of_model, "optimizer").stop_optimizer(optimizer)


_LoadItem: TypeAlias = tuple[str, list[int], list[int], torch.Tensor, list[str]]


def _listed(item: Item, aliases: list[str]) -> _LoadItem:
    return item.key, item.shape, item.offsets, item.values, aliases


def _nested(items: list[tuple[list[str | int], Any]]) -> dict[str, Any]:
    """Puts dictionaries and lists, which a checkpoint has in parts, together again."""
    found: dict[Any, Any] = {}
    lists: list[tuple[dict[Any, Any], str | int]] = []
    for path, value in items:
        place = found
        for part, following in pairwise(path):
            if part not in place:
                place[part] = {}
                if isinstance(following, int):
                    lists.append((place, part))
            place = place[part]
        place[path[-1]] = value
    for place, part in reversed(lists):  # inner ones first
        place[part] = [item for _, item in sorted(place[part].items())]
    return found


def read_rank_extra(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every rank's ``rank_extra`` in a checkpoint, by rank.

    A run on another number of ranks needs it to divide these values again. Not collective.

    Args:
        path: the checkpoint's folder.

    Raises:
        Error: if it can't be read.
    """
    return [_nested(items) for items in _C.read_rank_extra(check_path("path", path))]
