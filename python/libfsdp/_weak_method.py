"""Callbacks that do not keep their objects alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def weak_method(method: Any) -> Callable[..., Any]:
    """Returns the method without keeping its object alive, because the garbage collector can't see references of the engine."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        return None if target is None else target(*args, **kwargs)

    return call
