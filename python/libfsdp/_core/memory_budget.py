"""The memory of its device that a rank may use for a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from libfsdp._core.arguments import as_bytes, check_bytes, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, init=False)
class MemoryBudget:
    """The memory of its device that each rank may use for a model, and assumptions about a training step.

    Attributes:
        bytes: for the engine, the optimizer and these activations; at least 1.
        optimizer_values: the number of values that the optimizer keeps for each element of a shard, in its dtype: 2 for
            AdamW, 1 for SGD with momentum.
        activations: the bytes of activations that stay from a unit's forward to its backward, by the unit's name, as
            :class:`PlannedUnit` has them; of units that are not named, none.
        recomputable: the units whose forward may be repeated in backward, by name, and the bytes of activations that each then
            keeps, which are its inputs. The rest of its ``activations`` is then there during its backward only. Those that are
            chosen run under ``torch.utils.checkpoint``. No other unit may lie within such a unit, and it is not the root.
        microbatches: the backwards before each update, whose gradients add up. If it is left out, the budget chooses again in
            the first forward that finds gradients, or ``set_requires_gradient_sync(False)``, and raises Error there if nothing
            fits.
    """

    bytes: int
    optimizer_values: int
    activations: Mapping[str, int]
    recomputable: Mapping[str, int]
    microbatches: int

    def __init__(
        self,
        bytes: int | float | str,
        optimizer_values: int = 2,
        activations: Mapping[str, int | float | str] | None = None,
        recomputable: Mapping[str, int | float | str] | None = None,
        microbatches: int = 1,
    ) -> None:
        """Sizes are whole numbers of bytes (also as 60e9), or texts such as "60GB" and "1.5GiB".

        KB, MB, GB and TB are powers of 1000, and KiB, MiB, GiB and TiB are powers of 1024.

        Raises:
            TypeError: for values that are neither.
            ValueError: for texts that are no sizes, negative sizes, a budget of less than one byte, and fewer than one
                microbatch.
        """
        size = as_bytes("memory_budget", bytes)
        if size < 1:
            raise ValueError(f"memory_budget is {size}; give how many bytes of its device a rank may use")
        check_bytes("memory_budget.optimizer_values", optimizer_values)
        check_bytes("memory_budget.microbatches", microbatches)
        if microbatches < 1:
            raise ValueError(f"memory_budget.microbatches is {microbatches}; give 1 or more")
        vars(self).update(bytes=size, optimizer_values=optimizer_values, microbatches=microbatches)  # it is frozen
        for name, given in (("activations", activations), ("recomputable", recomputable)):
            label = f"memory_budget.{name}"
            vars(self)[name] = {unit: as_bytes(f"{label}['{unit}']", value) for unit, value in (given or {}).items()}


def check_budget(budget: MemoryBudget | int | float | str | None) -> MemoryBudget | None:
    """Returns the budget that an argument stands for.

    Raises:
        TypeError: if it is neither a size in bytes nor a MemoryBudget.
        ValueError: as for MemoryBudget.
    """
    if budget is None or isinstance(budget, MemoryBudget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        refuse("memory_budget", budget, "a size in bytes (60e9 or '60GiB'), a MemoryBudget, or None")
    return MemoryBudget(budget)
