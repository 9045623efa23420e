"""The checks of documents and of names (tests/docs, tests/structure) find what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = "tests/structure/widths.py"
FIRST = "WIDEST = 140  # characters"
SECOND = 'ENDINGS = {".h", ".cpp", ".py", ".pyi", ".sh"}'
LATER = "def faults(root: Path) -> list[str]:"


def said_by(check: str, *arguments: object) -> str:
    """What the check prints; it fails if it says anything but that files are in order."""
    command = [sys.executable, str(ROOT / "tests" / check), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.stderr == ""
    assert (result.returncode == 0) == (not result.stdout or result.stdout.endswith(" in order\n"))
    return result.stdout


@pytest.mark.parametrize(
    ("source", "lines", "fault"),
    [
        pytest.param(SOURCE, [FIRST, SECOND], "", id="as_it_is"),
        pytest.param(SOURCE, [FIRST, "# ...", LATER], "", id="lines_left_out"),
        pytest.param(SOURCE, [FIRST.replace("140", "900"), SECOND], f"{SOURCE} has not", id="another_text"),
        pytest.param(SOURCE, [FIRST, LATER], f"{SOURCE} has not", id="a_gap_that_is_not_marked"),
        pytest.param(SOURCE, [LATER, "# ...", FIRST], f"{SOURCE} has not", id="another_order"),
        pytest.param("src/engine/gone.py", [FIRST], "there is no ", id="a_file_that_is_gone"),
    ],
)
def test_an_excerpt_that_does_not_fit_its_source_is_refused(
    tmp_path: Path, source: str, lines: list[str], fault: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join([f"```python from {source}", *lines, "```", ""]), encoding="utf-8")
    said = said_by("docs/examples.py", "check", page)
    assert said.startswith(f"{page}:1: {fault}" if fault else "1 files in order"), said


def test_a_name_of_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`src/engine/engine.h` and `src/engine/gone.h`\n", encoding="utf-8")
    assert said_by("docs/examples.py", "check", page).splitlines() == [f"{page}:1: no such file: src/engine/gone.h"]


def test_an_entry_on_errors_that_no_source_says_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs" / "run").mkdir(parents=True)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cpp").write_text(
        'throw Error("parameter \'" + name + "\' is of an " "odd kind");\n', encoding="utf-8"
    )
    rows = ["`parameter '...' is of an odd kind`", "`is of an odd kind ... parameter`", "`is of an even kind`"]
    page = ["## Table", "| message | cause |", "|---|---|", *(f"| {row} | |" for row in rows), ""]
    (tmp_path / "docs" / "run" / "errors.md").write_text("\n".join(page), encoding="utf-8")
    assert said_by("docs/errors.py", tmp_path).splitlines() == [
        "docs/run/errors.md:5: no source says: is of an odd kind ... parameter",
        "docs/run/errors.md:6: no source says: is of an even kind",
    ]
