"""Prints the folders of src/ and which of them may include from which, by the table in docs/develop/design.md, as a graph for Graphviz.

python docs/pictures/parts.py | tred | dot -Tsvg -o docs/pictures/parts.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "structure"))
from includes import read_table  # noqa: E402


def graph(below: dict[str, set[str]]) -> str:
    """In the language of `dot`."""
    lines = ['  node [shape=box, style="rounded,filled", fillcolor="#deebf7", color="#3182bd", fontname="sans-serif"]']
    lines += [f"  {folder} -> {lower}" for folder, lowers in below.items() for lower in sorted(lowers)]
    return "\n".join(("digraph parts {", *lines, "}"))


if __name__ == "__main__":
    print(graph(read_table(ROOT / "docs" / "develop" / "design.md")[0]))
