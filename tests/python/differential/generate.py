"""Random programs. No program does what FSDP2's documentation calls wrong: a step between a graph's forward and its backward, say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from differential.features import Chance
from differential.life import life_of
from differential.program import Node, Optimizer, Options, Program, Unit

LEAVES = ("linear", "linear", "mlp", "norm", "statistics", "odd", "custom", "plain")


def generate(seed: int, likelihood: dict[str, float]) -> Program:
    """The program of a seed."""
    chance = Chance(seed, likelihood)
    world = chance.of((1, 3, 4, 4)) if chance.has("ranks") else 2
    nodes = random_nodes(chance)
    options = random_options(chance, world, nodes)
    if options.mesh == "hsdp" and world != 4:  # The tests' meshes for Megatron-FSDP have two inner ranks.
        world = 4 if world == 3 or options.front == "megatron" else 2
    between = (2,) if world == 4 and options == Options() else ()  # reshard_after_forward as a number.
    # Megatron-FSDP has no groups, so its modules read no other unit's weights.
    nodes, units = random_units(chance, nodes, (True, False, *between), has_readers=options.front == "fsdp2")
    width = chance.of((8, 12)) if options.shard_dim or options.outer_placements != "no_shard" else chance.of((5, 6, 8))
    program = Program(
        seed=seed,
        world=world,
        width=width,
        rows=3,
        nodes=nodes,
        units=units,
        options=options,
        optimizer=random_optimizer(chance, options, world),
        operations=(),
        models=2 if chance.has("two_models") else 1,
        autocast=chance.has("autocast"),
    )
    return replace(program, operations=life_of(program, chance))


def random_nodes(chance: Chance) -> tuple[Node, ...]:
    """Leaves, owners of them, a root."""
    made: list[Node] = []
    free: list[str] = []  # Not owned yet.

    def leaf(kind: str = "") -> str:
        kind = kind or chance.of(LEAVES)
        weight_of = ""
        if chance.has("tied"):
            others = [n.name for n in made if n.kind in ("linear", "custom", "plain")]
            if others:
                kind, weight_of = "tied", chance.of(others)
        plain = all(n.dtype == "float32" for n in made if n.name == weight_of)
        node = Node(
            f"{kind}{len(made)}",
            kind,
            weight_of=weight_of,
            checkpoint=chance.of(("reentrant", "plain")) if chance.has("checkpointing") else "",
            late=kind == "tied" and plain and chance.has("late_ties"),
            frozen=kind != "tied" and chance.has("frozen"),
            dtype="bfloat16" if chance.has("mixed_dtypes") and kind not in ("tied", "statistics") else "float32",
        )
        made.append(node)
        free.append(node.name)
        return node.name

    for _ in range(chance.of((1, 2, 2, 3))):
        children = [leaf() for _ in range(chance.of((1, 2, 3)))]
        if chance.chance(0.3) or not chance.chance(0.7):
            continue
        borrowed = []
        others = [n.name for n in made if n.name not in children and n.kind != "reader"]
        if others and chance.has("shared"):
            children.append(chance.of(others))
        others = [n.name for n in made if n.name not in children]
        if others and chance.has("sideways"):
            borrowed.append(chance.of(others))
        calls = chance.random.sample([*children, *borrowed], len(children) + len(borrowed))
        if chance.chance(0.2):
            calls.append(chance.of(calls))
        owner = Node(
            f"owner{len(made)}",
            "owner",
            tuple(children),
            tuple(borrowed),
            tuple(calls),
            checkpoint=chance.of(("reentrant", "plain")) if chance.has("checkpointing") else "",
        )
        for child in children:
            if child in free:
                free.remove(child)
        made.append(owner)
        free.append(owner.name)
    children = list(free)
    if not any(n.kind in ("linear", "mlp", "custom", "plain") and not n.frozen for n in made):
        children.append(leaf("linear"))
    calls = chance.random.sample(children, len(children))
    used_elsewhere = [n.name for n in made if n.name not in children]
    if used_elsewhere and chance.has("sideways"):
        other = chance.of(used_elsewhere)
        calls.insert(chance.random.randrange(len(calls) + 1), other)
        made.append(Node("root", "root", tuple(children), (other,), tuple(calls)))
    else:
        made.append(Node("root", "root", tuple(children), (), tuple(calls)))
    return tuple(made)


def random_units(
    chance: Chance, nodes: tuple[Node, ...], reshards: tuple[bool | int, ...], *, has_readers: bool
) -> tuple[tuple[Node, ...], tuple[Unit, ...]]:
    """Some modules, children before their owners; the root last. Groups may get a member that reads the other's weight."""
    tied = {n.name: n.weight_of for n in nodes if n.kind == "tied"}
    bound = {*tied, *tied.values()}  # Modules with one parameter belong to one unit: the root's.
    units: list[Unit] = []
    candidates = [
        n for n in nodes[:-1] if n.kind != "reader" and n.name not in bound and not below(nodes, n.name) & bound
    ]
    taken: set[str] = set()
    crossed = crossing(nodes)

    def reshard() -> bool | int | None:
        return chance.of(reshards) if chance.has("reshard") else None

    for node in candidates:
        if node.name in taken or not (chance.chance(0.6) or node.name in crossed):
            continue
        group = [node.name]
        if node.kind != "owner" and chance.has("groups"):
            others = [
                n.name
                for n in candidates
                if n.kind != "owner" and n.name not in (node.name, *taken) and before_owners(nodes, {node.name, n.name})
            ]
            if others:
                group.append(chance.of(others))
            elif (
                node.kind in ("linear", "custom", "plain")
                and node.dtype == "float32"
                and has_readers
                and chance.has("readers")
            ):
                reader = Node(f"reader{len(nodes)}", "reader", weight_of=node.name)
                nodes = with_child_of_root(chance, nodes, reader, after=node)
                group.append(reader.name)
        taken.update(group)
        units.append(Unit(tuple(group), reshard()))
    units.sort(key=lambda unit: max(next(i for i, n in enumerate(nodes) if n.name == name) for name in unit.nodes))
    return nodes, (*units, Unit((nodes[-1].name,), reshard()))


def crossing(nodes: tuple[Node, ...]) -> set[str]:
    """Modules that others than their one owner call: they are units of their own, or the root's, as FSDP2 needs it."""
    owned = [child for n in nodes for child in n.children]
    return {name for n in nodes for name in n.borrowed} | {name for name in owned if owned.count(name) > 1}


def with_child_of_root(chance: Chance, nodes: tuple[Node, ...], node: Node, after: Node) -> tuple[Node, ...]:
    """The node as one more of what the root owns and calls."""
    root = nodes[-1]
    calls = list(root.calls)
    calls.insert(chance.random.randrange(len(calls) + 1), node.name)
    at = nodes.index(after) + 1
    return (*nodes[:at], node, *nodes[at:-1], replace(root, children=(*root.children, node.name), calls=tuple(calls)))


def before_owners(nodes: tuple[Node, ...], group: set[str]) -> bool:
    """Whether all modules of a group come before all modules that they are below."""
    last = max(i for i, n in enumerate(nodes) if n.name in group)
    return all(i > last for i, n in enumerate(nodes) if below(nodes, n.name) & group)


def below(nodes: tuple[Node, ...], name: str) -> set[str]:
    """Names of all modules registered below one."""
    node = next(n for n in nodes if n.name == name)
    return {one for child in node.children for one in ({child} | below(nodes, child))}


def random_megatron(chance: Chance, nodes: tuple[Node, ...]) -> tuple[tuple[str, Any], ...]:
    """Those of fully_shard_model."""
    has_tied = any(n.kind == "tied" for n in nodes)
    crossed = {n.kind for n in nodes if n.name in crossing(nodes)}
    kinds = sorted({n.kind for n in nodes[:-1]})
    return (
        ("unit_kinds", () if has_tied else tuple(kind for kind in kinds if chance.chance(0.6) or kind in crossed)),
        ("sync_model_each_microbatch", chance.chance(0.4)),
        ("overlap_grad_reduce", chance.chance(0.6)),
        ("overlap_param_gather", chance.chance(0.7)),
    )


def random_options(chance: Chance, world: int, nodes: tuple[Node, ...]) -> Options:
    """Those of fully_shard."""
    options = Options()
    plain = all(n.dtype == "float32" for n in nodes)
    if plain and chance.has("megatron"):
        options = replace(options, front="megatron", megatron=random_megatron(chance, nodes))
    if chance.has("strategies"):
        options = replace(options, placements=chance.of(("optim_grads", "optim", "no_shard")))
    if chance.has("hsdp") and world != 1:
        options = replace(options, mesh="hsdp")
        if options.placements == "optim_grads_params" and chance.has("hfsdp"):
            options = replace(options, outer_placements="optim_if_even")
    if options.front == "megatron":
        return options
    if chance.has("dtypes"):
        options = replace(options, param_dtype="bfloat16", reduce_dtype=chance.of((None, "float32")))
    if chance.has("main_dtypes"):
        options = replace(options, main_params_dtype="float32", main_grads_dtype=chance.of((None, "float32")))
    if chance.has("offload") and options.placements == "optim_grads_params":
        options = replace(options, offload=True)
    if (
        chance.has("shard_dim")
        and options.placements == "optim_grads_params"
        and options.outer_placements == "no_shard"
    ):
        options = replace(options, shard_dim=1)
    if chance.has("keep"):
        options = replace(options, keep_gathered_bytes=chance.of((300, 3000)))
    elif chance.has("budget"):
        options = replace(options, memory_budget=1 << 30)
    return options


LOOP: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.02}),
    ("AdamW", {"lr": 0.02, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.02, "amsgrad": True}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.5}),
    ("Adagrad", {"lr": 0.02}),
    ("Adadelta", {"lr": 1.0}),
    ("Adamax", {"lr": 0.02}),
    ("NAdam", {"lr": 0.02}),
    ("RAdam", {"lr": 0.02}),
    ("ASGD", {"lr": 0.02}),
)
FUSABLE = ("SGD", "Adam", "AdamW")


def random_optimizer(chance: Chance, options: Options, world: int) -> Optimizer:
    """Any of torch's, in each of its ways, and the library's."""
    name, arguments = chance.of(LOOP)
    kind = f"torch.{name}"
    if chance.has("own_optimizers"):
        name, arguments = chance.of([one for one in LOOP if one[0] in FUSABLE])
        kind = f"{chance.of(('libfsdp', 'fuse'))}.{name}"
    elif (
        chance.has("matrix_optimizers") and options.outer_placements == "no_shard"
    ):  # Muon refuses matrices that are cut twice.
        kind, arguments = "libfsdp.Muon", {"lr": 0.02}
        if (options.placements == "no_shard" or world == 1) and chance.chance(
            0.5
        ):  # No two ranks share a block of state.
            kind = "libfsdp.AdamW8bit"
    elif chance.has("foreach"):
        arguments = {**arguments, "foreach": True}
    elif chance.has("fused"):
        name, arguments = chance.of([one for one in LOOP if one[0] in ("Adam", "AdamW")])
        kind, arguments = f"torch.{name}", {**arguments, "fused": True}
    else:
        arguments = {**arguments, "foreach": False}
    return Optimizer(
        kind,
        tuple(arguments.items()),
        groups=chance.has("parameter_groups"),
        # Megatron-FSDP's ranks without rows have no gradients, which a scaler must see. On two ranks each has rows of something. Of Muon's
        # gradients a scaler unscales some, and a norm is of all.
        scaler=not options.offload
        and (options.front != "megatron" or world <= 2)
        and kind != "libfsdp.Muon"
        and chance.has("scaler"),
    )
