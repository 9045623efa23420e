"""What tests are run for, and under which conditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from support import hugging_face

# FSDP2 itself as an implementation checks the tests.
IMPLEMENTATIONS = ("fsdp2", "libfsdp")


def needs_in_torch(owner: object, name: str) -> pytest.MarkDecorator:
    """For tests of what older versions of torch do not have."""
    return pytest.mark.skipif(not hasattr(owner, name), reason=f"this torch has no {name}")


needs_transformers = pytest.mark.skipif(
    not hugging_face.available(), reason="the package transformers is not installed"
)


def at_night(*values: object) -> ParameterSet:
    """A set of parameters with which a test runs in `make nightly` only."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def on_ranks(*sizes: int | str, fresh: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Runs the test on each of so many ranks, with its parameters and fixtures. With several numbers, it runs once for each of them.

    Args:
        sizes: numbers of ranks, or the names of parameters that have them.
        fresh: the test has ranks of its own, which end with it.
    """

    def mark(test: Callable[..., Any]) -> Callable[..., Any]:
        ranks = "fresh_ranks" if fresh else "ranks"
        parameters = [size for size in sizes if isinstance(size, str)]
        marked: Callable[..., Any] = pytest.mark.usefixtures(ranks, *parameters)(
            pytest.mark.on_ranks(ranks, *sizes)(test)
        )
        return marked

    return mark
