"""Warnings, once for each model, about mistakes that FSDP2 does not report."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from libfsdp._core.sharded_parameter import ShardedParameter
    from libfsdp._core.state import ShardState


class Warnings:
    """The warnings of one model."""

    def __init__(self, states: Sequence[tuple[str, ShardState]]) -> None:
        """Makes it for a model.

        Args:
            states: the states with their names; those with units are in the order of the units.
        """
        self._names = [name or "(root)" for name, state in states if state.unit is not None]
        self._told: set[str] = set()

    def stale(self, units: Sequence[int]) -> None:
        """Warns that the last backward belonged to a forward of these units after which an optimizer had stepped."""
        if units:
            self._tell(
                "stale",
                f"backward of {[self._names[k] for k in units]} through a forward from before an optimizer's step: it computes with the "
                "values after the step, and what forward has saved is of those before it. Call backward before step, or run the "
                "forward again",
            )

    def hooks(self, parameters: Sequence[ShardedParameter]) -> None:
        """Warns that some of these parameters have hooks on their gradients."""
        self._tell(
            "hooks",
            f"hooks of register_hook on {[p.name for p in parameters if p.sharded._backward_hooks]} never run: autograd computes "
            "gradients of whole parameters, not of shards. Use register_post_accumulate_grad_hook, which runs with the reduced "
            "gradient, or register_full_backward_hook of the module",
        )

    def data(self, names: list[str]) -> None:
        """Warns that the data of these DTensors was assigned."""
        self._tell(
            "data",
            f"assigning .data of {names} changes nothing: they are DTensors, whose values lie in their local tensors. Use copy_() "
            "within torch.no_grad(), or load a state dict",
        )

    def options(self, states: Sequence[tuple[str, ShardState]]) -> None:
        """Warns of options of the whole model that were given to other modules than the root, whose state is the first."""
        (_, root), *others = states
        for option in ("keep_gathered_bytes", "memory_budget", "report_nan_in_param_grad"):
            names = [name for name, state in others if getattr(state.options, option)]
            if names and not getattr(root.options, option):
                self._tell(option, f"{option} of {names} does nothing: it is an option of the whole model. Give it in the root's call")

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(text, stacklevel=3)


def tell_of_early_hooks(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Warns of hooks that were registered before fully_shard, because they belong to tensors that are no longer used."""
    names = [name for name, p in parameters if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
    if names:
        warnings.warn(
            f"hooks on {names} from before fully_shard never run: fully_shard puts other parameters into the modules. Register "
            "them after it, by register_post_accumulate_grad_hook",
            stacklevel=5,  # where the program calls fully_shard
        )
