"""Modules that repeat their forward in backward, because a memory budget has chosen it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class _Recomputed:
    """A forward that keeps only its inputs. It runs within the unit's hooks, so that the unit is gathered when backward repeats it."""

    def __init__(self, forward: Callable[..., Any], own: Callable[..., Any] | None) -> None:
        self._forward = forward
        self.own = own  # what the module itself had, in place of its class's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # checkpoint has keywords of its own.
        return checkpoint(functools.partial(self._forward, **kwargs), *args, use_reentrant=False)


def recomputes(module: nn.Module) -> bool:
    """True if backward repeats the module's forward."""
    return isinstance(vars(module).get("forward"), _Recomputed)


def set_recomputes(module: nn.Module, wanted: bool) -> None:
    """Makes a module's forward keep its inputs alone, and backward repeat it; or takes that back."""
    if recomputes(module) == wanted:
        return
    present: Any = vars(module).get("forward")
    if wanted:
        module.forward = _Recomputed(module.forward, present)
    elif present.own is not None:
        module.forward = present.own
    else:
        del module.forward
