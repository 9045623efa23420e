"""Fixtures of the tests of the Python package."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from support.ranks import Ranks

torch.set_num_threads(1)  # As the ranks: sums of matrix products depend on it.


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Ranks by their number; started when they are first used, and kept."""
    started: dict[int, Ranks] = {}
    yield lambda size: started.setdefault(size, Ranks(size))
    for group in started.values():
        group.end()
