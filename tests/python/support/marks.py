"""What tests are run for, and under which conditions."""

from __future__ import annotations

import pytest

from support import hugging_face

# FSDP2 itself as an implementation checks the tests.
IMPLEMENTATIONS = ("fsdp2", "libfsdp")
needs_transformers = pytest.mark.skipif(
    not hugging_face.available(), reason="the package transformers is not installed"
)
