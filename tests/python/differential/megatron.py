"""Megatron-FSDP's front end: its own calls in a life, what they do to a sharded model, and what plain arithmetic makes of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from differential import life, replica, sharded
from differential.model import KINDS, Built
from differential.program import Program

SHARDS_GRADIENTS = ("optim_grads", "optim_grads_params")


def automatic(program: Program) -> bool:
    """Whether each backward reduces its gradients fully."""
    return bool(dict(program.options.megatron)["sync_model_each_microbatch"])


class Life(life.Life):
    """Microbatches that are synchronized in one of the ways that there are."""

    has_setters = False

    def passes(self) -> None:
        chance = self.chance
        count = chance.of((2, 3)) if chance.has("several_backwards") else 1
        self.finished = automatic(self.program)
        if self.finished:
            for i in range(count):
                self.add("forward", graph=f"g{i}", batch=self.batch())
                self.aside()
                self.add("backward", graph=f"g{i}", how="")
            if chance.has("no_sync"):
                self.add("finish_grad_sync")
            return
        way = chance.of(("last", "finish", "start", "step", "no_sync", "started early", "dropped"))
        if way == "dropped":  # A bad batch, whose gradients nobody wants.
            self.add("forward", graph="bad", batch=self.batch())
            self.add("backward", graph="bad", how=chance.of(("", "last")))
            if chance.chance(0.7):
                self.add("start_grad_sync")
            self.add("zero_grad_buffer") if chance.chance(0.5) else self.add("zero_grad", set_to_none=True)
        for i in range(count):
            self.add("forward", graph=f"g{i}", batch=self.batch())
            self.aside()
            last = i == count - 1
            self.add(
                "backward",
                graph=f"g{i}",
                how="no_sync" if way == "no_sync" else "last" if way == "last" and last else "",
            )
            if way == "started early" and not last:
                self.add("start_grad_sync")
        if way in ("start", "started early"):
            self.add("start_grad_sync")
        # A GradScaler looks at gradients before the optimizer's step finishes their synchronization.
        scaled = self.program.optimizer.scaler
        if way in ("finish", "start", "started early", "dropped") or scaled or chance.has("no_sync"):
            self.add("finish_grad_sync")
            self.finished = True

    def between(self) -> None:
        self.aside()
        if self.chance.has("lone_forwards"):
            self.add("evaluate", mode="grad", batch=self.batch(), training=True)
        if self.chance.has("unshard"):
            self.add("start_param_sync", force_sync=self.chance.chance(0.7))
        self.writes()
        if self.chance.has("reads"):
            self.add("read")

    def update(self) -> None:
        chance = self.chance
        self.passes()
        if self.finished and chance.has("clip"):
            # A rank that has nothing of a parameter has no gradient of it, as with Megatron-FSDP. torch's clip then makes other
            # collectives than on other ranks.
            self.add("clip", limit=chance.of((0.1, 100.0)), library=self.program.world > 1 or chance.chance(0.5))
        elif not self.program.optimizer.scaler:  # It would not see gradients that a forward has put back.
            self.between()
        self.add("step")
        if chance.has("reads"):
            self.add("read")
        self.aside()
        self.add("zero_grad", set_to_none=not chance.has("zero_grad"))
        self.between()


class Sharded(sharded.Sharded):
    """A MegatronFSDP and its optimizer."""

    def shard(self, built: Built) -> None:
        from support.megatron import ranks_of

        from libfsdp.megatron import MixedPrecisionPolicy, fully_shard_model

        options = self.program.options
        arguments = dict(options.megatron)
        kinds = [KINDS[kind] for kind in arguments.pop("unit_kinds")]
        kind = "fsdp" if options.mesh == "flat" else "hsdp" if options.outer_placements == "no_shard" else "hfsdp"
        self.model = fully_shard_model(
            built.root,
            fsdp_unit_modules=kinds,
            zero_dp_strategy=options.placements,
            mixed_precision_policy=MixedPrecisionPolicy(),
            **ranks_of(kind),
            **arguments,
        )

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.module.named_parameters())

    def make_optimizer(self) -> None:
        from libfsdp.megatron import fully_shard_optimizer

        super().make_optimizer()
        fully_shard_optimizer(self.optimizer)

    def backward(self, graph: str, retain: bool = False, how: str = "") -> None:
        if automatic(self.program) or not hasattr(self, "model"):
            return super().backward(graph)
        if how == "no_sync":
            with self.model.no_sync():
                return super().backward(graph)
        self.model.is_last_microbatch = how == "last"
        super().backward(graph)
        self.model.is_last_microbatch = False
        return None

    def start_grad_sync(self) -> None:
        self.model.start_grad_sync()

    def finish_grad_sync(self) -> None:
        self.model.finish_grad_sync()

    def zero_grad_buffer(self) -> None:
        self.model.zero_grad_buffer()

    def start_param_sync(self, force_sync: bool) -> list[Any]:
        """What parameters() show then is the optimizer's, whatever is gathered."""
        self.model.start_param_sync(force_sync=force_sync)
        return []

    def buffers(self) -> dict[str, Any]:
        return {name: sharded.packed(value) for name, value in self.model.module.named_buffers()}


class Replica(replica.Replica):
    """Gradients are reduced by each backward, or by the last one, as the strategy says; users see them when all is reduced."""

    loose = False
    empty_without_gradient = True

    @property
    def bounded(self) -> bool:
        """With replicas, several backwards add up within a row first. A synchronization that was started early adds up what came before."""
        return super().bounded or self.loose or (self.program.options.mesh != "flat" and not automatic(self.program))

    def backward(self, results: list[Any], graph: str, retain: bool = False, how: str = "") -> None:
        self.synchronizes = (
            automatic(self.program) or how == "last" or self.program.options.placements in SHARDS_GRADIENTS
        )
        super().backward(results, graph)
        self.shows_gradients = automatic(self.program)

    def start_grad_sync(self, results: list[Any]) -> None:
        self.loose = True
        self.reduce()
        self.shows_gradients = False

    def finish_grad_sync(self, results: list[Any]) -> None:
        self.reduce()
        self.shows_gradients = True

    def zero_grad_buffer(self, results: list[Any]) -> None:
        self.zero_grad(results, set_to_none=True)

    def start_param_sync(self, results: list[Any], force_sync: bool) -> None:
        """Nothing changes."""

    def step(self, results: list[Any]) -> None:
        if not automatic(self.program):
            self.reduce()
        super().step(results)
        self.shows_gradients = True

    def zero_grad(self, results: list[Any], set_to_none: bool, of_model: bool = False) -> None:
        super().zero_grad(results, set_to_none, of_model=True)
        self.drop_unreduced()
        self.loose = False
        self.shows_gradients = True

    def evaluate(self, results: list[Any], mode: str, batch: int, training: bool) -> list[float]:
        if mode == "grad":
            self.shows_gradients = False
        return super().evaluate(results, mode, batch, training)

    def forward(self, results: list[Any], graph: str, batch: int) -> list[float]:
        self.shows_gradients = False
        return super().forward(results, graph, batch)
