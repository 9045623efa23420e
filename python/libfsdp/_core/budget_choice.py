"""What a memory budget leaves room for, chosen from a plan of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from libfsdp import _C
from libfsdp._core.recomputation import set_recomputes
from libfsdp._core.unit_order import add_use, children_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from libfsdp._core.memory_budget import MemoryBudget
    from libfsdp._core.state import ShardState


@dataclass(frozen=True)
class BudgetedUnit:
    """A unit of a model.

    Attributes:
        name: as in a plan: "(root)" for the root.
        state: its state, which has a unit.
        parent: the position of the unit around it.
    """

    name: str
    state: ShardState
    parent: int | None


class BudgetChoice:
    """What a memory budget has chosen for a model, and why.

    Attributes:
        budget: which has chosen; None if the model has none.
        prefetch_depth: the model's.
        explanation: a line for each option.
    """

    def __init__(self, roots: Sequence[nn.Module], engine: _C.HookedModel, prefetch_depth: int) -> None:
        """Chooses nothing.

        Args:
            roots: the root's modules.
            engine: the model's.
            prefetch_depth: as it was given: the largest that may be chosen.
        """
        self.budget: MemoryBudget | None = None
        self.prefetch_depth = prefetch_depth
        self.explanation = "no memory_budget: all options are as they were given\n"
        self._roots = roots
        self._engine = engine
        self._given_depth = prefetch_depth
        self._units: list[BudgetedUnit] = []
        self._settings = _C.SeenSettings()

    def begin(self, units: list[BudgetedUnit], budget: MemoryBudget) -> None:
        """Chooses for these units, enclosing ones first."""
        self._units = units
        self.choose(budget)

    def choose(self, budget: MemoryBudget) -> None:
        """Chooses the prefetch depth, which units are kept from forward into backward, and which recompute.

        Modules are taken to be used in the order in which they were registered. The choice is the same on all ranks.

        Raises:
            ValueError: if activations are given for what is no unit, or what may not recompute is named as recomputable.
            Error: if nothing fits. All is then as it was.
        """
        self._choose(budget, self._settings.grown(self._engine, False) or self._settings)

    def _choose(self, budget: MemoryBudget, settings: _C.SeenSettings) -> None:
        self.prefetch_depth, self.explanation = _choose(self._roots, self._units, budget, settings, self._given_depth)
        self.budget = budget
        self._settings = settings

    def begin_forward(self) -> None:
        """Chooses again if a step needs more than before: for settings that units have now, or for gradients that are there."""
        if self.budget is None:
            return
        grown = self._settings.grown(self._engine, self._has_gradients())
        if grown is not None:
            self._choose(self.budget, grown)

    def _has_gradients(self) -> bool:
        """Whether a backward would add to gradients of an earlier one."""
        return torch.is_grad_enabled() and any(
            parameter.sharded.grad is not None for one in self._units for parameter in one.state.parameters
        )


def _choose(
    roots: Iterable[nn.Module],
    units: list[BudgetedUnit],
    budget: MemoryBudget,
    settings: _C.SeenSettings,
    prefetch_depth: int,
) -> tuple[int, str]:
    """Returns the depth, and what was chosen and why. The units hear of it."""
    names = [unit.name for unit in units]
    unknown = sorted(set(budget.activations) - set(names))
    if unknown:
        raise ValueError(f"memory_budget: activations are given for {unknown}, which are no units: they are {names}")
    unknown = sorted(set(budget.recomputable) - set(names))
    if unknown:
        raise ValueError(f"memory_budget: recomputable names {unknown}, which are no units: they are {names}")
    if "(root)" in budget.recomputable:  # The choice is made when its forward has begun.
        raise ValueError("memory_budget: recomputable names '(root)'; call fully_shard on the part of it that may recompute")
    for one in units:
        if one.parent is not None and names[one.parent] in budget.recomputable and names[one.parent] != one.name:
            raise ValueError(
                f"memory_budget: recomputable names '{names[one.parent]}', which has units within it; name those"
            )
    left = dict(budget.activations)  # Units of one module share its name.
    recomputable = dict(budget.recomputable)
    depth, kept, recomputed, text = _C.choose_within_budget(
        [(_unit_of(one.state), one.parent, left.pop(one.name, 0)) for one in units],
        _visits(roots, units),
        [recomputable.pop(one.name, -1) for one in units],
        settings,
        bytes=budget.bytes,
        optimizer_values=budget.optimizer_values,
        prefetch_depth=prefetch_depth,
        microbatches=budget.microbatches,
    )
    for one, keeps in zip(units, kept, strict=True):
        _unit_of(one.state).kept_by_budget = keeps
    chosen = {one.name for one, recomputes in zip(units, recomputed, strict=True) if recomputes}
    for one in units:
        for module in one.state.modules:
            set_recomputes(module, one.name in chosen)
    return depth, text


def _unit_of(state: ShardState) -> _C.ShownUnit:
    assert state.unit is not None
    return state.unit


def _visits(roots: Iterable[nn.Module], units: list[BudgetedUnit]) -> list[tuple[str, int, bool, list[int]]]:
    """Returns what happens in forward, as _C.plan takes it."""
    units_of: dict[nn.Module, list[int]] = {}
    place_of: dict[tuple[nn.Module, str], tuple[int, int]] = {}  # of parameters: the unit, and the position there
    for k, one in enumerate(units):
        for module in one.state.modules:
            units_of.setdefault(module, []).append(k)
        for i, parameter in enumerate(one.state.parameters):
            place_of.update({(place.module, place.name): (k, i) for place in parameter.places})
    visits: list[tuple[str, int, bool, list[int]]] = []
    used: set[tuple[int, int]] = set()
    trains = False

    def walk(module: nn.Module) -> None:
        nonlocal trains
        own = units_of.get(module, [])
        visits.extend(("begin", k, True, []) for k in own)
        first: dict[int, list[int]] = {}
        for name, parameter in module._parameters.items():
            if parameter is None or (module, name) not in place_of:
                continue
            unit, position = place_of[module, name]
            trains = trains or parameter.requires_grad
            if parameter.requires_grad and (unit, position) not in used:
                first.setdefault(unit, []).append(position)
            used.add((unit, position))
        children = len(visits)
        for _, child in children_of(module):
            walk(child)
        add_use(visits, children, first)
        # Backward enters it by its output's gradient, if that has one.
        visits.extend(("end", k, trains, []) for k in reversed(own))

    for root in roots:
        walk(root)
    return visits
