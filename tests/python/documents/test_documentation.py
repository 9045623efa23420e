"""Every public name of the package says what it is, and the pictures in the documents show what is so."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PICTURES = ROOT / "docs" / "pictures"


def modules() -> list[str]:
    """Those of which `make docs` makes the reference."""
    line = re.search(r"^PYTHON_MODULES = (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
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
        if inspect.ismodule(public):
            found += undocumented(public)
            continue
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


def run(*command: object) -> str:
    return subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, text=True, timeout=300
    ).stdout


def test_the_picture_of_the_parts_is_the_tables() -> None:
    allowed = set(re.findall(r"(\w+) -> (\w+)", run(sys.executable, PICTURES / "parts.py")))
    drawn = set(re.findall(r"<title>(\w+)&#45;&gt;(\w+)</title>", (PICTURES / "parts.svg").read_text(encoding="utf-8")))
    assert allowed >= drawn
    below = drawn
    while len(further := below | {(a, d) for a, b in below for c, d in drawn if b == c}) > len(below):
        below = further
    assert below >= allowed  # What is allowed and not drawn follows.
    assert {a for a, _ in drawn} | {b for _, b in drawn} == {folder.name for folder in (ROOT / "src").iterdir()}


def test_the_picture_of_a_step_can_be_drawn_again(tmp_path: Path) -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    said = run(*launch, PICTURES / "step.py", tmp_path / "step.svg")
    # Each block's forward, backward and reduction; its gather in forward, and, of all but the last, in backward.
    assert "24 spans, at most 2.00 blocks gathered" in said
    assert (tmp_path / "step.svg").read_text(encoding="utf-8").count("<path") > 20
    assert (PICTURES / "step.svg").stat().st_size > 0


def test_nightly_results_are_one_page(tmp_path: Path) -> None:
    nightly = (sys.executable, ROOT / "scripts" / "nightly.py", tmp_path)
    first = subprocess.run(
        [*nightly, "one=echo a; echo 'b | c'", "two=echo no >&2; exit 3"], capture_output=True, text=True
    )
    assert first.returncode == 1  # Both ran.
    rows = (tmp_path / "README.md").read_text(encoding="utf-8").splitlines()
    assert [row.split(" | ")[:2] for row in rows[2:]] == [["| one", "passed"], ["| two", "**failed**"]]
    assert r"`b \| c`" in rows[2]
    assert "`no`" in rows[3]
    assert (tmp_path / "two.log").read_text(encoding="utf-8") == "no\n"
    subprocess.run([*nightly, "two=true"], check=True, capture_output=True)
    rows = (tmp_path / "README.md").read_text(encoding="utf-8").splitlines()
    assert [row.split(" | ")[:2] for row in rows[2:]] == [["| one", "passed"], ["| two", "passed"]]
