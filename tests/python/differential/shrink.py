"""Makes a failing program smaller, while it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, replace

from differential.program import Node, Optimizer, Options, Program, Unit
from differential.rules import legal
from differential.runner import Failure, Runner


def shrink(program: Program, failure: Failure, runner: Runner, seconds: float = 90.0) -> tuple[Program, Failure]:
    """The smallest one that was found in this time."""
    deadline = time.monotonic() + seconds
    program = replace(program, operations=program.operations[: failure.operation + 1])
    progress = True
    while progress:
        progress = False
        for category in (of_models, of_operations, of_options, of_units, of_nodes, of_details):
            tried: set[str] = set()
            found: Program | None = program
            while found is not None:
                found = None
                for smaller in category(program):
                    if time.monotonic() > deadline:
                        return program, failure
                    if repr(smaller) in tried:
                        continue
                    tried.add(repr(smaller))
                    outcome = runner.run(smaller)
                    if outcome is not None and outcome.kind == failure.kind:
                        program, failure, found, progress = smaller, outcome, smaller, True
                        break
    return program, failure


def of_models(program: Program) -> Iterator[Program]:
    """One model instead of two."""
    if program.models > 1:
        for model in range(program.models):
            mine = tuple(replace(op, model=0) for op in program.operations if op.model == model)
            yield from those_legal(replace(program, models=1, operations=mine))


def of_operations(program: Program) -> Iterator[Program]:
    """Many operations less, then single ones, then a forward with its backward."""
    count = len(program.operations)
    size = max(1, count // 2)
    while size >= 1:
        for begin in range(0, count, size):
            rest = program.operations[:begin] + program.operations[begin + size :]
            yield from those_legal(replace(program, operations=rest))
        size //= 2
    for begin in range(count):
        op = program.operations[begin]
        if op.what == "forward":
            graph = op.arguments["graph"]
            later = [i for i in range(begin, count) if program.operations[i].arguments.get("graph") == graph][:2]
            rest = tuple(one for i, one in enumerate(program.operations) if i not in later)
            yield from those_legal(replace(program, operations=rest))


def of_options(program: Program) -> Iterator[Program]:
    """The defaults, and two ranks."""
    for field in fields(Options):
        default = getattr(Options(), field.name)
        if getattr(program.options, field.name) != default:
            yield replace(program, options=replace(program.options, **{field.name: default}))
    if program.optimizer != Optimizer():
        yield replace(program, optimizer=Optimizer())
        if program.optimizer.groups or program.optimizer.scaler:
            yield replace(program, optimizer=replace(program.optimizer, groups=False, scaler=False))
    if program.world > 2:
        yield replace(program, world=2)


def of_units(program: Program) -> Iterator[Program]:
    """Fewer calls of fully_shard."""
    for unit in program.units[:-1]:
        yield replace(program, units=tuple(one for one in program.units if one != unit))
        for name in unit.nodes if len(unit.nodes) > 1 else ():
            alone = Unit((name,), unit.reshard_after_forward)
            yield replace(program, units=tuple(alone if one == unit else one for one in program.units))


def of_nodes(program: Program) -> Iterator[Program]:
    """Fewer modules, and fewer calls of them."""
    for node in program.nodes[:-1]:
        yield from without(program, node)
    for node in program.nodes:
        for i in range(len(node.calls)):
            if len(node.calls) > 1:
                yield with_node(program, replace(node, calls=node.calls[:i] + node.calls[i + 1 :]))


def of_details(program: Program) -> Iterator[Program]:
    """What modules and units are by default."""
    for unit in program.units:
        if unit.reshard_after_forward is not None:
            plain_unit = replace(unit, reshard_after_forward=None)
            yield replace(program, units=tuple(plain_unit if one == unit else one for one in program.units))
    for node in program.nodes:
        plain = replace(node, checkpoint="", frozen=False, dtype="float32")
        if plain != node:
            yield with_node(program, plain)
        if node.kind not in ("owner", "root", "tied", "reader", "linear", "plain"):
            yield with_node(program, replace(node, kind="plain"))


def those_legal(program: Program) -> Iterator[Program]:
    """The program, if it is one that a user may write."""
    if legal(program):
        yield program


def with_node(program: Program, node: Node) -> Program:
    return replace(program, nodes=tuple(node if one.name == node.name else one for one in program.nodes))


def without(program: Program, gone: Node) -> Iterator[Program]:
    """The program without a module, or with its children in its place."""
    if any(n.weight_of == gone.name for n in program.nodes):
        return
    nodes = []
    for node in program.nodes:
        if node.name == gone.name:
            continue

        def kept(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in names if name != gone.name)

        nodes.append(replace(node, children=kept(node.children), borrowed=kept(node.borrowed), calls=kept(node.calls)))
    owned = {child for node in nodes for child in node.children}
    if {n.name for n in nodes[:-1]} - owned:
        orphans = tuple(n.name for n in nodes[:-1] if n.name not in owned)
        root = nodes[-1]
        nodes[-1] = replace(root, children=root.children + orphans, calls=root.calls + orphans)
    units = []
    for unit in program.units:
        left = tuple(name for name in unit.nodes if name != gone.name)
        if left:
            units.append(replace(unit, nodes=left))
    names = {node.name for node in nodes}

    def kept_parameters(arguments: dict[str, object]) -> dict[str, object]:
        listed = arguments.get("names")
        if not isinstance(listed, list):
            return arguments
        return {**arguments, "names": [one for one in listed if gone.name not in one.split(".")]}

    operations = tuple(
        replace(op, arguments=kept_parameters(op.arguments))
        for op in program.operations
        if op.arguments.get("node", program.root) in names
    )
    yield from those_legal(replace(program, nodes=tuple(nodes), units=tuple(units), operations=operations))
