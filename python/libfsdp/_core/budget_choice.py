"""Chooses, from a plan of the model, the data that a memory budget has room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from libfsdp import _C
from libfsdp._core.recomputation import set_recomputes
from libfsdp._core.unit_order import visits_as_registered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from libfsdp._core.memory_budget import MemoryBudget
    from libfsdp._core.state import ShardState


@dataclass(frozen=True)
class BudgetedUnit:
    """A unit of a model.

    Attributes:
        name: as in a plan: "(root)" for the root.
        state: its state.
        unit: its unit.
        parent: the position of the unit around it.
    """

    name: str
    state: ShardState
    unit: _C.ShownUnit
    parent: int | None


class BudgetChoice:
    """The choice of a memory budget for a model, and its reasons.

    Attributes:
        prefetch_depth: the model's.
        explanation: a line for each option.
    """

    def __init__(
        self, roots: Sequence[nn.Module], engine: _C.HookedModel, units: list[BudgetedUnit], prefetch_depth: int
    ) -> None:
        """Chooses nothing.

        Args:
            units: the model's, enclosing ones first.
            prefetch_depth: as it was given: the largest that may be chosen.
        """
        self.prefetch_depth = prefetch_depth
        self.explanation = "no memory_budget: all options are as they were given\n"
        self._roots = roots
        self._engine = engine
        self._units = units
        self._given_depth = prefetch_depth
        self._budget: MemoryBudget | None = None
        self._settings = _C.SeenSettings()

    def begin_forward(self) -> None:
        """Chooses again if a step needs more than before: for settings that units have now, or for gradients that are there."""
        if self._budget is None:
            return
        # Given microbatches count already.
        looks = torch.is_grad_enabled() and self._budget.microbatches == 1
        grown = self._settings.grown(self._engine, looks=looks)
        if grown is not None:
            self._choose(self._budget, grown)

    def choose(self, budget: MemoryBudget) -> None:
        """Chooses the prefetch depth, which units are kept from forward into backward, and which recompute.

        Modules are taken to be used in the order in which they were registered. The choice is the same on all ranks.

        Raises:
            ValueError: if activations are given for what is no unit, or what may not recompute is named as recomputable.
            Error: if nothing fits. All is then as it was.
        """
        self._choose(budget, self._settings.grown(self._engine, looks=False) or self._settings)

    def _choose(self, budget: MemoryBudget, settings: _C.SeenSettings) -> None:
        _check_names(budget, self._units)
        activations = dict(budget.activations)  # Units of one module share its name.
        recomputable = dict(budget.recomputable)
        self.prefetch_depth, kept, recomputed, self.explanation = _C.choose_within_budget(
            [(one.unit, one.parent, activations.pop(one.name, 0)) for one in self._units],
            self._visits(),
            [recomputable.pop(one.name, -1) for one in self._units],
            settings,
            bytes=budget.bytes,
            optimizer_values=budget.optimizer_values,
            prefetch_depth=self._given_depth,
            microbatches=budget.microbatches,
        )
        chosen = {one.name for one, recomputes in zip(self._units, recomputed, strict=True) if recomputes}
        for one, keeps in zip(self._units, kept, strict=True):
            one.unit.kept_by_budget = keeps
            for module in one.state.modules:
                set_recomputes(module, one.name in chosen)
        self._budget, self._settings = budget, settings

    def _visits(self) -> list[tuple[str, int, bool, list[int]]]:
        units_of: dict[nn.Module, list[int]] = {}
        place_of: dict[tuple[nn.Module, str], tuple[int, int]] = {}
        for k, one in enumerate(self._units):
            for module in one.state.modules:
                units_of.setdefault(module, []).append(k)
            for i, parameter in enumerate(one.state.parameters):
                place_of.update({(place.module, place.name): (k, i) for place in parameter.places})
        return visits_as_registered(self._roots, units_of, place_of)


def _check_names(budget: MemoryBudget, units: list[BudgetedUnit]) -> None:
    names = [one.name for one in units]
    for given, says in ((budget.activations, "activations are given for"), (budget.recomputable, "recomputable names")):
        unknown = sorted(set(given) - set(names))
        if unknown:
            raise ValueError(f"memory_budget: {says} {unknown}, which are no units: they are {names}")
    if "(root)" in budget.recomputable:  # The choice is made when its forward has begun.
        raise ValueError("memory_budget: recomputable names '(root)'; call fully_shard on the part of it that may recompute")
    for one in units:
        if one.parent is not None and names[one.parent] in budget.recomputable and names[one.parent] != one.name:
            raise ValueError(f"memory_budget: recomputable names '{names[one.parent]}', which has units within it; name those")
