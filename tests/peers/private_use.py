"""What does a test of PyTorch use of FSDP2 that is not public? Found by reading the test's source, so approximate."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "torch.distributed.fsdp._fully_shard"
HELPERS = "torch.testing._internal.common_fsdp"
# What torch.distributed.fsdp exports of FSDP2.
PUBLIC = {
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
}
PRIVATE_ATTRIBUTES = re.compile(
    r"_get_fsdp_state|_fsdp_(?!extension)\w+|_state_ctx|_comm_ctx|_lazy_init|_training_state|_sharded_state"
    r"|_all_gather_result|_sharded_param_data|_unsharded_param|_module_fqn|_param_fqn|_module_info"
    r"|_modules_to_run_forward|_states_to_(?:forward|backward)_prefetch|fsdp_params?|all_states"
)


@dataclass
class Use:
    """What a test uses of FSDP2: at all, and of what is private."""

    fsdp2: bool = False
    private: set[str] = field(default_factory=set)


class Source:
    """The definitions and imports of a file of tests."""

    def __init__(self, path: Path) -> None:
        self.definitions: dict[str, ast.AST] = {}  # By name, methods by Class.name.
        self.bases: dict[str, list[str]] = {}
        self.private: dict[str, str] = {}  # Imported name: where it is from.
        self.helpers: set[str] = set()
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self.add_import(node.module, node.names)
            elif isinstance(node, ast.Import):
                modules = (a for a in node.names if a.asname and a.name.startswith(PACKAGE))
                self.private.update((a.asname or a.name, a.name) for a in modules)
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                self.definitions[statement.name] = statement
            if isinstance(statement, ast.ClassDef):
                self.bases[statement.name] = [b.id for b in statement.bases if isinstance(b, ast.Name)]
                methods = (m for m in statement.body if isinstance(m, ast.FunctionDef))
                self.definitions.update((f"{statement.name}.{m.name}", m) for m in methods)

    def add_import(self, module: str, aliases: Iterable[ast.alias]) -> None:
        """Notes what comes from FSDP2's package or from the helpers of its tests."""
        inside = module == PACKAGE or module.startswith(PACKAGE + ".")
        for alias in aliases:
            name = alias.asname or alias.name
            if inside and alias.name not in PUBLIC:
                self.private[name] = f"{module.removeprefix(PACKAGE).lstrip('.')}.{alias.name}".lstrip(".")
            elif module == HELPERS:
                self.helpers.add(name)

    def method(self, owner: str, name: str) -> str | None:
        """Where the class or its bases define a method."""
        if f"{owner}.{name}" in self.definitions:
            return f"{owner}.{name}"
        return next((found for base in self.bases.get(owner, ()) if (found := self.method(base, name))), None)

    def reach(self, owner: str, names: Iterable[str]) -> Iterator[ast.AST]:
        """The nodes of the named definitions, and of those that they lead to in this file."""
        todo, seen = list(names), set()
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            for node in ast.walk(self.definitions[name]):
                yield node
                if isinstance(node, ast.Name) and node.id in self.definitions:
                    todo.append(node.id)
                elif isinstance(node, ast.Attribute) and (found := self.method(owner, node.attr)):
                    todo.append(found)


source_of = functools.cache(Source)


@functools.cache
def helpers() -> Source:
    """torch's own helpers of these tests."""
    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.submodule_search_locations
    return source_of(Path(spec.submodule_search_locations[0]) / "testing/_internal/common_fsdp.py")


def names_in(node: ast.AST) -> list[str]:
    """The names that a node refers to by itself."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return [a.name for a in node.names] if isinstance(node, ast.ImportFrom) else []


def private_things(source: Source, node: ast.AST) -> Iterator[str]:
    """What a node alone uses of FSDP2's inside."""
    if isinstance(node, ast.Name) and node.id in source.private:
        yield source.private[node.id]
    elif isinstance(node, ast.Attribute):
        if PRIVATE_ATTRIBUTES.fullmatch(node.attr):
            yield "." + node.attr
        elif ast.unparse(node) == "fully_shard.state":
            yield "fully_shard.state"
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
        yield from (a.name for a in node.names if a.name not in PUBLIC)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if re.search(r"_fully_shard[./]_", node.value):
            yield "a path inside of _fully_shard, as text"
        if re.search(r"import fully_shard\b", node.value):
            yield "a program of its own, as text"


def use_by(source: Source, nodes: Iterable[ast.AST]) -> Use:
    """What the nodes use, helpers of torch included."""
    use = Use()
    for node in nodes:
        use.private.update(private_things(source, node))
        for name in names_in(node):
            use.fsdp2 = use.fsdp2 or name in PUBLIC
            if name in source.helpers and name in helpers().definitions:
                more = use_by(helpers(), helpers().reach("", [name]))
                use.fsdp2 = use.fsdp2 or more.fsdp2
                use.private |= more.private
    use.fsdp2 = use.fsdp2 or bool(use.private)
    return use


def use_of(path: Path, owner: str, method: str) -> Use:
    """What the test `method` of the class `owner` uses."""
    source = source_of(path)
    if not source.method(owner, method):
        # The test is generated: test_x_parameter is made from test_x.
        defined = {name.rpartition(".")[2] for name in source.definitions}
        method = max((n for n in defined if n.startswith("test") and method.startswith(n)), key=len, default=method)
    start = (source.method(owner, name) for name in (method, "setUp", "perThreadSetUp", "_run"))
    return use_by(source, source.reach(owner, filter(None, start)))
