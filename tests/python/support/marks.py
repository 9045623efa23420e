"""What tests are run for, and under which conditions."""

from __future__ import annotations

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
