"""How much memory of its device a rank may use for a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from libfsdp._arguments import check_bytes, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class MemoryBudget:
    """How much memory of its device each rank may use for a model, and what is assumed of a training step.

    Attributes:
        bytes: for the engine, the optimizer and these activations; at least 1.
        optimizer_values: the number of values that the optimizer keeps for each element of a shard, in its dtype: 2 for
            AdamW, 1 for SGD with momentum.
        activations: the bytes of activations that stay from a unit's forward to its backward, by the unit's name, as
            :class:`PlannedUnit` has them; of units that are not named, none.
        recomputable: the units whose forward may be repeated in backward, by name, and the bytes of activations that each then
            keeps, which are its inputs. The rest of its ``activations`` is then there during its backward only. Those that are
            chosen run under ``torch.utils.checkpoint``. No other unit may lie within such a unit, and it is not the root.
    """

    bytes: int
    optimizer_values: int = 2
    activations: Mapping[str, int] = field(default_factory=dict)
    recomputable: Mapping[str, int] = field(default_factory=dict)


def check_budget(budget: MemoryBudget | int | None) -> MemoryBudget | None:
    """Returns the budget that an argument stands for.

    Raises:
        TypeError: if it is neither a number of bytes nor a MemoryBudget.
        ValueError: if it is less than one byte.
    """
    if budget is None:
        return None
    if isinstance(budget, int) and not isinstance(budget, bool):
        budget = MemoryBudget(budget)
    if not isinstance(budget, MemoryBudget):
        refuse("memory_budget", budget, "a whole number of bytes, a MemoryBudget, or None")
    check_bytes("memory_budget", budget.bytes)
    check_bytes("memory_budget.optimizer_values", budget.optimizer_values)
    for name, count in budget.activations.items():
        check_bytes(f"memory_budget.activations['{name}']", count)
    for name, count in budget.recomputable.items():
        check_bytes(f"memory_budget.recomputable['{name}']", count)
    if budget.bytes < 1:
        raise ValueError(f"memory_budget is {budget.bytes}; give how many bytes of its device a rank may use")
    return budget
