"""What a random program is: plain data that prints as it is read, and that can be made smaller."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Node:
    """A module that maps [rows, width] to the same shape.

    Args:
        name: also the attribute under which its owners register it.
        kind: what it computes; see model.py. "owner": what it calls.
        children: the modules that it registers. One that an earlier node has registered, too, is shared.
        borrowed: modules that it calls without registering them.
        calls: the modules of both kinds that it calls, in order.
        weight_of: of kind "tied" and "reader": the module whose weight it has, or reads.
        checkpoint: how each call recomputes in backward: "", "reentrant" or "plain".
        late: of kind "tied": its weight becomes the other module's after sharding, by ``tie_weights()``.
        frozen: its parameters are not trained.
        dtype: of its parameters, in which it computes.
    """

    name: str
    kind: str
    children: tuple[str, ...] = ()
    borrowed: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    weight_of: str = ""
    checkpoint: str = ""
    late: bool = False
    frozen: bool = False
    dtype: str = "float32"


@dataclass(frozen=True)
class Op:
    """A step of a life: a method of Sharded and of Replica, and its arguments."""

    what: str
    arguments: dict[str, Any] = field(default_factory=dict)
    model: int = 0

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{f'models[{self.model}].' if self.model else ''}{self.what}({arguments})"


@dataclass(frozen=True)
class Unit:
    """A call of fully_shard: of a module or a group, with what is its own."""

    nodes: tuple[str, ...]
    reshard_after_forward: bool | int | None = None


@dataclass(frozen=True)
class Options:
    """What all calls of fully_shard have alike; named after its arguments. The defaults are the library's."""

    front: str = "fsdp2"  # Or "megatron".
    mesh: str = "flat"  # Or "hsdp": two replicas.
    placements: str = "optim_grads_params"
    outer_placements: str = "no_shard"
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    main_params_dtype: str | None = None
    main_grads_dtype: str | None = None
    offload: bool = False
    shard_dim: int = 0
    keep_gathered_bytes: int = 0
    memory_budget: int = 0
    megatron: tuple[tuple[str, Any], ...] = ()  # Further arguments of fully_shard_model.


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: "torch.SGD", "libfsdp.AdamW", "fuse.Adam", ... with its arguments; and whether it has two groups."""

    kind: str = "torch.SGD"
    arguments: tuple[tuple[str, Any], ...] = (("lr", 0.05),)
    groups: bool = False
    scaler: bool = False


@dataclass(frozen=True)
class Program:
    """All that determines a run."""

    seed: int
    world: int
    width: int
    rows: int
    nodes: tuple[Node, ...]  # Children before their owners; the last one is the root.
    units: tuple[Unit, ...]  # In the order of the calls.
    options: Options
    optimizer: Optimizer
    operations: tuple[Op, ...]
    models: int = 1
    autocast: bool = False  # All forwards run within torch.autocast.

    @property
    def root(self) -> str:
        """The root's name."""
        return self.nodes[-1].name


def brief(value: Any) -> str:
    """A dataclass without what has its default."""
    defaults = type(value)(
        **{f.name: getattr(value, f.name) for f in fields(value) if f.name in ("name", "kind", "nodes", "what")}
    )
    own = [
        f"{f.name}={getattr(value, f.name)!r}"
        for f in fields(value)
        if getattr(value, f.name) != getattr(defaults, f.name)
    ]
    first = [repr(getattr(value, f.name)) for f in fields(value) if f.name in ("name", "kind")]
    return f"{type(value).__name__}({', '.join([*first, *(o for o in own if not o.startswith(('name=', 'kind=')))])})"


def readable(program: Program) -> str:
    """For a person who looks for the fault."""
    lines = [f"{program.world} ranks, batches of {program.rows} x {program.width}, seed {program.seed}"]
    if program.models > 1:
        lines[0] += f", {program.models} models of this kind"
    if program.autocast:
        lines[0] += ", forwards in torch.autocast"
    lines += [f"  {brief(node)}" for node in program.nodes]
    front = program.options.front
    for unit in program.units:
        own = "" if unit.reshard_after_forward is None else f", reshard_after_forward={unit.reshard_after_forward}"
        what = unit.nodes[0] if len(unit.nodes) == 1 else f"[{', '.join(unit.nodes)}]"
        lines.append(f"  {'fully_shard' if front == 'fsdp2' else 'unit'}({what}{own})")
    lines.append(f"  {brief(program.options)}")
    lines.append(f"  {brief(program.optimizer)}, {program.optimizer.kind}")
    lines += [f"  {number:2d} {op}" for number, op in enumerate(program.operations)]
    return "\n".join(lines)
