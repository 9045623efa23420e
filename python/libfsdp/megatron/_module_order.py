"""The order in which modules are visited."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def inner_first(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Yields each module once, after all modules below it; a module with several owners comes before the first of them."""
    seen = set() if seen is None else seen
    seen.add(module)
    for child in reversed(list(module.children())):
        if child not in seen:
            yield from inner_first(child, seen)
    yield module
