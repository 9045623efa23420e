"""Handles parameters that are registered after fully_shard: ties, which are accepted, and others, which are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from libfsdp._core.sharded_parameter import all_parameters, parameter_of, shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from libfsdp._core.sharded_parameter import Place, ShardedParameter

_IGNORED = "_libfsdp_ignored"

_changes = 0


def _count(*_: object) -> None:
    global _changes
    _changes += 1


# Counts registrations anywhere in the process. Only after a new one are a model's modules searched, because this costs too much for each
# step.
register_module_parameter_registration_hook(_count)
register_module_module_registration_hook(_count)


def mark_ignored(modules: Iterable[nn.Module], managed: Iterable[Place]) -> None:
    """Records the parameters that fully_shard found in the modules and did not shard."""
    places = {(place.module, place.name) for place in managed}
    for module in modules:
        names = {name for name, p in module._parameters.items() if p is not None and (module, name) not in places}
        if names:
            module.__dict__[_IGNORED] = frozenset(names)


class Registrations:
    """Looks for parameters in a model that were registered after fully_shard."""

    def __init__(self, root: tuple[nn.Module, ...], managed: Callable[[], Iterable[ShardedParameter]]) -> None:
        """Makes it for a model.

        Args:
            managed: returns the parameters of all units that are in and below them now.
        """
        self._modules = root
        self._managed = managed
        self._seen = -1
        self._frozen: list[tuple[str, nn.Parameter]] = []

    def check(self) -> None:
        """Called before a forward.

        Raises:
            RuntimeError: if there are new parameters that are trained.
        """
        if self._seen != _changes:
            self._frozen = list(self._late())
        trained = [name for name, parameter in self._frozen if parameter.requires_grad]
        if trained:
            raise RuntimeError(
                f"parameters {trained} were registered after fully_shard, so their gradients would stay this rank's own: register them "
                "before, call fully_shard on their module before it becomes a part of the model, or freeze them"
            )
        self._seen = _changes

    def _late(self) -> Iterator[tuple[str, nn.Parameter]]:
        managed = {(place.module, place.name) for parameter in self._managed() for place in parameter.places}
        seen: set[nn.Module] = set()

        def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
            if module in seen or "replicate" in (_get_registry(module) or {}):
                return
            seen.add(module)
            ignored = module.__dict__.get(_IGNORED, ())
            for name, parameter in module._parameters.items():
                if parameter is not None and (module, name) not in managed and name not in ignored:
                    yield prefix + name, parameter
            for name, child in module.named_children():
                yield from walk(child, f"{prefix}{name}.")

        for module in self._modules:
            yield from walk(module, "")


@dataclass
class Registered:
    """The parameters that the modules of a unit had registered when they were read.

    Attributes:
        parameters: the parameters that still have a place.
        places: the places of all parameters that the unit has, in its order. A place to which the program has assigned another parameter of
            the unit, in any form, is that one's from now on.
        values: what the first place of each parameter has: a tensor, or None; the shard of which it is another form.
        tied: whether places have changed.
    """

    parameters: list[ShardedParameter]
    places: list[tuple[ShardedParameter, list[Place]]]
    values: list[Any]
    tied: bool

    def take_places(self) -> list[ShardedParameter]:
        """Gives the parameters their places, and returns those that have one."""
        if self.tied:
            for parameter, places in self.places:
                parameter.places = places
        return self.parameters


def registered_in(parameters: list[ShardedParameter]) -> Registered:
    """Reads the parameters that the modules of a unit have registered, and changes nothing.

    Raises:
        RuntimeError: if a module has lost a parameter.
        ValueError: if only some of the modules that share a parameter were tied to another unit's.
    """
    lost = [p.name for p in parameters if any(_value_at(place) is None for place in p.places)]
    if lost:
        raise RuntimeError(
            f"parameters {lost} are no longer where fully_shard found them: their modules have deleted or replaced them (weight_norm and "
            "parametrizations do); change the modules before fully_shard"
        )
    of_unit = {p.identity for p in parameters}
    having = {id(p.sharded): p for p in parameters if p.owner is None}
    for p in parameters:
        values = [shard_of(_value_at(place)) for place in p.places]
        others = [q for value in values if (q := parameter_of(value)) is not None and q.identity not in of_unit]
        if others and any(value is not others[0].sharded for value in values):
            raise ValueError(
                f"Parameter '{p.name}' is shared by several modules, of which only some were tied to parameter '{others[0].name}' of "
                "another unit: tie all of them, or shard the modules in one call, fully_shard([module_a, module_b])"
            )
        for value in values:
            having.setdefault(id(value), p)  # Two parameters may have been replaced by one tensor.
    places = {p.identity: list(p.places) for p in parameters}
    ties = [
        (place, p, now)
        for p in parameters
        for place in p.places
        if (now := having[id(shard_of(_value_at(place)))]) is not p
    ]
    for place, before, now in ties:
        places[before.identity].remove(place)
        places[now.identity].append(place)
    left = [p for p in parameters if places[p.identity]]
    values = [shard_of(_value_at(places[p.identity][0])) for p in left]
    return Registered(left, [(p, places[p.identity]) for p in parameters], values, bool(ties))


def refuse_lost_owners(changed: Iterable[Registered]) -> None:
    """Called when ties that no longer hold have ended.

    Raises:
        RuntimeError: if a module has another parameter now than that to which others are tied.
    """
    tied = {id(p.sharded): p.name for p in all_parameters() if p.owner is not None}
    for p, value in (pair for one in changed for pair in zip(one.parameters, one.values, strict=True)):
        if value is not p.sharded and id(p.sharded) in tied and p.other_of(p.sharded) is None:
            raise RuntimeError(
                f"parameter '{p.name}' was replaced, and parameter '{tied[id(p.sharded)]}' of another unit is tied to the one before: tie "
                "it to the new one, or give it a parameter of its own"
            )


def owner_to_follow(parameter: ShardedParameter, value: nn.Parameter) -> ShardedParameter | None:
    """Returns the parameter of another unit whose shard a module has instead of this parameter's; None if it has no other one's.

    Raises:
        ValueError: if one shard can't serve both.
    """
    owner = parameter.other_of(value)
    if owner is None:
        return None
    if shard_of(_value_at(owner.places[0])) is not value:
        raise ValueError(
            f"Parameter '{parameter.name}' was replaced by '{owner.name}' of another unit, whose own module has another one now: a "
            "parameter may be tied to another unit's, and can't move to another unit. Copy its values within torch.no_grad(), or change "
            "modules before fully_shard"
        )
    mine, others = (_how_cut(p, shard) for p, shard in ((parameter, parameter.sharded), (owner, value)))
    if mine != others:
        raise ValueError(
            f"Parameter '{parameter.name}' is tied to '{owner.name}' of another unit, which is sharded in another way ({others} instead of "
            f"{mine}): give both calls of fully_shard the same mesh and placements, or make them one, "
            "fully_shard([module_a, module_b])"
        )
    return owner


def _how_cut(parameter: ShardedParameter, shard: nn.Parameter) -> str:
    cut = f"placements {shard.placements} on {shard.device_mesh}" if isinstance(shard, DTensor) else "whole on each rank"
    quantized = ", quantized" if parameter.quantized is not None else ""
    return f"{cut}, shape {list(shard.shape)}{quantized}"


def _value_at(place: Place) -> nn.Parameter | None:
    return place.module._parameters.get(place.name)
