"""A random program on a rank, sharded, with a record of all that a user sees after each operation."""

from __future__ import annotations

import gc
import importlib
import math
import shutil
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.training import api, mesh_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from differential import optimizers
from differential.model import Built, Fuse, PlannedFailure, batch_of, loss_of
from differential.program import Op, Program

Cut = tuple[tuple[int, int], ...]


class OperationFailed(AssertionError):
    """An operation raised what it should not: its number, the class and the text."""


def local(tensor: Tensor) -> Tensor:
    """This rank's memory of it."""
    inner = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return inner.detach()


def packed(tensor: Tensor) -> Any:
    """As pickled cheaply."""
    copy = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if copy.dtype == torch.bfloat16:
        return copy.view(torch.int16).numpy(), "bfloat16"
    return copy.numpy(), ""


def unpacked(value: Any) -> Tensor:
    """The other way."""
    array, dtype = value
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype else tensor


def cut_of(parameter: Tensor) -> Cut:
    """Where this rank's part lies in the whole."""
    if not isinstance(parameter, DTensor):
        return tuple((0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(zip(offset, shape, strict=True)) if all(shape) else tuple((0, size) for size in shape)


class Sharded:
    """A model, its optimizer and its graphs."""

    def __init__(self, program: Program, number: int, implementation: str) -> None:
        self.program, self.number, self.implementation = program, number, implementation
        self.fsdp = api(implementation)
        self.build()
        self.names = [name for name, _ in self.named()]
        self.refetch()
        self.make_optimizer()
        self.student: Sharded | None = None
        self.graphs: dict[str, Tensor] = {}
        self.saved: dict[str, Any] = {}
        self.seen: tuple[dict[str, Tensor], dict[str, Tensor | None]] = ({}, {})

    # Making.

    def build(self) -> None:
        """A model of its own, sharded."""
        self.built = Built(self.program, self.number)
        self.parts = self.built.parts
        self.model: Any = self.built.root
        self.shard(self.built)
        self.built.tie_weights()

    def shard(self, built: Built) -> None:
        """fully_shard for each unit."""
        options, program = self.program.options, self.program
        arguments: dict[str, Any] = {"mesh": mesh_of(2 if options.mesh == "hsdp" else 1)}
        if options.param_dtype or options.reduce_dtype:
            arguments["mp_policy"] = self.fsdp.MixedPrecisionPolicy(
                param_dtype=getattr(torch, options.param_dtype or "", None),
                reduce_dtype=getattr(torch, options.reduce_dtype or "", None),
            )
        if options.offload:
            arguments["offload_policy"] = self.fsdp.CPUOffloadPolicy(pin_memory=False)
        if options.shard_dim:
            ranks = program.world // (2 if options.mesh == "hsdp" else 1)
            arguments["shard_placement_fn"] = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % ranks == 0 else None
        for name in ("placements", "outer_placements"):
            value = getattr(options, name)
            if value != getattr(type(options)(), name):
                arguments[name] = value
        for name in ("main_params_dtype", "main_grads_dtype"):
            if getattr(options, name):
                arguments[name] = getattr(torch, getattr(options, name))
        for unit in program.units:
            modules = [built.parts[name] for name in unit.nodes]
            root = unit.nodes == (program.root,)
            extra: dict[str, Any] = {}
            for name in ("keep_gathered_bytes", "memory_budget"):
                if root and getattr(options, name):
                    extra[name] = getattr(options, name)
            if unit.reshard_after_forward is not None:
                extra["reshard_after_forward"] = unit.reshard_after_forward
            self.fsdp.fully_shard(modules if len(modules) > 1 else modules[0], **arguments, **extra)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The model's parameters, by the names that they had before sharding."""
        return list(self.model.named_parameters())

    def refetch(self) -> None:
        """The parameters as optimizers see them."""
        self.parameters = dict(self.named())

    def make_optimizer(self) -> None:
        """Made anew, without state."""
        plan = self.program.optimizer
        ndims = {name: p.ndim for name, p in self.parameters.items()}
        self.optimizer = optimizers.make(plan, optimizers.chosen(plan, self.parameters, ndims), replica=False)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=plan.scaler)

    def setup(self) -> dict[str, Any]:
        """Where this rank's parts lie."""
        return {name: cut_of(p) for name, p in self.parameters.items()}

    # Observing, without a collective and without a call of the library.

    def record(self, result: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """The result; parameters and gradients that are others than before."""
        values = {name: local(p).clone() for name, p in self.parameters.items()}
        gradients = {name: None if p.grad is None else local(p.grad).clone() for name, p in self.parameters.items()}
        before_values, before_gradients = self.seen
        self.seen = (values, gradients)

        def same(a: Tensor | None, b: Tensor | None) -> bool:
            return a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)

        changed = {name: packed(v) for name, v in values.items() if not same(v, before_values.get(name))}
        others = {
            name: None if g is None else packed(g)
            for name, g in gradients.items()
            if name not in before_gradients or not same(g, before_gradients[name])
        }
        return result, changed, others

    def batch(self, number: int) -> Tensor:
        """This rank's."""
        return batch_of(self.program, number, dist.get_rank(), self.number)

    # Operations.

    def forward(self, graph: str, batch: int) -> float:
        self.graphs[graph] = loss_of(self.program, self.model, self.batch(batch))
        return self.graphs[graph].item()

    def backward(self, graph: str, retain: bool = False) -> None:
        """Where all that the loss depends on is frozen there is none; gradients that are missing then are noticed."""
        loss = self.graphs[graph] if retain else self.graphs.pop(graph)
        if loss.requires_grad:
            self.scaler.scale(loss).backward(retain_graph=retain)

    def checked(self, batch: int) -> float:
        """A forward and a backward that another rank repeats, except where they form the model."""

        def forward_and_backward(x: Tensor) -> float:
            loss = loss_of(self.program, self.model, x)
            if loss.requires_grad:
                self.scaler.scale(loss).backward()
            return loss.item()

        return (
            importlib.import_module("libfsdp")
            .ReplayCheck(self.model, every=1)
            .run(forward_and_backward, self.batch(batch))
        )

    def evaluate(self, mode: str, batch: int, training: bool) -> float:
        context = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
        self.model.train(training)
        with context():
            loss = loss_of(self.program, self.model, self.batch(batch)).item()
        self.model.train()
        return loss

    def fail(self, node: str, in_backward: bool, batch: int) -> str:
        """A pass that fails on all ranks, if it uses the node."""
        outcome = "completed"
        Fuse.arm(node, in_backward=in_backward)
        try:
            loss = loss_of(self.program, self.model, self.batch(batch))
            outcome = "completed forward"
            if loss.requires_grad:
                self.scaler.scale(loss).backward()
            outcome = "completed"
        except PlannedFailure:
            outcome = "failed in backward" if outcome == "completed forward" else "failed in forward"
        except Exception as error:  # autograd may have wrapped it
            if "PlannedFailure" not in "".join(traceback.format_exception(error)):
                raise
            outcome = "failed in backward" if outcome == "completed forward" else "failed in forward"
        finally:
            Fuse.arm(None)
        return outcome

    def call(self, node: str, method: str, arguments: dict[str, Any]) -> None:
        """A method of FSDPModule."""
        handle = getattr(self.parts[node], method)(**arguments)
        if method == "unshard" and handle is not None:
            handle.wait()

    def prefetch_in_forward(self, node: str, others: list[str]) -> None:
        self.call(node, "set_modules_to_forward_prefetch", {"modules": [self.parts[other] for other in others]})

    def prefetch_in_backward(self, node: str, others: list[str]) -> None:
        self.call(node, "set_modules_to_backward_prefetch", {"modules": [self.parts[other] for other in others]})

    def clip(self, limit: float, library: bool) -> float:
        if self.program.optimizer.scaler:
            self.scaler.unscale_(self.optimizer)
        function = importlib.import_module("libfsdp").clip_grad_norm_ if library else nn.utils.clip_grad_norm_
        norm = function(list(self.parameters.values()), limit)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self, set_to_none: bool, of_model: bool = False) -> None:
        (self.model if of_model else self.optimizer).zero_grad(set_to_none=set_to_none)

    def advance_schedule(self) -> None:
        self.schedule.step()

    def train_parameters(self, names: list[str], trained: bool) -> None:
        """Freezes, or unfreezes."""
        for name in names:
            self.parameters[name].requires_grad_(trained)

    def write(self, how: str, names: list[str], factor: float) -> None:
        """Multiplies shards."""
        shown = dict(self.named()) if how == "shown" else self.parameters
        WRITES[how]([shown[name] for name in names], factor)

    def average(self, weight: float) -> None:
        """As for a teacher: this model's parameters approach those of the first model."""
        assert self.student is not None
        mine = [p.data for p in self.parameters.values()]
        torch._foreach_lerp_(mine, [p.data for p in self.student.parameters.values()], weight)

    def save(self, slot: str) -> dict[str, Any]:
        """A state dict of model and optimizer, as copies."""
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.saved[slot] = (state, copied(self.optimizer.state_dict()))
        return {name: packed(local(value)) for name, value in state.items() if name in self.parameters}

    def load(self, slot: str, assign: bool, optimizer: bool) -> None:
        state, of_optimizer = self.saved[slot]
        self.model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)
        if assign:  # The parameters are others, which the optimizer must get.
            of_optimizer = of_optimizer if optimizer else copied(self.optimizer.state_dict())
            self.built.tie_weights()
            self.refetch()
            self.make_optimizer()
        if optimizer or assign:
            self.optimizer.load_state_dict(copied(of_optimizer))

    def export(self, bucket_bytes: int) -> dict[str, Any]:
        """Whole parameters out of a stream."""
        stream = importlib.import_module("libfsdp").full_weights(self.model, bucket_bytes=bucket_bytes)
        return {name: packed(value) for bucket in stream for name, value in bucket if name in self.parameters}

    def checkpoint(self, library: bool = False) -> dict[str, Any]:
        """To disk and back. The optimizer, too, once it has state: torch steps it otherwise.

        Returns:
            Buffers: a checkpoint has one rank's.
        """
        holder: list[Any] = [tempfile.mkdtemp(prefix="fsdp-differential-") if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(holder)
        folder = str(Path(holder[0]) / "step")
        with_optimizer = all(  # (torch leaves out the state of frozen parameters.)
            p.requires_grad and self.optimizer.state.get(p)
            for group in self.optimizer.param_groups
            for p in group["params"]
        )
        if library:
            ours = importlib.import_module("libfsdp")
            for call in (ours.save, ours.load):
                call(folder, self.model, self.optimizer if with_optimizer else None)
        else:
            self.through_dcp(folder, with_optimizer)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(holder[0])
        return self.buffers()

    def through_dcp(self, folder: str, with_optimizer: bool) -> None:
        state: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if with_optimizer:
            state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self.model, state["model"])
        if with_optimizer:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])

    def rebuild(self) -> None:
        """Another model of the same kind takes over values and the optimizer's state."""
        state, of_optimizer = self.model.state_dict(), copied(self.optimizer.state_dict())
        self.build()
        self.model.load_state_dict(state)
        self.refetch()
        self.make_optimizer()
        self.optimizer.load_state_dict(of_optimizer)

    def read(self) -> dict[str, Any]:
        """What the modules show."""
        return {name: packed(local(p)) for name, p in self.named()}

    def forget(self) -> None:
        """Nobody has the model any more; its graphs live on."""
        del self.model, self.parts, self.optimizer, self.schedule
        self.parameters, self.saved = {}, {}
        gc.collect()

    def state(self) -> list[float]:
        """Sums of the optimizer's state, of this rank."""
        return optimizers.sums_of_state(self.optimizer, self.parameters.values())

    def buffers(self) -> dict[str, Any]:
        return {name: packed(value) for name, value in self.model.named_buffers()}


def copied(state: Any) -> Any:
    """A state dict that does not share memory."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


# Writes. All multiply, so that a replica's are one function.


@torch.no_grad()
def in_place(parameters: list[nn.Parameter], factor: float) -> None:
    for p in parameters:
        p.mul_(factor)


def through_data(parameters: list[nn.Parameter], factor: float) -> None:
    for p in parameters:
        p.data.mul_(factor)


@torch.no_grad()
def copy(parameters: list[nn.Parameter], factor: float) -> None:
    for p in parameters:
        p.copy_(p.detach() * factor)


@torch.no_grad()
def together(parameters: list[nn.Parameter], factor: float) -> None:
    torch._foreach_mul_(parameters, factor)


@torch.no_grad()
def to_local(parameters: list[nn.Parameter], factor: float) -> None:
    for p in parameters:
        (p.to_local() if isinstance(p, DTensor) else p).mul_(factor)


def numpy(parameters: list[nn.Parameter], factor: float) -> None:
    for p in parameters:
        if p.dtype == torch.bfloat16:
            p.data.mul_(factor)
        elif local(p).numel() > 0:
            array = local(p).numpy()
            array *= array.dtype.type(factor)


def dlpack(parameters: list[nn.Parameter], factor: float) -> None:
    for p in parameters:
        if local(p).numel() > 0:
            torch.from_dlpack(local(p)).mul_(factor)


def shared(parameters: list[nn.Parameter], factor: float) -> None:
    """Memory is exchanged below the tensor, then written through its own handle."""
    for p in parameters:
        local(p).share_memory_()
    numpy(parameters, factor)


def collective(parameters: list[nn.Parameter], factor: float) -> None:
    """A shard is what a message is received into: sent by the rank itself to a neighbour and back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for p in parameters:
        value = local(p).mul(factor)
        echoes: list[Any] = [None] * size
        dist.all_gather_object(echoes, tuple(value.shape))
        for owner in range(size):  # one after the other: the owner's neighbour keeps the value for it
            if size == 1 or math.prod(echoes[owner]) == 0:
                continue
            helper = (owner + 1) % size
            if rank == owner:
                dist.send(value.contiguous(), helper)
                dist.recv(local(p), helper)
            elif rank == helper:
                held = torch.empty(echoes[owner], dtype=p.dtype)
                dist.recv(held, owner)
                dist.send(held, owner)
        if size == 1:
            local(p).copy_(value)


WRITES: dict[str, Callable[[list[nn.Parameter], float], None]] = {
    "in_place": in_place,
    "shown": in_place,  # To what the modules show at this moment.
    "copy": copy,
    "to_local": to_local,
    "data": through_data,
    "together": together,
    "numpy": numpy,
    "dlpack": dlpack,
    "shared": shared,
    "collective": collective,
}


def lives_of(program: Program, implementation: str) -> list[Any]:
    """One life for each model."""
    if program.options.front == "megatron":
        megatron = importlib.import_module("differential.megatron")
        return [megatron.Sharded(program, number, implementation) for number in range(program.models)]
    return [Sharded(program, number, implementation) for number in range(program.models)]


class Observer(Protocol):
    """Is shown each life in the beginning, and after each of its operations."""

    def begin(self, life: Sharded) -> None: ...
    def after(self, life: Sharded) -> None: ...


def execute(program: Program, implementation: str, observer: Observer | None = None) -> Any:
    """A rank's part: where its parts lie, and a record of each operation."""
    op: Op | None = None
    number = -1
    try:
        lives = lives_of(program, implementation)
        lives[-1].student = lives[0]
        if observer is not None:
            for life in lives:
                observer.begin(life)
        setup = [life.setup() for life in lives]
        first = [life.record(None) for life in lives]
        records = []
        for number, op in enumerate(program.operations):  # noqa: B007  # told where it fails
            life = lives[op.model]
            result = getattr(life, op.what)(**op.arguments)
            if observer is not None:
                observer.after(life)
            records.append([other.record(result if other is life else None) for other in lives])
        lives[-1].student = None
        del lives, life
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = next(
            (f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames) if "differential" not in f.filename), ""
        )
        text = f"[[{number}|{type(error).__name__}|{' '.join(str(error).split())[:400]}|{where}]]"
        raise OperationFailed(text) from error
    finally:
        Fuse.arm(None)
        gc.collect()
    return setup, first, records
