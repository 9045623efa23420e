"""In which order modules are visited."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def inner_first(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Each module once, after all that are below it: a module with several owners before the first of them.

    Args:
        module: the root, which comes last.
        seen: what has come already.
    """
    seen = set() if seen is None else seen
    seen.add(module)
    for child in reversed(list(module.children())):
        if child not in seen:
            yield from inner_first(child, seen)
    yield module
