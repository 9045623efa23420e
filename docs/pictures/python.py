"""Prints which files of python/libfsdp import which, as a graph for Graphviz. A folder is one box.

python docs/pictures/python.py | tred | dot -Tsvg -o docs/pictures/python.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "structure"))
from imports import PACKAGE, imports_of  # noqa: E402

FOLDERS = ("_checkpoint", "megatron.experimental", "megatron.v2", "megatron", "optim")


def box_of(name: str) -> str:
    """The box of a file: its folder, if it lies in one, or its own name."""
    inner = name.removeprefix(PACKAGE).removeprefix(".")
    return next((folder for folder in FOLDERS if f"{inner}.".startswith(f"{folder}.")), inner or "__init__")


def boxes(below: dict[str, set[str]]) -> dict[str, set[str]]:
    """The boxes with those that each of them imports."""
    found: dict[str, set[str]] = {}
    for name, lowers in below.items():
        box = box_of(name)
        found.setdefault(box, set()).update({box_of(lower) for lower in lowers} - {box})
    return found


def graph(below: dict[str, set[str]]) -> str:
    """In the language of `dot`."""
    lines = ['  node [shape=box, style="rounded,filled", fillcolor="#deebf7", color="#3182bd", fontname="sans-serif"]']
    lines += [f'  "{box}" -> "{lower}"' for box, lowers in below.items() for lower in sorted(lowers)]
    return "\n".join(("digraph python {", *lines, "}"))


if __name__ == "__main__":
    print(graph(boxes(imports_of(ROOT))))
