"""Marks models and optimizers that a failed load has replaced in part, so that they are not used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from libfsdp import _C
from libfsdp._core.model import states_in

if TYPE_CHECKING:
    import torch
    from torch import nn

_ATTRIBUTE = "_libfsdp_failed_load"


class FailedLoad:
    """Makes a model or an optimizer refuse to be used, until another load has replaced the same values."""

    def __init__(self, names: set[str], what: str) -> None:
        self.names = names
        self._what = what
        self._handles: list[Any] = []

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _C.Error(
            f"the {self._what} is partly loaded, as a load failed halfway: load again, or load another checkpoint"
        )

    def stop_model(self, model: nn.Module) -> None:
        model.__dict__[_ATTRIBUTE] = self
        modules = {module for _, state, _ in states_in(model) for module in state.modules}
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(self._refuse, prepend=True))
        self._handles.append(model.register_state_dict_pre_hook(self._refuse))

    def stop_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.__dict__[_ATTRIBUTE] = self
        self._handles.append(optimizer.register_step_pre_hook(self._refuse))
        self._handles.append(optimizer.register_state_dict_pre_hook(self._refuse))

    def allow(self) -> None:
        """Allows the use again, because a load has replaced all values, or is about to."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def failed_load_of(thing: nn.Module | torch.optim.Optimizer) -> FailedLoad | None:
    """Returns the mark of a model or an optimizer that refuses to be used; None if there is none."""
    return thing.__dict__.get(_ATTRIBUTE)


def forget(thing: nn.Module | torch.optim.Optimizer) -> None:
    """Removes the mark, because all values belong to one checkpoint again."""
    failed = thing.__dict__.pop(_ATTRIBUTE, None)
    if failed is not None:
        failed.allow()
