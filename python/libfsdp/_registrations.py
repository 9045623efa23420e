"""Handles parameters that are registered after fully_shard: ties, which are accepted, and others, which are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from libfsdp._sharded_parameter import Place, ShardedParameter

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
    """Remembers which parameters fully_shard has seen in the modules and left alone."""
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
            root: the outermost modules.
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
    """What the modules of a unit have registered, as it was when it was read.

    Attributes:
        parameters: the parameters that still have a place.
        places: the places of all parameters that the unit has, in its order. A place to which the program has assigned another parameter of
            the unit, in any form, is that one's from now on.
        values: what the first place of each parameter has: a tensor, or None; its shard, where that is another form of it.
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
    """Reads what the modules of a unit have registered, and changes nothing.

    Raises:
        RuntimeError: if a module has lost a parameter.
        ValueError: if a module has a parameter of another unit in its place.
    """
    refuse_lost(parameters)
    forms = {id(form): p for p in parameters for form in (p.sharded, p.whole, p.kept) if form is not None}
    ties = [
        (place, p, forms[id(now)])
        for p in parameters
        for place in p.places
        if forms.get(id(now := place.module._parameters.get(place.name)), p) is not p
    ]
    places = {p.identity: list(p.places) for p in parameters}
    for place, before, now in ties:
        places[before.identity].remove(place)
        places[now.identity].append(place)
    left = [p for p in parameters if places[p.identity]]
    values = []
    for p in left:
        place = places[p.identity][0]
        value = place.module._parameters[place.name]
        values.append(p.sharded if value is not None and (value is p.whole or value is p.kept) else value)
    return Registered(left, [(p, places[p.identity]) for p in parameters], values, bool(ties))


def refuse_lost(parameters: Sequence[ShardedParameter]) -> None:
    """Refuses modules that no longer have the parameters of their unit.

    Raises:
        RuntimeError: if a module has lost one.
        ValueError: if a module has a parameter of another unit in its place.
    """
    lost = [p.name for p in parameters if any(place.module._parameters.get(place.name) is None for place in p.places)]
    if lost:
        raise RuntimeError(
            f"parameters {lost} are no longer where fully_shard found them: their modules have deleted or replaced them (weight_norm and "
            "parametrizations do); change the modules before fully_shard"
        )
    identities = {p.identity for p in parameters}
    for p in parameters:
        for place in p.places:
            if vars(place.module._parameters[place.name]).get("_libfsdp_identity", p.identity) not in identities:
                raise ValueError(
                    f"Parameter '{p.name}' is shared with a parameter already managed by another FSDP group, since the modules were "
                    "sharded: tied parameters belong to one call, fully_shard([module_a, module_b])"
                )
