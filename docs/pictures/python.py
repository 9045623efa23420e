"""Prints which folders of python/libfsdp import which, as a graph for Graphviz.

python docs/pictures/python.py | tred | dot -Tsvg -o docs/pictures/python.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "structure"))
from imports import PACKAGE, imports_of_folders  # noqa: E402


def box_of(folder: str) -> str:
    """The name of a folder's box."""
    return folder.removeprefix(f"{PACKAGE}.") if folder != PACKAGE else "__init__"


def graph(below: dict[str, set[str]]) -> str:
    """In the language of `dot`."""
    lines = ['  node [shape=box, style="rounded,filled", fillcolor="#deebf7", color="#3182bd", fontname="sans-serif"]']
    for folder, lowers in below.items():
        lines += [f'  "{box_of(folder)}" -> "{box_of(lower)}"' for lower in sorted(lowers)]
    return "\n".join(("digraph python {", *lines, "}"))


if __name__ == "__main__":
    print(graph(imports_of_folders(ROOT)))
