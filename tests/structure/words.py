"""Holds the names of types and functions against the words of docs/start/glossary.md: each has one meaning.

    words.py ROOT    fails if two folders define a type of one name, or if a word of the table is in the name of a type or
                     function in a folder that its meaning does not belong to

A row of the table says a word, its meaning, and the folders of src/ whose names may have it (`fsdp` stands for the
public headers). A folder's own folders belong to it. Types within a class count for words, but two classes may each have
one of the same name. What a source defines below its first column is no function for others, and does not count.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from verdict import tell

TABLE = "## Words of the code"
ROW = re.compile(r"^\| (\w+) \|[^|]+\|(?P<folders>(?: `\w+`,?)+ )\|$")
TYPE = re.compile(
    r"^(?P<indent> *)(?:template <.*>\s*)?"
    r"(?:(?:class|struct|enum class|enum|union)\s+(?P<name>\w+)(?:\s+final)?\s*(?::(?!:)[^;{]*)?\{|using\s+(?P<alias>\w+)\s*=)",
    re.MULTILINE,
)
FUNCTION = re.compile(
    r"^(?P<indent> *)(?!return|throw|else|delete|new|using|co_)[\w:<>,&*\[\]\" ]*?[ &*](?:\w+::)*(?P<name>[a-z]\w*)(?<!_)\(",
    re.MULTILINE,
)
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
VERBS = {"run", "call"}  # Functions whose names begin so do what the verb says.


def read_table(glossary: Path) -> dict[str, set[str]]:
    """The words, with the folders whose names may have them."""
    rows = glossary.read_text(encoding="utf-8").partition(TABLE)[2].splitlines()
    return {row[1]: set(re.findall(r"\w+", row["folders"])) for line in rows if (row := ROW.match(line))}


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    """The folder below src/ of each source and header, and its path; the public headers' folder is `fsdp`."""
    for path in sorted([*(root / "src").rglob("*.h"), *(root / "src").rglob("*.cpp")]):
        yield path.parent.relative_to(root / "src").as_posix(), path
    for path in sorted((root / "include" / "fsdp").glob("*.h")):
        yield "fsdp", path


def names_of(path: Path) -> tuple[set[str], set[str], set[str]]:
    """The types of a namespace that it defines, the types of a class, and the functions."""
    text = path.read_text(encoding="utf-8")
    outer: set[str] = set()
    inner: set[str] = set()
    for found in TYPE.finditer(text):
        (inner if found["indent"] else outer).add(found["name"] or found["alias"])
    functions = {f["name"] for f in FUNCTION.finditer(text) if path.suffix == ".h" or not f["indent"]}
    return outer, inner, {name for name in functions if name.partition("_")[0] not in VERBS}


def words_in(name: str) -> set[str]:
    """The words of a name, each as it is and without the ending of a plural."""
    words = {word.lower() for word in WORD.findall(name)}
    return words | {word.removesuffix(end) for word in words for end in ("s", "es") if word.endswith(end)}


def faults(root: Path) -> list[str]:
    table = read_table(root / "docs" / "start" / "glossary.md")
    if not table:
        return [f"docs/start/glossary.md has no table below '{TABLE}'"]
    found = []
    homes: dict[str, set[str]] = {}
    for folder, path in sources(root):
        outer, inner, functions = names_of(path)
        for name in outer:
            homes.setdefault(name, set()).add(folder)
        for name in sorted(outer | inner | functions):
            strangers = [word for word in words_in(name) & table.keys() if not set(folder.split("/")) & table[word]]
            if strangers:
                found.append(
                    f"{path.relative_to(root)}: {name}: '{strangers[0]}' has another meaning (docs/start/glossary.md)"
                )
    for name, folders in sorted(homes.items()):
        if len(folders) > 1:
            found.append(f"{name} is a type of {' and of '.join(sorted(folders))}")
    return found


if __name__ == "__main__":
    sys.exit(tell(faults))
