"""Training runs of a case, sharded by an implementation of fully_shard and recorded whole, and by plain arithmetic."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from support import device, hugging_face, models
from support.models import Batch, Case

Gradients = dict[str, Tensor | None]
CASES = {**models.CASES, **{f"hf_{name}": case for name, case in hugging_face.CASES.items()}}

# Without a reduce_dtype, FSDP2 reduces gradients in the dtype of their parameter from torch 2.15 on, which has also added this field.
REDUCES_IN_OWN_DTYPE = any(f.name == "param_dtype_override_fn" for f in fields(torch_fsdp.MixedPrecisionPolicy))


@dataclass(frozen=True)
class Options:
    """How a model is sharded and trained. The same options with the same case give the same run."""

    steps: int = 3
    microbatches: int = 1
    sync: str = (
        "each"  # Gradients are reduced after each microbatch; or "last": set_requires_gradient_sync(False) before.
    )
    mark_last: bool = False  # Whether set_is_last_backward is called.
    compute: torch.dtype | None = None  # MixedPrecisionPolicy(param_dtype, reduce_dtype).
    reduce: torch.dtype | None = None
    reshard: bool | int | None = None  # reshard_after_forward.
    replicas: int = 1  # Of the outer dimension of a 2-D mesh (HSDP).
    offload: bool = False
    clip: float | None = None  # clip_grad_norm_'s bound.
    optimizer: str = "adamw"

    @property
    def wire(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return self.reduce or (None if REDUCES_IN_OWN_DTYPE else self.compute) or torch.float32


DEFAULT = Options()


@dataclass
class Step:
    """What there was in a step, whole, on the rank that recorded it."""

    parameters: dict[str, Tensor]  # Before the update.
    losses: list[float] = field(default_factory=list)  # Of this rank, by microbatch.
    gradients: Gradients = field(default_factory=dict)
    norm: float | None = None
    clipped: Gradients = field(default_factory=dict)


@dataclass
class Run:
    """A training run."""

    steps: list[Step]
    parameters: dict[str, Tensor]  # After the last update.
    buffers: dict[str, Tensor]  # Of this rank.


def api(implementation: str) -> Any:
    """The module with fully_shard and its policies."""
    return torch_fsdp if implementation == "fsdp2" else importlib.import_module(implementation)


def installed(implementation: str) -> AbstractContextManager[None]:
    """Within it, programs that import FSDP2's names from torch get those of the implementation."""
    if implementation == "fsdp2":
        return nullcontext()
    of_it: AbstractContextManager[None] = importlib.import_module(implementation).installed()
    return of_it


def seeded(case: Case) -> nn.Module:
    """The case's model, the same wherever it is built."""
    torch.manual_seed(0)
    return case.build().to(device.TYPE)


def batch_of(case: Case, step: int, micro: int, rank: int) -> Batch:
    """A rank's microbatch."""
    batch = case.batch(torch.Generator().manual_seed(1 + step * 10_000 + micro * 100 + rank))
    return tuple(tensor.to(device.TYPE) for tensor in batch)


def make_optimizer(options: Options, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """Updates that are large enough to show every error."""
    if options.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@functools.cache
def mesh_of(replicas: int) -> DeviceMesh:
    """All ranks, as one row or as some of them."""
    size = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device.TYPE, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.TYPE, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, case: Case, implementation: str, options: Options) -> Any:
    """The model with its units sharded."""
    fsdp = api(implementation)
    arguments: dict[str, Any] = {"mesh": mesh_of(options.replicas)}
    if options.compute or options.reduce:
        arguments["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=options.compute, reduce_dtype=options.reduce)
    if options.offload:
        arguments["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=device.TYPE != "cpu")
    if options.reshard is not None:
        arguments["reshard_after_forward"] = options.reshard
    for unit in case.units(model):
        fsdp.fully_shard(unit, **arguments)
    return fsdp.fully_shard(model, **arguments)


def sharded(case_name: str, options: Options = DEFAULT, implementation: str = "libfsdp") -> Any:
    """The case's model, sharded."""
    return shard(seeded(CASES[case_name]), CASES[case_name], implementation, options)


def three_units(**options: Any) -> Any:
    """A small model that libfsdp shards: two units of linear layers, and a root with another one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3))
    fsdp = api("libfsdp")
    for unit in (model[0], model[2], model):
        fsdp.fully_shard(unit, **options)
    return model


def full(tensor: Tensor) -> Tensor:
    """A DTensor, gathered; a copy on the CPU that stays as it is. It is gathered there, too: torch's Gloo can't do it on a GPU."""
    own = tensor.detach().to("cpu", copy=True)
    whole: Tensor = own.full_tensor() if hasattr(own, "full_tensor") else own
    return whole


def full_gradients(model: nn.Module) -> Gradients:
    """The gradient of each parameter, gathered."""
    return {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}


def train(case_name: str, implementation: str, options: Options) -> Run:
    """A rank's part of a training run: called on all ranks alike."""
    return train_sharded(sharded(case_name, options, implementation), CASES[case_name], options)


def train_sharded(model: Any, case: Case, options: Options, call: Callable[..., Any] | None = None) -> Run:
    """As train, of a sharded model, which is called by `call` if that is given."""
    optimizer = make_optimizer(options, model.parameters())
    steps = []
    for number in range(options.steps):
        step = Step({name: full(p) for name, p in model.named_parameters()})
        for micro in range(options.microbatches):
            last = micro == options.microbatches - 1
            if options.sync == "last":
                model.set_requires_gradient_sync(last)
            if options.mark_last:
                model.set_is_last_backward(last)
            loss = case.loss(model if call is None else call, batch_of(case, number, micro, dist.get_rank()))
            loss.backward()
            step.losses.append(loss.item())
        step.gradients = full_gradients(model)
        if options.clip is not None:
            step.norm = full(nn.utils.clip_grad_norm_(model.parameters(), options.clip)).item()
            step.clipped = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(step)
    buffers = {name: buffer.to("cpu", copy=True) for name, buffer in model.named_buffers()}
    return Run(steps, {name: full(p) for name, p in model.named_parameters()}, buffers)


class Replica:
    """The same training in one process without any sharding: a copy of the model for each rank's part of the batch."""

    def __init__(self, case_name: str, options: Options, world: int) -> None:
        self.case, self.options, self.world = CASES[case_name], options, world
        self.models = [seeded(self.case) for _ in range(world)]
        self.optimizer = make_optimizer(options, self.models[0].parameters())

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer updates; all copies are called with them."""
        return dict(self.models[0].named_parameters())

    def backward(self, number: int) -> Backward:
        """The losses and gradients of a step."""
        of_it = Backward()
        by_micro = []
        for micro in range(self.options.microbatches):
            losses, gradients = zip(*(self.of_rank(number, micro, rank) for rank in range(self.world)), strict=True)
            of_it.losses.append(list(losses))
            by_micro.append(list(gradients))
        for name, parameter in self.parameters().items():
            table = [[of_rank[name] for of_rank in ranks] for ranks in by_micro]
            of_it.add(name, table, parameter.dtype, self.options.sync)
        return of_it

    def of_rank(self, number: int, micro: int, rank: int) -> tuple[float, Gradients]:
        """A loss and its gradients in the dtype in which they are reduced; the model computes in `compute`."""
        compute = self.options.compute or torch.float32
        leaves = {name: p.detach().to(compute).clone().requires_grad_() for name, p in self.parameters().items()}
        batch = batch_of(self.case, number, micro, rank)
        cast = tuple(x.to(compute) if x.is_floating_point() else x for x in batch)

        def call(*positional: Any, **named: Any) -> Any:
            return torch.func.functional_call(self.models[rank], leaves, positional, named)

        loss = self.case.loss(call, cast)
        loss.backward()
        dtype = self.options.wire
        return loss.item(), {name: None if leaf.grad is None else leaf.grad.to(dtype) for name, leaf in leaves.items()}

    def update(self, gradients: Gradients) -> None:
        """The optimizer's step with these gradients."""
        for name, parameter in self.parameters().items():
            gradient = gradients[name]
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Backward:
    """What a step of all ranks computes before its update."""

    losses: list[list[float]] = field(default_factory=list)  # By microbatch and rank.
    gradients: Gradients = field(default_factory=dict)
    magnitudes: dict[str, Tensor] = field(default_factory=dict)  # Of what is added up in `gradients`, over the ranks.

    def add(self, name: str, table: list[list[Tensor | None]], dtype: torch.dtype, sync: str) -> None:
        """A parameter, with its gradients by microbatch and rank: the sum over microbatches of the means over ranks."""
        parts = [[g for g in ranks if g is not None] for ranks in table]
        if not any(parts):
            self.gradients[name] = None
            return
        world = len(table[0])
        if sync == "last":  # First the sum over microbatches, on each rank.
            parts = [[functools.reduce(torch.add, of_rank) for of_rank in zip(*parts, strict=True)]]
        means = [(functools.reduce(torch.add, ranks) / world).to(dtype) for ranks in parts]
        self.gradients[name] = functools.reduce(torch.add, means)
        self.magnitudes[name] = sum((g.abs().to(dtype) for ranks in parts for g in ranks), torch.zeros(())) / world
