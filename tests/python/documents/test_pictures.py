"""The pictures in the documents show what is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PICTURES = ROOT / "docs" / "pictures"


def run(*command: object) -> str:
    return subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, text=True, timeout=300
    ).stdout


def arrows_of(picture: str) -> set[tuple[str, str]]:
    """The arrows of a picture, of which those that the program of its name prints follow, and no others."""
    printed = {
        (a.strip('"'), b.strip('"'))
        for a, b in re.findall(r'([\w."]+) -> ([\w."]+)', run(sys.executable, PICTURES / f"{picture}.py"))
    }
    text = (PICTURES / f"{picture}.svg").read_text(encoding="utf-8")
    drawn = set(re.findall(r"<title>([\w.]+)&#45;&gt;([\w.]+)</title>", text))
    assert printed >= drawn
    below = drawn
    while len(further := below | {(a, d) for a, b in below for c, d in drawn if b == c}) > len(below):
        below = further
    assert below >= printed
    return drawn


def test_the_picture_of_the_parts_is_the_tables() -> None:
    drawn = arrows_of("parts")
    assert {a for a, _ in drawn} | {b for _, b in drawn} == {path.parent.name for path in (ROOT / "src").rglob("*.*")}


def test_the_picture_of_the_python_package_is_its_imports() -> None:
    drawn = arrows_of("python")
    assert {("megatron", "_fsdp2"), ("_fsdp2", "optim"), ("optim", "_core"), ("_core", "_comm")} <= drawn


@pytest.mark.nightly
def test_the_picture_of_a_step_can_be_drawn_again(tmp_path: Path) -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    said = run(*launch, PICTURES / "step.py", tmp_path / "step.svg")
    # Each block's forward, backward and reduction; its gather in forward, and, of all but the last, in backward.
    assert "24 spans, at most 2.00 blocks gathered" in said
    assert (tmp_path / "step.svg").read_text(encoding="utf-8").count("<path") > 20
    assert (PICTURES / "step.svg").stat().st_size > 0
