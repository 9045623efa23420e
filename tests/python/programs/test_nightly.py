"""`make nightly` runs all of its parts, and says on one page what came out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


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
