"""The order in which a forward enters units and uses their parameters, as _C.plan and _C.choose_within_budget take it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

# "begin", "use" or "end", a unit, whether backward enters it there, and for "use" the positions of the parameters in the unit.
Visit = tuple[str, int, bool, list[int]]


def visits_as_registered(
    roots: Iterable[nn.Module],
    units_of: Mapping[nn.Module, list[int]],
    place_of: Mapping[tuple[nn.Module, str], tuple[int, int]],
) -> list[Visit]:
    """Returns the visits of a forward that uses modules in the order in which they were registered.

    It is not known whether a module uses its own parameters before or after units within it. They are taken to be used after those, because
    backward then has their gradients for the longest time.

    Args:
        roots: the outermost modules.
        units_of: the units of each module that was sharded; none if it has no parameters.
        place_of: the unit and the position there of each parameter, by its module and its name in the module.
    """
    visits: list[Visit] = []
    used: set[tuple[int, int]] = set()
    trains = False

    def walk(module: nn.Module) -> bool:
        """Returns whether the module was sharded, or has a module within it that was."""
        nonlocal trains
        visits.extend(("begin", unit, True, []) for unit in units_of.get(module, ()))
        first: dict[int, list[int]] = {}
        for name, parameter in module._parameters.items():
            place = place_of.get((module, name))
            if parameter is not None and place is not None and parameter.requires_grad:
                trains = True
                if place not in used:
                    used.add(place)
                    first.setdefault(place[0], []).append(place[1])
        children = len(visits)
        # A module that has several names is used as often.
        has_units = any([walk(child) for child in module._modules.values() if child is not None])
        at = len(visits) if has_units else children
        visits[at:at] = [("use", unit, True, first[unit]) for unit in sorted(first)]
        # Backward enters a unit by the gradient of its output, if that has one.
        visits.extend(("end", unit, trains, []) for unit in reversed(units_of.get(module, [])))
        return has_units or module in units_of

    for root in roots:
        walk(root)
    return visits


def visits_of_events(
    events: Iterable[tuple[str, str, bool]],
    units_of: Mapping[str, list[int]],
    place_of: Mapping[str, tuple[int, int]],
) -> list[Visit]:
    """Returns the visits of a forward that was observed, of each parameter the first use.

    Args:
        events: see kept_by_unit.
        units_of: the units of each module that was sharded, by its name.
        place_of: the unit and the position there of each trained parameter, by its name.
    """
    visits: list[Visit] = []
    places = dict(place_of)
    module_of = {unit: name for name, units in units_of.items() for unit in units}
    uses: dict[int, list[int]] = {}  # those of one module's units since the last visit
    for what, name, enters in (*events, ("end of all", "", False)):
        place = places.pop(name, None) if what == "use" else None
        if what == "use" and place is None:
            continue
        if uses and (place is None or module_of[place[0]] != module_of[next(iter(uses))]):
            visits += [("use", unit, True, uses[unit]) for unit in sorted(uses)]
            uses = {}
        if place is not None:
            uses.setdefault(place[0], []).append(place[1])
        else:
            units = units_of.get(name, [])
            visits += [(what, unit, enters, []) for unit in (units if what == "begin" else reversed(units))]
    return visits
