"""Callbacks that do not keep their objects alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def weak_method(method: Any) -> Callable[..., Any]:
    """The method, without keeping its object: the garbage collector can't see what the engine keeps."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        return None if target is None else target(*args, **kwargs)

    return call
