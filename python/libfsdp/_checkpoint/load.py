"""Loads checkpoints. Once all ranks have found the data intact, values are read from the files straight to their places."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from libfsdp import _C
from libfsdp._checkpoint.arguments import as_list, check_functions, check_model, check_path
from libfsdp._checkpoint.checkpoint_ranks import CheckpointRanks, device_of_model
from libfsdp._checkpoint.failed_load import FailedLoad, failed_load_of, forget
from libfsdp._checkpoint.items import Item, OptimizerState, clean, model_state, optimizer_state
from libfsdp._checkpoint.name_matching import NameMatching, Names, Options
from libfsdp._checkpoint.phases import Phases
from libfsdp._checkpoint.random_state import set_generator
from libfsdp._core.model import states_in
from libfsdp._core.readers import before_write
from libfsdp.optim._optimizer_state import make_state

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from libfsdp._checkpoint.arguments import Optimizers
    from libfsdp._checkpoint.phases import PhaseReport

_NOTHING_LOADED = "nothing was loaded:"
_NO_LONGER_WHOLE = (
    "the checkpoint was whole, but then could not be read any more; what was loaded of it is not all: load again"
)
_HALFWAY = "the load ended halfway, and the model is partly loaded; until another load succeeds, it cannot be used:"


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
    """

    path: str
    extra: dict[str, Any]
    rank_extra: dict[str, Any]
    missing: list[str]
    unexpected: list[str]
    metric: float | None = None
    rng: bool = False
    skipped: list[str] = field(default_factory=list)


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
    options = Options(
        strict, rename, ignore, model_prefix, optimizer_prefix, check_first, optimizer_settings, rng, grad_scaler
    )
    path, optimizers = _checked("path", path, model, optimizer, on_phase)
    together = CheckpointRanks(model, process_group, own=False)
    return _Load(path, model, optimizers, options, together, Phases(on_phase)).run()


def load_latest(
    folder: str | os.PathLike[str],
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
        folder: the folder of the checkpoints, whose names end in a number of any length; it need not exist.
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
    options = Options(
        strict, rename, ignore, model_prefix, optimizer_prefix, check_first, optimizer_settings, rng, grad_scaler
    )
    folder, optimizers = _checked("folder", folder, model, optimizer, on_phase)
    together = CheckpointRanks(model, process_group, own=False)
    loaded: list[Loaded] = []

    def load_one(path: str) -> None:
        loaded.append(_Load(path, model, optimizers, options, together, Phases(on_phase)).run())

    taken, skipped, warning = _C.take_newest(folder, together.ranks, load_one)
    if warning:
        warnings.warn(f"libfsdp: {warning}", stacklevel=2)
    if taken is None:
        return None
    loaded[-1].skipped = skipped
    return loaded[-1]


def _checked(
    name: str, path: Any, model: Any, optimizer: Optimizers | None, on_phase: Any
) -> tuple[str, list[torch.optim.Optimizer]]:
    """Checks the arguments that all loads have."""
    check_model(model)
    check_functions("a report", on_phase=on_phase)
    return check_path(name, path), as_list(optimizer)


class _Load:
    """One load on this rank."""

    def __init__(
        self,
        path: str,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        options: Options,
        together: CheckpointRanks,
        phases: Phases,
    ) -> None:
        self._path = path
        self._model = model
        self._optimizers = optimizers
        self._options = options
        self._together = together
        self._phases = phases
        self._at_once = options.strict and not options.check_first
        self._names: dict[int, str] = {}  # of parameters, by id
        self._made: list[tuple[torch.optim.Optimizer, nn.Parameter]] = []
        self._failed_before = [
            failed for thing in (model, *optimizers) if (failed := failed_load_of(thing)) is not None
        ]
        # The values beside tensors that the optimizer gets.
        self._without_state: list[tuple[torch.optim.Optimizer, nn.Parameter]] = []
        self._numbers: list[tuple[dict[str, Any], str, Any]] = []
        self._settings: list[dict[str, Any]] = []
        self._scaler: dict[str, Any] = {}

    def run(self) -> Loaded:
        for failed in self._failed_before:
            failed.allow()  # its state must be readable here
        try:
            loading = self._together.run(_NOTHING_LOADED, self._open)
            # Where it has to be made, state may ask other ranks.
            self._together.run(_NOTHING_LOADED, lambda: self._take_state(loading))
            loaded, finish = self._agree(loading)
        except BaseException:
            self._forget_made()
            self._stop(set())
            raise
        try:
            self._together.run(
                _HALFWAY if self._at_once else _NO_LONGER_WHOLE, lambda: loading.assign(at_once=self._at_once)
            )
        except BaseException:
            self._stop(loading.names.replaced)
            raise
        finally:
            _C.note_update()  # models may keep whole parameters across forwards
        self._phases.end("assign", loading.reading.bytes)
        for thing in (self._model, *self._optimizers):
            forget(thing)
        finish()
        return loaded

    def _open(self) -> NameMatching:
        """Compares names and shapes of the model. It changes nothing."""
        before_write(state for _, state, _ in states_in(self._model))
        loading = NameMatching(self._path, self._options)
        of_model = model_state(self._model)
        loading.add_model(of_model)
        self._names = of_model.names
        self._scaler = loading.grad_scaler()
        if self._optimizers and not loading.has_optimizer() and self._options.strict:
            advice = loading.other_optimizer_prefixes(self._names.values())
            raise _C.Error(
                f"{self._path} has no state of an optimizer below {self._options.optimizer_prefix!r}"
                f"{advice or '; load the model alone, or pass strict=False'}"
            )
        return loading

    def _take_state(self, loading: NameMatching) -> None:
        """Compares the optimizers' state, which they get if they have none. Collective."""
        if not self._optimizers or not loading.has_optimizer():
            return
        names = optimizer_state(self._optimizers, self._names).names
        for optimizer in self._optimizers:
            missing = [
                [
                    p
                    for p in group["params"]
                    if p.requires_grad and not optimizer.state.get(p) and loading.is_updated(names[id(p)])
                ]
                for group in optimizer.param_groups
            ]
            if any(missing):
                self._made += [(optimizer, p) for p in make_state(optimizer, missing)]
        self._add_optimizers(loading, optimizer_state(self._optimizers, self._names))

    def _groups(self) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        return [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]

    def _add_optimizers(self, loading: NameMatching, state: OptimizerState) -> None:
        items: dict[str, list[Item]] = {}
        values: dict[str, dict[str, Any]] = {}
        for item in state.items:
            items.setdefault(item.path[2], []).append(item)
        for path, value in state.values.items():
            values.setdefault(path[2], {})[".".join(path)] = value
        made = {id(p) for _, p in self._made}
        for g, ((optimizer, group), names) in enumerate(zip(self._groups(), state.groups, strict=True)):
            for p, name in zip(group["params"], names, strict=True):
                is_there, numbers = loading.add_state(name, items.get(name, []), values.get(name, {}))
                # State that was made here but is not in the checkpoint is removed, too.
                if not loading.is_updated(name) or (not is_there and id(p) in made):
                    self._without_state.append((optimizer, p))
                prefix = f"optim.state.{name}."
                self._numbers += [
                    (optimizer.state[p], key.removeprefix(prefix), number) for key, number in numbers.items()
                ]
            wants = self._options.optimizer_settings
            self._settings.append(loading.settings_of(g, group, names) if wants else {})

    def _agree(self, loading: NameMatching) -> tuple[Loaded, Callable[[], None]]:
        """The ranks join their results, and check the data that they will read."""
        own = loading.names
        every = self._together.exchange(
            [sorted(own.used), sorted(own.replaced), sorted(own.missing), loading.reading.saved], "checkpoint: names"
        )
        saved = [one[3] for one in every]
        names = Names(*({name for one in every for name in one[i]} for i in range(3)))

        def check() -> tuple[Loaded, Callable[[], None]]:
            if saved[self._together.index] != saved[0]:  # One may have found a newer one, or opened it after it was replaced.
                raise _C.Error(
                    f"{self._path} is another checkpoint than rank 0 reads: give all ranks the same one, such as the path that rank 0 "
                    "has found"
                )
            with_optimizer = bool(self._optimizers)
            missing = sorted(names.missing)
            unexpected = loading.unexpected(names.used, with_optimizer=with_optimizer)
            if self._options.strict and (missing or unexpected):
                raise _C.Error(_does_not_fit(loading, missing, unexpected))
            kept = sorted({name for failed in self._failed_before for name in failed.names} - names.replaced)
            if kept:
                raise _C.Error(
                    f"an earlier load failed halfway, and this one would keep values of it; load these, too:{_lines(kept)}"
                )
            loaded = Loaded(self._path, loading.below("extra."), {}, missing, unexpected)
            together = self._together
            if loading.number("fsdp.ranks") == together.size:
                loaded.rank_extra = loading.below(f"rank_extra.{together.index}.")
            loaded.metric = loading.number("fsdp.metric")
            device = device_of_model(self._model)
            generators = loading.generators(device, together.size, together.index)
            loaded.rng = bool(generators)

            def finish() -> None:
                self._finish_optimizers()
                self._give_extra_states(loading.extra_states)
                for name, state in generators.items():
                    set_generator(name, state, device)
                if self._scaler and self._options.grad_scaler is not None:
                    self._options.grad_scaler.load_state_dict(self._scaler)

            self._phases.end("open", 0)
            if not self._at_once:
                loading.reading.check()
            self._phases.end("check", 0 if self._at_once else loading.reading.bytes)
            return loaded, finish

        return self._together.run(_NOTHING_LOADED, check)

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

    def _give_extra_states(self, states: dict[str, Any]) -> None:
        for name, module in self._model.named_modules() if states else ():
            key = "model." + clean(f"{name}._extra_state" if name else "_extra_state")
            if key in states:
                module.set_extra_state(states[key])

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


def _lines(names: list[str]) -> str:
    return "".join(f"\n    {name}" for name in names)


def _does_not_fit(loading: NameMatching, missing: list[str], unexpected: list[str]) -> str:
    text = f"{loading.path} does not fit the model{loading.other_model_prefixes(missing)}"
    if missing:
        text += f"\n  missing in the checkpoint:{_lines(missing)}"
    if unexpected:
        text += f"\n  not in the model:{_lines(unexpected)}"
    return text + "\n  (rename and the prefixes map names, ignore leaves some out, strict=False allows this)"
