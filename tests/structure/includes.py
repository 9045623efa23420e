"""Holds the includes of the sources against the table of folders in docs/develop/design.md.

    includes.py ROOT    fails if a file includes what its folder may not, if the table allows what no file uses, if
                        the table has a cycle, or if a file includes <sstream>, whose streams follow the global locale,
                        or <torch/torch.h>, which takes longer to compile

The table has a row per folder of src/, at whatever depth (their last names differ): its public headers in
include/fsdp/, and the folders that it may include from. A public header belongs to the folder that implements it.
"""

import re
import sys
from pathlib import Path

from verdict import tell

ROW = re.compile(r"^\| `src/(?:\w+/)*(\w+)/` \|.*\|(?P<headers>[^|]*)\|(?P<below>[^|]*)\|$")
INCLUDE = re.compile(r'^#include (?:"|<(?=fsdp/))(?:\w+/)*(\w+)/(\w+\.h)[>"]', re.MULTILINE)
UMBRELLA = "fsdp.h"
INSTEAD = {
    "sstream": "ClassicStream of base/classic_stream.h",
    "torch/torch.h": "ATen/ATen.h, torch/nn/module.h or what else is used",
}


def read_table(design: Path) -> tuple[dict[str, set[str]], dict[str, str]]:
    """The folders with those that they may include from, and the folder of each public header."""
    may: dict[str, set[str]] = {}
    owner: dict[str, str] = {}
    for line in design.read_text(encoding="utf-8").splitlines():
        row = ROW.match(line)
        if row is None:
            continue
        folder = row.group(1)
        may[folder] = set(re.findall(r"\w+", row.group("below")))
        for header in re.findall(r"\w+", row.group("headers")):
            owner[f"{header}.h"] = folder
    return may, owner


def used(path: Path, owner: dict[str, str]) -> set[str]:
    """The folders that a file includes from."""
    folders = set()
    for folder, header in INCLUDE.findall(path.read_text(encoding="utf-8")):
        if folder != "fsdp":
            folders.add(folder)
        elif header in owner:
            folders.add(owner[header])
    return folders


def cycle_in(may: dict[str, set[str]]) -> list[str]:
    """Folders that depend on each other, or none."""
    left = {folder: set(below) for folder, below in may.items()}
    while left:
        free = [folder for folder, below in left.items() if not below & left.keys()]
        if not free:
            return sorted(left)
        for folder in free:
            del left[folder]
    return []


def faults(root: Path) -> list[str]:
    may, owner = read_table(root / "docs" / "develop" / "design.md")
    found = []
    folders = {path.parent.name for path in (root / "src").rglob("*.*")}
    public = {path.name for path in (root / "include" / "fsdp").iterdir()} - {UMBRELLA}
    found += [f"src/{folder} has no row in the table" for folder in sorted(folders - may.keys())]
    found += [f"the table has a row for src/{folder}, which is not there" for folder in sorted(may.keys() - folders)]
    found += [f"include/fsdp/{header} has no folder in the table" for header in sorted(public - owner.keys())]
    found += [f"the table names {header}, which is not there" for header in sorted(owner.keys() - public)]
    cycle = cycle_in(may)
    if cycle:
        found.append("the table has a cycle among " + ", ".join(cycle))

    uses: dict[str, set[str]] = {folder: set() for folder in may}
    sources = [(path.parent.name, path) for path in sorted((root / "src").rglob("*.*"))]
    headers = sorted((root / "include" / "fsdp").glob("*.h"))
    sources += [(owner[path.name], path) for path in headers if path.name in owner]
    for _, path in sources:
        text = path.read_text(encoding="utf-8")
        found += [
            f"{path.relative_to(root)} includes <{header}>; take {instead}"
            for header, instead in INSTEAD.items()
            if f"#include <{header}>" in text and path.name != "classic_stream.h"
        ]
    for folder, path in sources:
        below = (used(path, owner) & may.keys()) - {folder}
        uses.setdefault(folder, set()).update(below)
        found += [
            f"{path.relative_to(root)} includes from src/{other}, which src/{folder} may not"
            for other in sorted(below - may.get(folder, set()))
        ]
    found += [
        f"the table allows src/{folder} to include from src/{other}, which no file does"
        for folder in sorted(may)
        for other in sorted(may[folder] - uses[folder])
    ]
    return found


if __name__ == "__main__":
    sys.exit(tell(faults))
