"""The units of a module, in the order in which a training step uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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

    def follow(self, root: nn.Module, events: list[tuple[str, str, bool]]) -> None:
        """Takes the order of a forward instead: see kept_by_unit."""
        places = {parameter: (k, i) for k, given in enumerate(self.parameters) for i, (_, parameter) in enumerate(given)}
        place_of = {name: places[parameter] for name, parameter in root.named_parameters() if parameter in places}
        trains = {name for name, parameter in root.named_parameters() if parameter.requires_grad}
        self.visits = []
        for what, name, has_gradient in events:
            if what != "use":
                self.visits.append((what, self.names.index(name), has_gradient, []))
            elif name in trains and name in place_of:
                unit, position = place_of.pop(name)
                if self.visits[-1][:2] == ("use", unit):
                    self.visits[-1][3].append(position)
                else:
                    self.visits.append(("use", unit, True, [position]))

    def _walk(self, module: nn.Module, name: str, enclosing: int | None) -> None:
        unit = enclosing
        begins = enclosing is None or module in self._unit_of_module or self._is_unit(name, module)
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
        own = self._use(module, name, unit)
        children = len(self.visits)
        for child_name, child in children_of(module):
            self._walk(child, f"{name}.{child_name}" if name else child_name, unit)
        add_use(self.visits, children, own)
        if begins:
            # Backward enters it by its output's gradient, if that has one.
            self.visits.append(("end", unit, self._trains, []))

    def _use(self, module: nn.Module, name: str, unit: int) -> dict[int, list[int]]:
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
        return {unit: first}


def children_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the names and modules of the children in the order of their use: one that has several names is used as often."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


def add_use(visits: list[tuple[str, int, bool, list[int]]], children: int, own: dict[int, list[int]]) -> None:
    """Adds the use of a module's own parameters, by unit, to ``visits``, in which its children begin at ``children``.

    Where a module uses them among units within it is not known. They are taken to be used after those: backward then has their
    gradients for the longest time.
    """
    for unit, parameters in own.items():
        has_units = any(visit[1] != unit for visit in visits[children:])
        if parameters:
            visits.insert(len(visits) if has_units else children, ("use", unit, True, parameters))


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
