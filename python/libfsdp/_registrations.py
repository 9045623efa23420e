"""Handles parameters that are registered after fully_shard: ties, which are accepted, and others, which are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from libfsdp._states import states_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from libfsdp._sharded_parameter import Place, ShardedParameter
    from libfsdp._state import ShardState

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

    def __init__(self, root: ShardState) -> None:
        self._modules = root.modules
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
        managed = {
            (place.module, place.name)
            for _, state, _ in states_in(*self._modules)
            for parameter in state.parameters
            for place in parameter.places
        }
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


def take_ties(parameters: list[ShardedParameter]) -> list[ShardedParameter]:
    """Makes a place to which the program has assigned another parameter of its unit show that one from now on, in all forms.

    Returns:
        The parameters that still have a place; if nothing was tied, the list itself.
    """
    forms = {id(form): p for p in parameters for form in (p.sharded, p.whole, p.kept) if form is not None}
    ties = [
        (place, p, forms[id(now)])
        for p in parameters
        for place in p.places
        if forms.get(id(now := place.module._parameters.get(place.name)), p) is not p
    ]
    if not ties:
        return parameters
    for place, before, now in ties:
        before.places.remove(place)
        now.places.append(place)
    return [p for p in parameters if p.places]


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
