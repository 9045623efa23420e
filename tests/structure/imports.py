"""Holds the imports and the signatures of the Python package against two rules.

    imports.py ROOT    fails if files or folders of python/libfsdp import each other in a circle, if a function has too
                       many parameters, or if an exception below is not needed

All imports count, those for annotations alone (`if TYPE_CHECKING:`) and those within functions, too: to read a file, one has to know the
files whose types it names. The packages that Python itself loads before a file do not count.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from verdict import tell

PACKAGE = "libfsdp"
MOST_PARAMETERS = 8  # without self and cls

# Functions that have more, and why.
_FSDP2 = "FSDP2's signature, and one keyword for each option of libfsdp's own"
_MEGATRON = "Megatron-FSDP's signature"
_OPTIONS = "programs write each option of a checkpoint as a keyword, most of them not at all"
LONGER = {
    "libfsdp._fsdp2.fully_shard.fully_shard": _FSDP2,
    "libfsdp.megatron._class.MegatronFSDP.__init__": _MEGATRON,
    "libfsdp.megatron._functions.fully_shard_model": _MEGATRON,
    "libfsdp.megatron._index.FSDPDistributedIndex.__init__": _MEGATRON,
    "libfsdp.megatron.v2._fully_shard.fully_shard": _MEGATRON,
    "libfsdp._checkpoint.save.save": _OPTIONS,
    "libfsdp._checkpoint.save.AsyncSaver.save": _OPTIONS,
    "libfsdp._checkpoint.load.load": _OPTIONS,
    "libfsdp._checkpoint.load.load_latest": _OPTIONS,
}


def name_of(path: Path, package: Path) -> str:
    """The name by which a file is imported."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_files(root: Path, *endings: str) -> dict[str, ast.Module]:
    """The files of the package with these endings, by the names by which they are imported."""
    package = root / "python" / PACKAGE
    paths = sorted(path for path in package.rglob("*") if path.suffix in endings)
    return {name_of(path, package): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def imports_of(root: Path) -> dict[str, set[str]]:
    """The files of the package, with those that each of them imports. The extension's types (_C.pyi) count as a file.

    `from a import b` imports a.b where that is a file, and otherwise a.
    """
    files = read_files(root, ".py", ".pyi")
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found[name].update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                found[name].update(one if one in files else node.module for one in inner)
        found[name] = found[name] & files.keys() - {name}
    return found


def circles_in(below: dict[str, set[str]]) -> list[list[str]]:
    """The groups of files that all lead to each other, the largest first."""
    reached: dict[str, set[str]] = {}
    for name in below:
        left, seen = [name], set[str]()
        while left:
            new = below[left.pop()] - seen
            seen |= new
            left += new
        reached[name] = seen
    groups = {tuple(sorted(other for other in seen if name in reached[other])) for name, seen in reached.items() if name in seen}
    return sorted((list(group) for group in groups), key=lambda group: (-len(group), group))


def folder_of(name: str) -> str:
    """The folder of the package that a file is in, or the file itself if it is in none."""
    return ".".join(name.split(".")[:2])


def imports_of_folders(root: Path) -> dict[str, set[str]]:
    """The folders of the package, with those that each of them imports."""
    found: dict[str, set[str]] = {}
    for name, lowers in imports_of(root).items():
        found.setdefault(folder_of(name), set()).update({folder_of(lower) for lower in lowers} - {folder_of(name)})
    return found


def signatures(tree: ast.AST, prefix: str) -> dict[str, int]:
    """The number of parameters of each function and method in a file, by its full name."""
    found: dict[str, int] = {}
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found |= signatures(node, prefix)
            continue
        name = f"{prefix}.{node.name}"
        if not isinstance(node, ast.ClassDef):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            found[name] = len([one for one in every if one is not None and one.arg not in ("self", "cls")])
        found |= signatures(node, name)
    return found


def faults(root: Path) -> list[str]:
    found = [f"{len(group)} files import each other in a circle: {', '.join(group)}" for group in circles_in(imports_of(root))]
    found += [f"folders import each other in a circle: {', '.join(group)}" for group in circles_in(imports_of_folders(root))]
    counts: dict[str, int] = {}
    for name, tree in read_files(root, ".py").items():
        counts |= signatures(tree, name)
    long = {name: count for name, count in counts.items() if count > MOST_PARAMETERS}
    found += [
        f"{name} has {count} parameters, more than {MOST_PARAMETERS}: give it an object of options"
        for name, count in long.items()
        if name not in LONGER
    ]
    found += [f"{name} needs no exception: it has few parameters, or is not there" for name in LONGER if name not in long]
    return found


if __name__ == "__main__":
    sys.exit(tell(faults))
