"""What tests are run for, and under which conditions."""

from __future__ import annotations

import pytest

import libfsdp
from support import hugging_face

needs_libfsdp = pytest.mark.skipif(not hasattr(libfsdp, "fully_shard"), reason="libfsdp has no fully_shard yet")
needs_transformers = pytest.mark.skipif(
    not hugging_face.available(), reason="the package transformers is not installed"
)
# FSDP2 itself as an implementation checks the tests.
IMPLEMENTATIONS = ("fsdp2", pytest.param("libfsdp", marks=needs_libfsdp))
