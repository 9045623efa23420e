"""The units of a module, in the order in which a training step uses them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


class UnitOrder:
    """Finds the units of a module, and the order in which a step uses them: that in which its modules were registered."""

    def __init__(self, root: nn.Module, is_unit: Callable[[str, nn.Module], bool], ignored: set[nn.Parameter]) -> None:
        self.names: list[str] = []
        self.modules: list[nn.Module] = []
        self.parents: list[int | None] = []
        self.parameters: list[list[tuple[str, nn.Parameter]]] = []
        self.visits: list[tuple[str, int, bool, list[int]]] = []
        self._is_unit = is_unit
        self._ignored = ignored
        self._unit_of: dict[nn.Parameter, int] = {}
        self._unit_of_module: dict[nn.Module, int] = {}
        self._trains = False
        self._walk(root, "", None)

    def _walk(self, module: nn.Module, name: str, enclosing: int | None) -> None:
        unit = enclosing
        begins = enclosing is None or self._is_unit(name, module)
        if begins:
            if module not in self._unit_of_module:
                self._unit_of_module[module] = len(self.names)
                self.names.append(name or "(root)")
                self.modules.append(module)
                self.parents.append(enclosing)
                self.parameters.append([])
            unit = self._unit_of_module[module]
            self.visits.append(("begin", unit, True, []))
        assert unit is not None
        self._use(module, name, unit)
        for child_name, child in module.named_children():
            self._walk(child, f"{name}.{child_name}" if name else child_name, unit)
        if begins:
            # Backward enters it by its output's gradient, if that has one.
            self.visits.append(("end", unit, self._trains, []))

    def _use(self, module: nn.Module, name: str, unit: int) -> None:
        first: list[int] = []
        for own_name, parameter in module.named_parameters(recurse=False):
            if parameter in self._ignored:
                continue
            full_name = f"{name}.{own_name}" if name else own_name
            if self._unit_of.setdefault(parameter, unit) != unit:
                raise ValueError(
                    f"parameter '{full_name}' is in two units, '{self.names[self._unit_of[parameter]]}' and '{self.names[unit]}': tied "
                    "parameters belong to one unit"
                )
            known = self.parameters[unit]
            if all(parameter is not one for _, one in known):
                if parameter.requires_grad:
                    first.append(len(known))
                known.append((full_name, parameter))
            self._trains = self._trains or parameter.requires_grad
        if first:
            self.visits.append(("use", unit, True, first))


def visits_of_units(
    visits: list[tuple[str, int, bool, list[int]]],
    positions_of: dict[int, list[int]],
    places: dict[tuple[int, int], tuple[int, int]],
) -> list[tuple[str, int, bool, list[int]]]:
    """Returns what happens to the engine's units, of which those of one module may be several."""
    found: list[tuple[str, int, bool, list[int]]] = []
    for what, k, enters, first in visits:
        if what == "use":
            used: dict[int, list[int]] = {}
            for i in first:
                unit, place = places[k, i]
                used.setdefault(unit, []).append(place)
            found.extend(("use", unit, enters, used[unit]) for unit in sorted(used))
        else:
            units = positions_of.get(k, [])
            found.extend((what, unit, enters, first) for unit in (units if what == "begin" else reversed(units)))
    return found
