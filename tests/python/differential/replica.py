"""The oracle: a random program as plain replicas of each rank's data, in one process that knows nothing of sharding.

Each rank's slices of the parameters are stepped by an optimizer of their own, since ATen rounds the last elements of a tensor differently.
Where an operation's arithmetic has an order of its own (clipping, a narrower wire), the result is checked within a bound and then taken
over, so that errors do not add up. The results of optimizers of whole matrices are taken over as they are.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from support.training import REDUCES_IN_OWN_DTYPE
from torch import Tensor, nn

from differential import optimizers
from differential.mismatch import Mismatch, same
from differential.model import Built, Fuse, PlannedFailure, batch_of, loss_of
from differential.program import Program
from differential.sharded import copied, unpacked

Leaves = dict[str, nn.Parameter]


@dataclass
class Graph:
    """A forward of all ranks."""

    losses: list[Tensor]
    leaves: list[Leaves]


def sum_in_pairs(terms: list[Tensor]) -> Tensor:
    """In the order of the ranks, as the engine adds them up."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)] + ([terms[-1]] if len(terms) % 2 else [])
    return terms[0]


class Replica:
    """One model of a program, for all ranks."""

    other_order = False  # Whether ranks are added up in an order of their own, as by FSDP2.
    shows_gradients = True  # Whether users see them, as they are here.
    empty_without_gradient = False  # Whether a rank that has nothing of a parameter may have no gradient of it.

    def __init__(self, program: Program, number: int, setup: list[dict[str, Any]]) -> None:
        self.program, self.number, self.cuts = program, number, setup
        options = program.options
        self.world = program.world
        built = [Built(program, number) for _ in range(program.world)]
        for one in built:
            one.tie_weights()
        self.parts = [one.parts for one in built]
        self.models: list[nn.Module] = [one.root for one in built]
        whole = dict(self.models[0].named_parameters())
        self.names = list(whole)
        self.places = [
            [
                (module, attribute, name)
                for name, p in dict(model.named_parameters()).items()
                for module in model.modules()
                for attribute, other in module._parameters.items()
                if other is p
            ]
            for model in self.models
        ]
        self.shapes = {name: p.shape for name, p in whole.items()}
        self.trained = {name: p.requires_grad for name, p in whole.items()}
        main = getattr(torch, options.main_params_dtype or "", None)
        self.own = {name: p.dtype for name, p in whole.items()}
        self.main = {name: main if main and self.trained[name] else p.dtype for name, p in whole.items()}
        compute = getattr(torch, options.param_dtype or "", None)
        self.compute = {name: compute or p.dtype for name, p in whole.items()}
        wire, grads = (getattr(torch, name or "", None) for name in (options.reduce_dtype, options.main_grads_dtype))
        self.gradient = {name: grads or self.main[name] for name in whole}
        self.wire = {
            n: wire or grads or (self.own if REDUCES_IN_OWN_DTYPE and not main else self.compute)[n] for n in whole
        }
        self.rounds = grads is None  # Sums to the dtype that has travelled.
        self.values = [
            {
                name: optimizers.as_leaf(optimizers.slices(p.to(self.main[name]), cut[name])).requires_grad_(
                    self.trained[name]
                )
                for name, p in whole.items()
            }
            for cut in setup
        ]
        self.check_cuts()
        self.make_optimizers()
        self.student: Replica | None = None
        self.graphs: dict[str, Graph] = {}
        self.saved: dict[str, Any] = {}
        self.unreduced: list[dict[str, Tensor]] = [{} for _ in range(self.world)]
        self.synchronizes = True
        self.backwards = 0  # Whose gradients are not reduced.
        # Several uses, or repetitions by checkpointing, come one by one: a unit whose last gradient is late is reduced twice, and what
        # backwards without synchronization have left goes with the first.
        calls = [name for node in program.nodes for name in node.calls]
        used_again = len(set(calls)) < len(calls) or any(node.weight_of for node in program.nodes)
        delays = any(op.arguments.get("method") == "set_requires_gradient_sync" for op in program.operations)
        delays = delays or ("sync_model_each_microbatch", False) in program.options.megatron
        self.in_steps = used_again + delays + any(node.checkpoint for node in program.nodes) >= 2
        self.takes_over = False  # This operation's parameters are the ranks'.
        self.update_bounds: dict[str, Tensor] = {}  # Of those that are checked before that.
        self.within_bounds: set[str] = set()  # Their optimizer's state has gradients that nobody has seen.
        self.magnitudes: dict[str, Tensor] = {}
        self.gradient_bounds: dict[str, Tensor] = {}
        if compute:
            for parts in self.parts:
                for unit in program.units:
                    for name in unit.nodes:
                        parts[name].register_forward_pre_hook(
                            lambda _, args: tuple(x.to(compute) if x.is_floating_point() else x for x in args)
                        )

    def check_cuts(self) -> None:
        """The ranks' parts cover each parameter."""
        for name, shape in self.shapes.items():
            covered = torch.zeros(shape)
            for cut in self.cuts:
                optimizers.slices(covered, cut[name]).fill_(1)
            if not bool(covered.bool().all()):
                raise Mismatch(f"the ranks' parts of {name} {list(shape)} are {[cut[name] for cut in self.cuts]}")

    def make_optimizers(self) -> None:
        plan = self.program.optimizer
        ndims = {name: len(shape) for name, shape in self.shapes.items()}
        self.optimizers = [
            optimizers.make(plan, optimizers.chosen(plan, dict(values), ndims), replica=True) for values in self.values
        ]
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in self.optimizers]

    # Comparing.

    @property
    def in_float32(self) -> bool:
        """All is computed, added up and sent in float32."""
        return all(self.wire[name] == self.compute[name] == self.gradient[name] == torch.float32 for name in self.names)

    @property
    def bounded(self) -> bool:
        """Gradients may have been added up in another order than here, so they are compared within rounding."""
        return self.in_steps or (self.other_order and not (self.in_float32 and self.world <= 2))

    def whole(self, name: str) -> Tensor:
        """A parameter of all slices."""
        whole = torch.empty(self.shapes[name], dtype=self.main[name])
        for values, cut in zip(self.values, self.cuts, strict=True):
            optimizers.slices(whole, cut[name]).copy_(values[name].detach())
        return whole

    def whole_gradient(self, name: str) -> Tensor:
        """The same of its gradient, zero where there is none."""
        gradient = torch.zeros(self.shapes[name], dtype=torch.float64)
        for values, cut in zip(self.values, self.cuts, strict=True):
            if (mine := values[name].grad) is not None:
                optimizers.slices(gradient, cut[name]).copy_(mine)
        return gradient

    def compare(self, rank: int, record: Any) -> None:
        """What a rank has seen of parameters and gradients, where they have changed for it or here."""
        _, values, gradients = record
        for name in self.names:
            expected, got = self.values[rank][name].detach(), values.get(name)
            if got is not None:
                self.seen[rank][name] = unpacked(got)
                if name in self.update_bounds:
                    bound = optimizers.slices(self.update_bounds[name], self.cuts[rank][name])
                    same(f"parameter {name}", self.seen[rank][name], expected, bound)
                if self.takes_over or name in self.update_bounds:
                    with torch.no_grad():
                        self.values[rank][name].copy_(self.seen[rank][name])
            same(f"parameter {name}", self.seen[rank][name], expected, None)
            gradient = self.values[rank][name].grad
            if name in gradients:
                self.seen_gradients[rank][name] = None if gradients[name] is None else unpacked(gradients[name])
            if not self.shows_gradients:
                continue
            found = self.seen_gradients[rank][name]
            if found is None and gradient is not None and gradient.numel() == 0 and self.empty_without_gradient:
                continue
            if (found is None) != (gradient is None):
                raise Mismatch(
                    f"gradient of {name}: {'none' if found is None else 'some'} where there should be otherwise"
                )
            if found is not None and gradient is not None:
                bound = self.gradient_bounds.get(name)
                of_shard = None if bound is None else optimizers.slices(bound, self.cuts[rank][name])
                same(f"gradient of {name}", found, gradient, of_shard)
                if bound is not None:
                    self.values[rank][name].grad = found.clone()

    def begin(self, first: list[Any]) -> None:
        """What ranks have seen before the first operation."""
        self.seen: list[dict[str, Tensor]] = [{} for _ in range(self.world)]
        self.seen_gradients: list[dict[str, Tensor | None]] = [dict.fromkeys(self.names) for _ in range(self.world)]
        self.compare_all(first)

    def compare_all(self, records: list[Any]) -> None:
        """After each operation."""
        for rank, record in enumerate(records):
            try:
                self.compare(rank, record)
            except Mismatch as mismatch:
                raise Mismatch(f"rank {rank}: {mismatch}") from None
        if self.shows_gradients:
            self.gradient_bounds = {}
        self.takes_over = False
        self.update_bounds = {}

    # Operations: what each returns by rank is compared with what the ranks have returned.

    def leaves(self) -> list[Leaves]:
        """A set of compute parameters for each rank."""
        made = []
        for _ in range(self.world):
            of_rank = {}
            for name in self.names:
                leaf = nn.Parameter(
                    self.whole(name).to(self.own[name]).to(self.compute[name]), requires_grad=self.trained[name]
                )
                of_rank[name] = leaf
            made.append(of_rank)
        return made

    def install(self, rank: int, leaves: Leaves) -> None:
        for module, attribute, name in self.places[rank]:
            module._parameters[attribute] = leaves[name]

    def losses(self, batch: int, leaves: list[Leaves]) -> list[Tensor]:
        made = []
        for rank in range(self.world):
            self.install(rank, leaves[rank])
            made.append(loss_of(self.program, self.models[rank], batch_of(self.program, batch, rank, self.number)))
        return made

    def forward(self, results: list[Any], graph: str, batch: int) -> list[float]:
        leaves = self.leaves()
        for rank in range(self.world):
            self.collect_from(rank, leaves[rank])
        self.graphs[graph] = Graph(self.losses(batch, leaves), leaves)
        return [loss.item() for loss in self.graphs[graph].losses]

    def backward(self, results: list[Any], graph: str, retain: bool = False) -> None:
        made = self.graphs[graph] if retain else self.graphs.pop(graph)
        self.backwards += 1
        for rank, (loss, leaves) in enumerate(zip(made.losses, made.leaves, strict=True)):
            self.install(rank, leaves)
            if loss.requires_grad:
                (loss * 256.0 if self.program.optimizer.scaler else loss).backward(retain_graph=retain)
        if self.synchronizes:
            self.reduce()

    def checked(self, results: list[Any], batch: int) -> list[float]:
        losses = self.forward(results, "checked", batch)
        self.backward(results, "checked")
        return losses

    def collect_from(self, rank: int, leaves: Leaves) -> None:
        """What a backward gives is collected as it comes, as the engine does."""

        def collect(name: str, leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            mine = self.unreduced[rank]
            if name in mine:
                mine[name].add_(gradient)
            else:
                dtype = self.wire[name] if self.synchronizes and self.backwards == 1 else self.gradient[name]
                mine[name] = gradient.to(dtype, copy=True)
            magnitude = gradient.double().abs()
            self.magnitudes[name] = self.magnitudes[name] + magnitude if name in self.magnitudes else magnitude

        for name, leaf in leaves.items():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: collect(name, leaf))

    def reduce(self) -> None:
        """Gradients of all ranks, added to those that parameters have."""
        row = self.world // 2 if self.program.options.mesh == "hsdp" else self.world
        for name in self.names:
            if not any(name in mine for mine in self.unreduced):
                continue
            wire, dtype = self.wire[name], self.gradient[name]
            zero = torch.zeros(self.shapes[name])
            terms = [mine[name].to(wire).float() if name in mine else zero for mine in self.unreduced]
            rows = [sum_in_pairs(terms[i : i + row]) * (1.0 / self.world) for i in range(0, self.world, row)]
            if len(rows) > 1:  # What a row has added up travels once more.
                rows = [one.to(dtype).to(wire).float() for one in rows]
            total = sum_in_pairs(rows).to(dtype)
            if self.rounds:
                total = total.to(wire).to(dtype)
            if self.bounded:
                eps = max(torch.finfo(one).eps for one in (wire, dtype, self.compute[name]))
                bound = self.magnitudes[name] / self.world * eps * (self.world + 3) + 1e-30
                self.gradient_bounds[name] = self.gradient_bounds.get(name, 0.0) + bound
            for values, cut in zip(self.values, self.cuts, strict=True):
                mine = optimizers.slices(total, cut[name]).clone()
                before = values[name].grad
                if before is not None and name in self.gradient_bounds:
                    self.gradient_bounds[name] = (
                        self.gradient_bounds[name] + total.abs().double() * torch.finfo(dtype).eps * 4
                    )
                values[name].grad = mine if before is None else before + mine
        self.drop_unreduced()

    def drop_unreduced(self) -> None:
        self.unreduced = [{} for _ in range(self.world)]
        self.magnitudes = {}
        self.backwards = 0

    def evaluate(self, results: list[Any], mode: str, batch: int, training: bool) -> list[float]:
        for model in self.models:
            model.train(training)
        with {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]():
            losses = [loss.item() for loss in self.losses(batch, self.leaves())]
        for model in self.models:
            model.train()
        return losses

    def fail(self, results: list[Any], node: str, in_backward: bool, batch: int) -> list[str]:
        """The same failure on all ranks. What the pass has collected is dropped."""
        outcomes = []
        leaves = self.leaves()
        self.backwards += 1
        Fuse.arm(node, in_backward=in_backward)
        try:
            for rank in range(self.world):
                outcomes.append("failed in forward")
                try:
                    self.install(rank, leaves[rank])
                    self.collect_from(rank, leaves[rank])
                    loss = loss_of(self.program, self.models[rank], batch_of(self.program, batch, rank, self.number))
                    outcomes[-1] = "failed in backward"
                    if loss.requires_grad:
                        (loss * 256.0 if self.program.optimizer.scaler else loss).backward()
                    outcomes[-1] = "completed"
                except PlannedFailure:
                    pass
        finally:
            Fuse.arm(None)
        self.reduce() if "completed" in outcomes else self.drop_unreduced()
        return outcomes

    def call(self, results: list[Any], node: str, method: str, arguments: dict[str, Any]) -> None:
        if method == "set_requires_gradient_sync":
            self.synchronizes = arguments["requires_gradient_sync"]

    def prefetch_in_forward(self, results: list[Any], node: str, others: list[str]) -> None:
        """Nothing changes."""

    prefetch_in_backward = prefetch_in_forward

    def clip(self, results: list[Any], limit: float, library: bool) -> list[float]:
        """The norm within rounding; gradients are then those that the ranks have made with it."""
        if self.program.optimizer.scaler:
            self.scale_gradients()
        whole = {name: self.whole_gradient(name) for name in self.shapes}
        norm = float(sum(g.square().sum() for g in whole.values())) ** 0.5
        low = 1e-5 if all(g == torch.float32 for g in self.gradient.values()) else 2e-2
        for result in results:
            if not abs(result - norm) <= low * norm:
                raise Mismatch(f"norm {result}, not {norm}")
        for name, gradient in whole.items():
            scaled = gradient * min(1.0, limit / (norm + 1e-6))
            self.gradient_bounds[name] = scaled.abs() * low + 1e-30
            for values, cut in zip(self.values, self.cuts, strict=True):
                if values[name].grad is not None:
                    values[name].grad = optimizers.slices(scaled, cut[name]).to(self.gradient[name])
        return results

    def scale_gradients(self) -> None:
        for values in self.values:
            for p in values.values():
                if p.grad is not None:
                    p.grad.mul_(1 / 256.0)
        self.unscaled = True

    def step(self, results: list[Any]) -> None:
        if self.program.optimizer.scaler and not getattr(self, "unscaled", False):
            self.scale_gradients()
        self.unscaled = False
        self.takes_over = self.program.optimizer.kind.endswith(optimizers.OF_WHOLE_MATRICES)
        if not self.shows_gradients and not self.takes_over:
            self.within_bounds.update(self.gradient_bounds)
        before = {name: (self.whole(name), self.whole_gradient(name).abs()) for name in self.within_bounds}
        for optimizer in self.optimizers:
            optimizer.step()
        for name, (old, gradient) in before.items():
            # Within the gradient's rounding; an element of it that is nearly zero may have another sign, and its update with it.
            new = self.whole(name).double()
            farthest = float((new - old).abs().max()) if new.numel() else 0.0
            near = max(1e-3, 32 * torch.finfo(self.gradient[name]).eps)
            bound = torch.where(gradient <= 4 * self.gradient_bounds.get(name, torch.zeros(())), 2.0, near) * farthest
            self.update_bounds[name] = bound + 4 * torch.finfo(old.dtype).eps * new.abs()

    def zero_grad(self, results: list[Any], set_to_none: bool, of_model: bool = False) -> None:
        for values, optimizer in zip(self.values, self.optimizers, strict=True):
            taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for p in values.values():
                if p.grad is None or not (of_model or id(p) in taken):
                    continue
                p.grad = None if set_to_none else torch.zeros_like(p.grad)

    def advance_schedule(self, results: list[Any]) -> None:
        for schedule in self.schedules:
            schedule.step()

    def train_parameters(self, results: list[Any], names: list[str], trained: bool) -> None:
        for name in names:
            self.trained[name] = trained
            for values in self.values:
                values[name].requires_grad_(trained)

    @torch.no_grad()
    def write(self, results: list[Any], how: str, names: list[str], factor: float) -> None:
        for values in self.values:
            for name in names:
                values[name].mul_(factor)

    @torch.no_grad()
    def average(self, results: list[Any], weight: float) -> None:
        assert self.student is not None
        for mine, theirs in zip(self.values, self.student.values, strict=True):
            for name in self.names:
                mine[name].lerp_(theirs[name], weight)

    def save(self, results: list[Any], slot: str) -> None:
        """A state dict has what there is now."""
        self.saved[slot] = [
            (
                {name: p.detach().clone() for name, p in values.items()},
                copied(optimizer.state_dict()),
                {n: b.clone() for n, b in model.named_buffers()},
            )
            for values, optimizer, model in zip(self.values, self.optimizers, self.models, strict=True)
        ]
        for rank, result in enumerate(results):
            for name in self.names:
                mine = self.values[rank][name].detach()
                same(f"rank {rank}: state_dict()[{name}]", unpacked(result[name]), mine, None)

    @torch.no_grad()
    def load(self, results: list[Any], slot: str, assign: bool, optimizer: bool) -> None:
        for rank, (values, of_optimizer, buffers) in enumerate(self.saved[slot]):
            for name, value in values.items():
                self.values[rank][name].copy_(value)
            for name, buffer in dict(self.models[rank].named_buffers()).items():
                buffer.copy_(buffers[name])
            if assign:
                for p in self.values[rank].values():
                    p.grad = None
            if optimizer:
                self.optimizers[rank].load_state_dict(copied(of_optimizer))

    @torch.no_grad()
    def export(self, results: list[Any], bucket_bytes: int) -> None:
        for rank, result in enumerate(results):
            for name in self.names:
                same(f"rank {rank}: full_weights()[{name}]", unpacked(result[name]), self.whole(name), None)

    @torch.no_grad()
    def checkpoint(self, results: list[Any], library: bool = False) -> None:
        """Parameters do not change. A checkpoint has each plain tensor once, by name: of one rank, and by each of its modules' names."""
        for name, _ in list(self.models[0].named_buffers()):
            mine = [dict(model.named_buffers())[name].clone() for model in self.models]
            for model, result in zip(self.models, results, strict=True):
                found = unpacked(result[name])
                if not any(torch.equal(found, one) for one in mine):
                    raise Mismatch(f"buffer {name} after a checkpoint is {found}, and no rank's of {mine}")
                dict(model.named_buffers())[name].copy_(found)

    def rebuild(self, results: list[Any]) -> None:
        """The same values, and the state as torch loads it: some of it (NAdam's mu_product) in the parameter's dtype. No gradients."""
        self.zero_grad(results, set_to_none=True, of_model=True)
        for optimizer in self.optimizers:
            optimizer.load_state_dict(copied(optimizer.state_dict()))

    def read(self, results: list[Any]) -> None:
        """Shards, or whole parameters, with the values that there are now."""
        for rank, result in enumerate(results):
            for name, value in result.items():
                shown, mine = unpacked(value), self.values[rank][name].detach()
                if (shown.shape, shown.dtype) != (mine.shape, mine.dtype):
                    mine = self.whole(name).to(self.own[name]).to(self.compute[name])
                same(f"rank {rank}: shown {name}", shown, mine, None)

    def forget(self, results: list[Any]) -> None:
        """Users see nothing any more."""
        self.names = []

    def buffers(self, results: list[Any]) -> None:
        for rank, result in enumerate(results):
            for name, buffer in self.models[rank].named_buffers():
                same(f"rank {rank}: buffer {name}", unpacked(result[name]), buffer, None)

    def state(self, results: list[Any]) -> None:
        if self.program.optimizer.kind.endswith(optimizers.OF_WHOLE_MATRICES):
            return
        # Of gradients within bounds, each some eps wide, states are not the same bits: momentum adds those of several steps up.
        eps = max(torch.finfo(dtype).eps for dtype in self.gradient.values()) if self.bounded else 0.0
        for rank, result in enumerate(results):
            expected = optimizers.sums_of_state(self.optimizers[rank], self.values[rank].values())
            both = (torch.tensor(sums, dtype=torch.float64) for sums in (result, expected))
            if len(result) != len(expected) or not torch.allclose(*both, rtol=64 * eps, atol=eps):
                raise Mismatch(f"rank {rank}: sums of the optimizer's state {result}, not {expected}")
