"""Detects the steps of optimizers, and finds the states whose parameters an optimizer has."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from libfsdp import _C
from libfsdp._core.model import all_states
from libfsdp._core.readers import wait_for_readers
from libfsdp._core.sharded_parameter import is_sharded, parameter_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from libfsdp._core.model import MemberState

@dataclass
class _Owners:
    """The states to which an optimizer's parameters belong.

    Attributes:
        key: identifies the groups from which this was computed.
        stepped: the states of which it has some parameters.
        complete: the states of which it has all trained parameters.
    """

    key: list[tuple[int, int]]
    stepped: list[weakref.ref[MemberState]] = field(default_factory=list)
    complete: list[weakref.ref[MemberState]] = field(default_factory=list)


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Owners] = weakref.WeakKeyDictionary()


def _owners(optimizer: torch.optim.Optimizer) -> _Owners:
    """Returns the owners. They are computed again only when groups have changed, so that a step need not look at each parameter."""
    lists = [group["params"] for group in optimizer.param_groups]
    key = [(len(parameters), id(parameters[0]) if parameters else 0) for parameters in lists]
    owners = _known.get(optimizer)
    if owners is None or owners.key != key:
        owners = _known[optimizer] = _look_at(optimizer, key)
    return owners


def _look_at(optimizer: torch.optim.Optimizer, key: list[tuple[int, int]]) -> _Owners:
    had: set[int] = set()
    earlier, whole = [], []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        parameter = parameter_of(p)
        if parameter is None:
            continue
        if p is parameter.sharded:
            had.add(id(p))
        elif p.grad is None and p is parameter.before():
            earlier.append(parameter.name)
        elif p.grad is None and (p is parameter.whole or p is parameter.post_forward):
            whole.append(parameter.name)
    _tell(optimizer, earlier, "from before fully_shard, which the model has no more", "after fully_shard")
    _tell(
        optimizer,
        whole,
        "that modules show while they compute",
        "while they are shards: before a forward, or after a backward",
    )
    owners = _Owners(key)
    for state in all_states() if had else ():  # Those with a tied parameter of another one, too.
        if any(id(p.sharded) in had for p in state.parameters):
            owners.stepped.append(weakref.ref(state))
            if all(id(p.sharded) in had for p in state.parameters if p.sharded.requires_grad):
                owners.complete.append(weakref.ref(state))
    return owners


def _tell(optimizer: torch.optim.Optimizer, names: list[str], which: str, when: str) -> None:
    if names:
        warnings.warn(
            f"{type(optimizer).__name__} does not train {names}: it has parameters {which}. Make it of model.parameters() {when}",
            stacklevel=2,
        )


def _alive(states: Iterable[weakref.ref[MemberState]]) -> Iterator[MemberState]:
    return (state for reference in states if (state := reference()) is not None and state.unit is not None)


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Runs before the step, so that forwards and backwards of a closure run after it."""
    owners = _owners(optimizer)
    if owners.stepped:
        wait_for_readers(_alive(owners.stepped))
        _C.note_step([state.unit for state in _alive(owners.stepped) if state.unit is not None])


def _note_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Marks unsharded parameters that models keep across forwards as stale, even in models that this optimizer does not update.

    An optimizer without sharded parameters is ignored, because it may exist on one rank only.
    """
    if any(is_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        _C.note_update([state.unit for state in _alive(_owners(optimizer).stepped) if state.unit is not None])


register_optimizer_step_pre_hook(_note_step)
register_optimizer_step_post_hook(_note_update)


class BeginsAnew(torch.optim.Optimizer):
    """An optimizer whose zero_grad drops gradients that are not synchronized, too."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Works like torch's. If it has all trained parameters of a model, it also drops gradients that are not synchronized."""
        super().zero_grad(set_to_none)
        drop_gradients(_alive(_owners(self).complete))


def drop_gradients(states: Iterable[MemberState]) -> None:
    """Drops gradients that are still in the engine, for models all of whose trained units are among these states.

    Within a backward it drops nothing, because gradients are being computed.
    """
    if _C.inside_backward():
        return
    dropped = set(states)
    for model in {state.model for state in dropped if state.model is not None}:
        if all(state in dropped or not state.is_trained for state in model.states):
            model.zero_gradients()
