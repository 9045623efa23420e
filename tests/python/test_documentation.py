"""Every public name of the package says what it is."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"


def modules() -> list[str]:
    """Those of which `make docs` makes the reference."""
    line = re.search(r"^PYTHON_MODULES = (.*)$", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert line is not None
    return line[1].split()


def members(cls: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and callable(function):
            yield name, function


def undocumented(module: Any) -> list[str]:
    found = [] if module.__doc__ else [module.__name__]
    for name in module.__all__:
        public = getattr(module, name)
        if not getattr(public, "__module__", "").startswith(("libfsdp", "test_documentation")):
            continue  # torch's, or a value
        found += [] if public.__doc__ else [f"{module.__name__}.{name}"]
        if inspect.isclass(public):
            found += [f"{module.__name__}.{name}.{inner}" for inner, value in members(public) if not value.__doc__]
    return found


@pytest.mark.parametrize("name", modules())
def test_public_names_have_docstrings(name: str) -> None:
    assert undocumented(importlib.import_module(name)) == []


def test_a_missing_docstring_is_found() -> None:
    class Module:
        """A module."""

        __name__ = "m"
        __all__ = ("Public",)

        class Public:
            """A class."""

            def said(self) -> None:
                """It is."""

            def unsaid(self) -> None:
                pass

            @property
            def value(self) -> int:
                return 1

    assert undocumented(Module()) == ["m.Public.unsaid", "m.Public.value"]
