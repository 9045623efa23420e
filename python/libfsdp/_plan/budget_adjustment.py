"""A memory budget's choice, corrected by what steps have measured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from libfsdp._core.arguments import as_bytes, refuse
from libfsdp._core.model import states_in
from libfsdp._core.recomputation import recomputes
from libfsdp._observe.statistics import explain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


def adjust_memory_budget(module: nn.Module, activations: Mapping[str, int | float | str] | int | float | str) -> None:
    """Chooses again what a memory budget leaves open, with activations that steps have measured.

    Collective: call it between steps, on all ranks of the mesh. Of each number, the largest that any rank gives counts, so that all
    ranks choose alike. :func:`explain` then returns the choice. Values do not change.

    Args:
        module: the root, whose fully_shard was given a memory_budget, after its first forward.
        activations: the bytes that stay from a unit's forward to its backward if it does not recompute, by the unit's name; or
            the most that all units had together, which is then divided equally among those below the root.

    Raises:
        ValueError: if the module is not sharded, no forward has run yet, there is no memory_budget, a name is no unit's, or
            another rank refuses what it was given. Also for a sum while units recompute.
        Error: if nothing fits. All is then as it was.
        TypeError: if a number of bytes is none.
    """
    explain(module)  # It raises an error that names what is missing.
    states = list(states_in(module))
    root = states[0][1]
    budget = root.options.memory_budget
    if budget is None:
        raise ValueError(
            f"adjust_memory_budget(): {type(module).__name__} has no memory_budget; give one to fully_shard"
        )
    names = [name or "(root)" for name, state, _ in states if state.unit is not None]
    refusal: Exception | None = None
    given: dict[str, int] = {}
    try:
        recompute = any(recomputes(one) for _, state, _ in states for one in state.modules)
        given = _by_unit(names, activations, recompute=recompute)
    except (ValueError, TypeError) as error:
        refusal = error  # Other ranks wait for this one.
    mesh = root.mesh.mesh
    numbers = torch.tensor([refusal is not None, *(given.get(name, 0) for name in names)], dtype=torch.int64)
    numbers = numbers.to(root.mesh.device)
    for dim in range(mesh.ndim):
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    is_refused, *largest = numbers.tolist()
    if refusal is not None:
        raise refusal
    if is_refused:
        raise ValueError(
            "adjust_memory_budget(): another rank refuses the activations that it was given; see its error"
        )
    assert root.model is not None
    root.model.memory_choice.choose(replace(budget, activations=dict(zip(names, largest, strict=True))))


def _by_unit(names: list[str], activations: Mapping[str, int | float | str] | int | float | str, *, recompute: bool) -> dict[str, int]:
    """Returns the bytes of each unit."""
    if isinstance(activations, (int, float, str)):
        total = as_bytes("activations", activations)
        if recompute:
            raise ValueError(
                "adjust_memory_budget(): units recompute, so a sum does not contain the activations that each of them would keep; give "
                "activations by the names of units"
            )
        below = [name for name in names if name != "(root)"] or names
        share, rest = divmod(total, len(below))
        return {name: share + (k < rest) for k, name in enumerate(below)}
    if not hasattr(activations, "items"):
        refuse("activations", activations, "bytes by the names of units, or a whole number of bytes")
    sizes = {name: as_bytes(f"activations['{name}']", count) for name, count in activations.items()}
    unknown = sorted(set(sizes) - set(names))
    if unknown:
        raise ValueError(f"activations are given for {unknown}, which are no units: they are {names}")
    return sizes
