"""Warnings, once for each model, about mistakes that FSDP2 does not report, and the mark that silences one of them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from libfsdp._core.sharded_parameter import ShardedParameter
    from libfsdp._core.state import ShardState


_MARK = "_libfsdp_may_miss_backward_hooks"


def may_miss_backward_hooks(module: nn.Module) -> nn.Module:
    """Declares that backward may reach the module's parameters in other ways than through its outputs, which turns the warning off.

    If a module's outputs are detached, hidden in objects that are not collections of tensors, or left unused, only the gradients show that
    there is a backward. They are then reduced at its end, and the parameters must still be gathered, by ``reshard_after_forward=False`` or
    an ``unshard()`` before. The mark counts for the sharded modules in and below ``module``.

    Returns:
        The module.
    """
    module.__dict__[_MARK] = True
    return module


class Warnings:
    """The warnings of one model."""

    def __init__(self, states: Sequence[tuple[str, ShardState]]) -> None:
        """Makes it for a model.

        Args:
            states: the states with their names, the root's first; those with units are in the order of the units.
        """
        self._roots = states[0][1].modules
        self._units = [(name or "(root)", state.modules) for name, state in states if state.unit is not None]
        self._told: set[str] = set()

    def missed(self, units: Sequence[int]) -> None:
        """Warns that the last backward has given these units gradients without passing through their modules' outputs."""
        if not units or "missed" in self._told:
            return
        every = (module for root in self._roots for module in root.modules())
        marked = {inner for module in every if module.__dict__.get(_MARK, False) for inner in module.modules()}
        names = [name for name, modules in (self._units[k] for k in units) if not marked.intersection(modules)]
        if names:
            self._tell(
                "missed",
                f"backward reached {names} without passing through their modules' outputs (detached, or hidden in an object that is no "
                "collection of tensors): their gradients are right, but were reduced only at the end of backward. Return the tensors, or, "
                "if that is meant, mark the module with libfsdp.may_miss_backward_hooks",
            )

    def stale(self, units: Sequence[int]) -> None:
        """Warns that the last backward belonged to a forward of these units after which an optimizer had stepped."""
        if units:
            self._tell(
                "stale",
                f"backward of {[self._units[k][0] for k in units]} through a forward from before an optimizer's step: it computes with the "
                "values after the step, and what forward has saved is of those before it. Call backward before step, or run the "
                "forward again",
            )

    def hooks(self, parameters: Sequence[ShardedParameter]) -> None:
        """Warns that some of these parameters have hooks on their gradients."""
        self._tell(
            "hooks",
            f"hooks of register_hook on {[p.name for p in parameters if p.sharded._backward_hooks]} never run: autograd computes "
            "gradients of unsharded parameters, not of shards. Use register_post_accumulate_grad_hook, which runs with the reduced "
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
