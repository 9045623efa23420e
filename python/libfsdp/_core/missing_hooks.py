"""Warns of backwards that have not passed through a unit's outputs, and therefore could not be noticed in time."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    Modules = tuple[nn.Module, ...]

_MARK = "_libfsdp_may_miss_backward_hooks"


def may_miss_backward_hooks(module: nn.Module) -> nn.Module:
    """Says that backward may reach the module's parameters in other ways than through its outputs, so that there is no warning about it.

    If a module's outputs are detached, hidden in objects that are not collections of tensors, or left unused, only the gradients show that
    there is a backward. They are then reduced at its end, and the parameters must still be gathered, by ``reshard_after_forward=False`` or
    an ``unshard()`` before. The mark counts for the sharded modules in and below ``module``.

    Returns:
        The module.
    """
    module.__dict__[_MARK] = True
    return module


class MissedUnits:
    """Warns once of a model's units that got gradients without their hooks."""

    def __init__(self, root: Modules, units: Sequence[tuple[str, Modules]]) -> None:
        """Makes it for a model.

        Args:
            root: the outermost modules.
            units: the names and the modules of the units, in their order.
        """
        self._root = root
        self._units = [(name or "(root)", modules) for name, modules in units]
        self._told = False

    def tell(self, missed: Sequence[int]) -> None:
        """Called at the end of a backward, with the positions of units."""
        if not missed or self._told:
            return
        every = (module for root in self._root for module in root.modules())
        marked = {inner for module in every if module.__dict__.get(_MARK, False) for inner in module.modules()}
        units = [self._units[k] for k in missed]
        names = [name for name, modules in units if not marked.intersection(modules)]
        if not names:
            return
        self._told = True
        warnings.warn(
            f"backward reached {names} without passing through their modules' outputs (detached, or hidden in an object that is no "
            "collection of tensors): their gradients are right, but were reduced only at the end of backward. Return the tensors, or, if "
            "that is meant, mark the module with libfsdp.may_miss_backward_hooks",
            stacklevel=2,
        )
