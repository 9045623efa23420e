"""Fails if docs/run/errors.md explains a message that no source has any more.

    errors.py ROOT

What stands in backticks in the first column of a table is a part of a message. `...` and single capital letters stand
for what the message names. The text between them has to stand in the strings of one source, in this order.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = Path("docs/run/errors.md")
SOURCES = {"src": (".cpp", ".h"), "include": (".h",), "python/libfsdp": (".py",), "tools": (".cpp",)}
TORCHS = "## `c10::Error`"
"""The messages of the section with this heading are torch's."""
CELL = re.compile(r"(?<!\\)\|")
TEXT = re.compile(r"`([^`]+)`")
NAMED = re.compile(r"'?\.\.\.'?|\b[A-Z]\b")
CPP_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
BETWEEN = "\0"
"""Stands for what a program puts between two strings."""


def strings_of_cpp(text: str) -> str:
    """The strings of a C++ source, those joined that the compiler joins."""
    joined = re.sub(r'(?<!\\)"\s*\n?\s*"(?=[^;])', "", text)
    return BETWEEN.join(CPP_STRING.findall(joined)).replace('\\"', '"')


def strings_of_python(text: str) -> str:
    """The strings of a module without its docstrings, which nobody is told."""
    tree = ast.parse(text)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else BETWEEN for part in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            found.append(node.value)
    return BETWEEN.join(found)


def messages(root: Path) -> Iterator[tuple[int, str]]:
    """The texts of the page, with their lines from 1."""
    heading = ""
    for number, line in enumerate((root / PAGE).read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("## "):
            heading = line
        elif line.startswith("| ") and heading and heading != TORCHS:
            yield from ((number, text) for text in TEXT.findall(CELL.split(line)[1]) if " " in text)


def has(strings: str, text: str) -> bool:
    at = 0
    for piece in NAMED.split(text):
        at = strings.find(piece.strip(" ,:'"), at)
        if at < 0:
            return False
    return True


def faults(root: Path) -> list[str]:
    sources = []
    for folder, endings in SOURCES.items():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in endings:
                text = path.read_text(encoding="utf-8")
                sources.append(strings_of_python(text) if path.suffix == ".py" else strings_of_cpp(text))
    return [
        f"{PAGE}:{number}: no source says: {text}"
        for number, text in messages(root)
        if not any(has(strings, text) for strings in sources)
    ]


def main() -> int:
    found = faults(Path(sys.argv[1]))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
