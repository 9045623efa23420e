"""Fails if a line is too long to be read at once.

widths.py ROOT

In documents, rows of tables may be longer: Markdown can't break them.
"""

import sys
from pathlib import Path

from verdict import tell

WIDEST = 140  # characters
ENDINGS = {".h", ".cpp", ".py", ".pyi", ".sh"}
FOLDERS = ("include", "src", "python", "examples", "tools", "bench", "tests", "scripts")


def sources(root: Path) -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((root / folder).rglob("*")) if path.suffix in ENDINGS]


def documents(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def faults(root: Path) -> list[str]:
    found = []
    for path in [*sources(root), *documents(root)]:
        lines = path.read_text(encoding="utf-8").splitlines()
        name = path.relative_to(root)
        for number, line in enumerate(lines, 1):
            if len(line) > WIDEST and not line.startswith("|"):
                found.append(f"{name}:{number} has {len(line)} characters, more than {WIDEST}")
    return found


if __name__ == "__main__":
    sys.exit(tell(faults))
