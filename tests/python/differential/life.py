"""Random lives: the operations on a sharded model, in an order that a user may choose."""

from __future__ import annotations

import importlib
from typing import Any

from differential.features import Chance
from differential.model import Built
from differential.program import Op, Program
from differential.rules import QUIET, Rules


class Life:
    """The operations of one model, and what decides which may come next."""

    has_setters = True

    def __init__(self, program: Program, chance: Chance, model: int) -> None:
        self.program, self.chance, self.model = program, chance, model
        self.ops: list[Op] = []
        self.batches = 0
        self.units = [name for unit in program.units for name in unit.nodes]
        self.parameters = self._parameters()
        self.frozen: set[str] = set()
        self.saved: list[str] = []
        self.rules = Rules(program)
        self.repeats = any(node.checkpoint for node in program.nodes)
        self.whole = program.options.placements == "no_shard"

    def _parameters(self) -> list[str]:
        """Names as the first owner gives them, of parameters that are trained."""
        built = Built(self.program, self.model)
        built.tie_weights()
        return [name for name, p in built.root.named_parameters() if p.requires_grad]

    def add(self, what: str, **arguments: Any) -> bool:
        """If it may come now."""
        op = Op(what, arguments, self.model)
        if not self.rules.may(op):
            return False
        self.rules.note(op)
        self.ops.append(op)
        return True

    def batch(self) -> int:
        """A new batch; some are empty on the last rank."""
        self.batches += 1
        return self.batches * 10 + (9 if self.chance.has("empty") else 0)

    def some(self, names: list[str]) -> list[str]:
        """All of them, or a few."""
        if self.chance.chance(0.4):
            return list(names)
        return sorted(self.chance.random.sample(names, max(1, len(names) // 2)))

    # What may come at any moment between passes, also while graphs live.

    def aside(self) -> None:
        chance = self.chance
        if chance.has("evaluation"):
            self.add(
                "evaluate",
                mode=chance.of(("grad", "no_grad", "inference")),
                batch=self.batch(),
                training=chance.chance(0.5),
            )
        if chance.has("setters") and self.has_setters:
            if chance.chance(0.3):
                node, other = chance.of(self.units), chance.of(self.units)
                method = chance.of(("prefetch_in_forward", "prefetch_in_backward"))
                self.add(method, node=node, others=[other])
            else:
                method = "set_reshard_after_forward"
                self.add(
                    "call",
                    node=chance.of(self.units),
                    method=method,
                    arguments={"reshard_after_forward": chance.chance(0.5), "recurse": chance.chance(0.5)},
                )

    # What may come only where no graph lives.

    def between(self) -> None:
        chance = self.chance
        self.aside()
        if chance.has("lone_forwards"):
            self.add("evaluate", mode="grad", batch=self.batch(), training=True)
        if chance.has("unshard") and not self.whole:
            node = chance.of([self.program.root, *self.units])
            self.add("call", node=node, method="unshard", arguments={"async_op": chance.chance(0.3)})
            self.aside()
            if chance.chance(0.5):
                self.add("call", node=node, method="reshard", arguments={})
        if chance.has("reshard_after_backward"):
            keep = chance.chance(0.7)
            self.add(
                "call",
                node=self.program.root,
                method="set_reshard_after_backward",
                arguments={"reshard_after_backward": not keep},
            )
        self.writes()
        if chance.has("reads"):
            self.add("read")
        if chance.has("state_dict"):
            if not self.saved or chance.chance(0.5):
                self.saved.append(f"s{len(self.saved)}")
                self.add("save", slot=self.saved[-1])
            elif not self.frozen:
                assign = self.has_setters and chance.has("assign")  # (Not Megatron-FSDP's.)
                self.add("load", slot=chance.of(self.saved), assign=assign, optimizer=chance.chance(0.5))
        if chance.has("checkpoints"):
            self.add("checkpoint", library=self.has_setters and chance.has("saves"))
        if chance.has("streams"):
            self.add("export", bucket_bytes=chance.of((1, 200, 1 << 20)))
        if chance.has("rebuilding") and not self.frozen and self.ops and self.ops[-1].what != "step":
            self.add("rebuild")

    def writes(self) -> None:
        chance = self.chance
        for feature, ways in (
            ("writes", ("in_place", "copy", "to_local", "shown")),
            ("quiet_writes", QUIET),
            ("shared_memory", ("shared",)),
        ):
            if chance.has(feature):
                names = self.some(self.parameters)
                self.add("write", how=chance.of(ways), names=names, factor=chance.of((0.5, 1.25)))
        if self.model > 0 and chance.has("average"):
            self.add("average", weight=chance.of((0.25, 0.75)))

    def passes(self) -> None:
        """One or several forwards and backwards; the last one is synchronized."""
        chance = self.chance
        count = chance.of((2, 3)) if chance.has("several_backwards") else 1
        at_once = chance.has("several_graphs")
        no_sync = count > 1 and chance.has("no_sync")
        if chance.has("failures") and not no_sync:
            self.add(
                "fail", node=chance.of(self.program.nodes[:-1]).name, in_backward=chance.chance(0.5), batch=self.batch()
            )
        last = chance.has("last_backward")
        names = [f"g{i}" for i in range(count)]
        if at_once:
            for name in names:
                self.add("forward", graph=name, batch=self.batch())
                self.aside()
        for i, name in enumerate(names):
            if no_sync:
                self.sync(i == count - 1)
            if last:
                self.add(
                    "call",
                    node=self.program.root,
                    method="set_is_last_backward",
                    arguments={"is_last_backward": i == count - 1},
                )
            if not at_once and chance.has("checked"):
                self.add("checked", batch=self.batch())
                continue
            if not at_once:
                self.add("forward", graph=name, batch=self.batch())
                self.aside()
            # (What torch's checkpointing keeps of a graph's recomputation is its own affair.)
            if not self.repeats and chance.has("retain_graph"):
                self.add("backward", graph=name, retain=True)
                self.aside()
            self.add("backward", graph=name)
            if i + 1 < count:
                self.aside()

    def sync(self, synchronizes: bool) -> None:
        """Of the next backwards."""
        self.add(
            "call",
            node=self.program.root,
            method="set_requires_gradient_sync",
            arguments={"requires_gradient_sync": synchronizes},
        )

    def update(self) -> None:
        """A training step."""
        chance = self.chance
        self.passes()
        self.between()
        if chance.has("clip"):
            self.add("clip", limit=chance.of((0.1, 100.0)), library=chance.chance(0.5))
        self.add("step")
        if chance.has("schedule"):
            self.add("advance_schedule")
        self.aside()
        if chance.has("zero_grad"):
            self.add(
                "zero_grad",
                set_to_none=chance.chance(0.4),
                of_model=not self.rules.stays_gathered and chance.chance(0.5),
            )
        else:
            self.add("zero_grad", set_to_none=True)
        if self.ops[-1].arguments["set_to_none"]:
            self.freeze()
        self.between()

    def freeze(self) -> None:
        if not self.chance.has("freezing") or self.program.optimizer.kind.endswith("Muon"):
            return
        if self.frozen:
            self.add("train_parameters", names=sorted(self.frozen), trained=True)
            self.frozen = set()
        else:
            names = self.some(self.parameters)[: len(self.parameters) // 2]
            if (
                self.program.optimizer.scaler
            ):  # It has to see a gradient in each step: the root's own parameter has one.
                names = [name for name in names if name != "gain"]
            if names:
                self.add("train_parameters", names=names, trained=False)
                self.frozen = set(names)

    def live(self) -> list[Op]:
        """All operations."""
        self.between()
        for _ in range(self.chance.of((2, 2, 3))):
            self.update()
        self.add("evaluate", mode="no_grad", batch=self.batch(), training=True)
        self.add("buffers")
        self.add("state")
        averaged = self.model == 0 and self.program.models > 1  # Other models may still approach the first one.
        if self.chance.has("collected") and not averaged:
            self.add("forward", graph="last", batch=self.batch())
            self.add("forget")
            self.add("backward", graph="last")
        return self.ops


def life_of(program: Program, chance: Chance) -> tuple[Op, ...]:
    """The operations of all models, mixed."""
    megatron = program.options.front == "megatron"
    life_class = importlib.import_module("differential.megatron").Life if megatron else Life
    lives = [life_class(program, chance, model).live() for model in range(program.models)]
    mixed: list[Op] = []
    while any(lives):
        life = chance.of([one for one in lives if one])
        take = chance.of((1, 2, 5))
        mixed += life[:take]
        del life[:take]
    return tuple(mixed)
