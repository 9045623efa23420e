"""[Current when forward begins]: a root forward computes with what the shards hold when it begins, whoever wrote it and how.

The reference is a plain model with the values that DTensor gathers from the shards just before each forward.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparison import differences  # noqa: F401  # it makes MKL's products independent of addresses
from support.marks import at_night
from support.ranks import ComparedRanks, StartRanks, run_both
from support.training import api, full
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import libfsdp

WIDTH = 8
Write = Callable[[nn.Module], None]


class Model(nn.Module):
    """Two blocks, each a unit, and parameters of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


# What the optimizers of a training program are. None of them but torch's loops counts up the versions of shards.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "torch foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "torch fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "torch SGD foreach": lambda p: torch.optim.SGD(p, lr=0.5, foreach=True),
    "AdamW": lambda p: libfsdp.optim.AdamW(p, lr=0.1),
    "SGD": lambda p: libfsdp.optim.SGD(p, lr=0.5),
    "fuse": lambda p: libfsdp.fuse(torch.optim.AdamW(p, lr=0.1)),
    "Muon": lambda p: libfsdp.optim.Muon([q for q in p if q.ndim == 2], lr=0.1),
    "AdamW8bit": lambda p: libfsdp.optim.AdamW8bit(p, lr=0.1),
}


def locals_of(model: nn.Module) -> list[Tensor]:
    """This rank's parts."""
    return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(0.9)


def by_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.9)


@torch.no_grad()
def by_foreach(model: nn.Module) -> None:
    torch._foreach_mul_(list(model.parameters()), 0.9)


def by_numpy(model: nn.Module) -> None:
    for local in locals_of(model):
        view = local.detach().numpy()
        view *= 0.9


def by_dlpack(model: nn.Module) -> None:
    for local in locals_of(model):
        torch.from_dlpack(local.detach()).mul_(0.9)


def by_collective(model: nn.Module) -> None:
    """What a program does that gives each rank of a column the same."""
    for local in locals_of(model):
        dist.all_reduce(local.detach(), op=dist.ReduceOp.SUM)


def by_shared_memory(model: nn.Module) -> None:
    """A queue of torch.multiprocessing does this, too: each tensor over the memory then has other memory."""
    for local in locals_of(model):
        local.detach().share_memory_()
    by_numpy(model)


def by_average(model: nn.Module) -> None:
    """As a teacher follows its student."""
    for local in locals_of(model):
        torch._foreach_lerp_([local.detach()], [torch.ones_like(local)], 0.1)


WRITES: dict[str, Write] = {
    write.__name__: write
    for write in (in_place, by_data, by_foreach, by_numpy, by_dlpack, by_collective, by_shared_memory, by_average)
}


@functools.cache
def mesh_of(dims: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", dims, mesh_dim_names=("outer", "inner")[-len(dims) :])


def sharded(options: dict[str, Any], dims: tuple[int, ...], reference: Model) -> Any:
    """A sharded copy of the reference."""
    mesh = mesh_of(dims)
    model = copy.deepcopy(reference)
    for block in model.blocks:
        libfsdp.fully_shard(block, mesh=mesh, **options)
    return libfsdp.fully_shard(model, mesh=mesh, **options)


def made() -> Model:
    torch.manual_seed(0)
    return Model()


class Checked:
    """A sharded model, each forward of which is compared with that of a plain one that has the shards' values."""

    def __init__(self, options: dict[str, Any], dims: tuple[int, ...], reference: Model | None = None) -> None:
        self.plain = made()
        self.model = sharded(options, dims, reference or self.plain)
        self.input = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
        self.failures: list[str] = []

    def forward(self, where: str, shown: dict[str, Tensor] | None = None) -> Tensor:
        """The output; the moment is noted if it is wrong."""
        values = shown or {name: full(p) for name, p in self.model.named_parameters()}
        expected = torch.func.functional_call(self.plain, values, (self.input,))
        output: Tensor = self.model(self.input)
        if not torch.equal(output, expected):
            self.failures.append(f"{where}: off by {(output - expected).abs().max().item():.3g}")
        return output


def shards_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, as optimizers have them: a forward may leave whole parameters in the modules."""
    return dict(model.named_parameters())


def train_with(options: dict[str, Any], dims: tuple[int, ...]) -> list[str]:
    """Each optimizer, and between backward and its step what programs do there."""
    failures = []
    for name, make in OPTIMIZERS.items():
        if name == "Muon" and "outer_placements" in options:  # a matrix that is cut twice is none for it
            continue
        checked = Checked(options, dims)
        shards = shards_of(checked.model)
        optimizer = make(list(shards.values()))

        def current(shards: dict[str, nn.Parameter] = shards) -> dict[str, Tensor]:
            return {key: full(p) for key, p in shards.items()}

        for step in range(4):
            checked.forward(f"step {step}", current()).square().mean().backward()
            before = current()
            if step == 1:
                with torch.no_grad():
                    checked.forward("evaluation before the step", before)
            if step == 2:
                checked.forward("another forward before the step", before)
            if step == 3:
                for unit in (checked.model, *checked.model.blocks):
                    unit.unshard()
            optimizer.step()
            optimizer.zero_grad()
            after = current()
            if all(torch.equal(before[key], after[key]) for key in after):
                checked.failures.append(f"step {step} changed nothing")
            if step % 2:
                with torch.no_grad():
                    checked.forward(f"evaluation after step {step}", after)
        checked.forward("the last forward", current())
        failures += [f"{name}, {failure}" for failure in checked.failures]
    return failures


def write_with(options: dict[str, Any], dims: tuple[int, ...]) -> list[str]:
    """Each way to write, after kinds of forwards."""
    failures = []
    for name, write in WRITES.items():
        for kind in ("frozen", "grad mode", "no_grad", "inference", "backward")[: None if write is by_data else 3]:
            checked = Checked(options, dims)
            if kind == "frozen":
                checked.model.requires_grad_(False)
            shards = shards_of(checked.model)
            for step in range(2):
                now = {key: full(p) for key, p in shards.items()}
                if kind in ("no_grad", "inference"):
                    with torch.inference_mode(kind == "inference"), torch.no_grad():
                        checked.forward(f"{kind} {step}", now)
                else:
                    output = checked.forward(f"{kind} {step}", now)
                    if kind == "backward":
                        output.sum().backward()
                    del output
                holder = nn.ParameterDict()
                holder._parameters.update({key.replace(".", "_"): p for key, p in shards.items()})
                write(holder)
            failures += [f"{name}: {failure}" for failure in checked.failures]
    return failures


ROWS = (2,)
REPLICAS = (2, 2)
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "zero3": ({}, ROWS),
    "zero2": ({"placements": "optim_grads"}, ROWS),
    "zero1": ({"placements": "optim"}, ROWS),
    "zero0": ({"placements": "no_shard"}, ROWS),
    "kept": ({"reshard_after_forward": False}, ROWS),
    "bytes": ({"keep_gathered_bytes": 1 << 20}, ROWS),
    "neighbours": ({"reshard_after_forward": 2}, (4,)),
    "offload": ({"offload_policy": libfsdp.CPUOffloadPolicy(pin_memory=False)}, ROWS),
    "hsdp": ({}, REPLICAS),
    "hsdp zero1": ({"placements": "optim"}, REPLICAS),
    "hsdp kept": ({"reshard_after_forward": False}, REPLICAS),
    "hfsdp": ({"outer_placements": "optim"}, REPLICAS),
}


# A case in which parameters are kept in each way; the rest is for the night.
IN_SHORT = ("zero3", "zero1", "kept", "hsdp kept")
EACH_CASE = [case if case in IN_SHORT else at_night(case) for case in CASES]


@pytest.mark.parametrize("case", EACH_CASE)
def test_each_optimizer_is_noticed(case: str, ranks: StartRanks) -> None:
    options, dims = CASES[case]
    for failures in ranks(torch.Size(dims).numel()).run(train_with, options, dims):
        assert failures == []


# Where whole parameters stay because the user has said so: these writes are noticed after any forward, and any write
# after these forwards.
BY_NAME = ("kept", "bytes", "hsdp kept")
NOTICED = ("in_place", "by_shared_memory")
ANY = ("frozen", "backward")


@pytest.mark.parametrize("case", EACH_CASE)
def test_each_way_to_write_is_noticed(case: str, ranks: StartRanks) -> None:
    options, dims = CASES[case]
    for failures in ranks(torch.Size(dims).numel()).run(write_with, options, dims):
        promised = [
            f for f in failures if case not in BY_NAME or f.split(": ")[0] in NOTICED or f.split(": ")[1][:-2] in ANY
        ]
        assert promised == []


# Gathers.

LONG: dict[str, dict[str, Any]] = {"zero3": {}, "kept": {"reshard_after_forward": False}}


def program(model: Any, step: str, x: Tensor) -> None:
    """One update, as programs make it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    if step.startswith("accumulation"):
        model.set_requires_gradient_sync(False)
        if step.endswith("kept"):
            model.set_reshard_after_backward(False)
        for _ in range(2):
            model(x).sum().backward()
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
    if step == "unshard":
        for unit in (model, *model.blocks):
            unit.unshard()
    model(x).sum().backward()
    if step == "evaluation":
        with torch.no_grad():
            model(x)
    optimizer.step()
    optimizer.zero_grad()


def count_gathers(implementation: str, options: dict[str, Any], dims: tuple[int, ...], step: str) -> int:
    """All-gathers of the third of three updates."""
    torch.manual_seed(0)
    model: Any = Model()
    for block in model.blocks:
        api(implementation).fully_shard(block, mesh=mesh_of(dims), **options)
    api(implementation).fully_shard(model, mesh=mesh_of(dims), **options)
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        program(model, step, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        program(model, step, x)
    # FSDP2 does not name its root.
    return sum(
        event.name == "FSDP::all_gather" or event.name.startswith("FSDP::all_gather (") for event in seen.events()
    )


@pytest.mark.parametrize("step", ["step", "accumulation", "accumulation, kept", "unshard"])
@pytest.mark.parametrize("dims", [ROWS, REPLICAS])
@pytest.mark.parametrize("options", LONG)
def test_no_more_gathers_than_fsdp2(
    options: str, dims: tuple[int, ...], step: str, compared_ranks: ComparedRanks
) -> None:
    size = torch.Size(dims).numel()
    mine, theirs = run_both(compared_ranks, size, count_gathers, LONG[options], dims, step)
    assert max(mine) <= min(theirs), (mine, theirs)


@pytest.mark.parametrize("placements", ["optim", "optim_grads"])
def test_gathers_of_a_step(placements: str, ranks: StartRanks) -> None:
    # Of three units, with and without accumulation: one for each update, and one more for an evaluation before the step.
    for step, expected in (("step", 3), ("accumulation", 3), ("evaluation", 6)):
        for count in ranks(2).run(count_gathers, "libfsdp", {"placements": placements}, ROWS, step):
            assert count == expected


# Trainability.


def change_trainability(options: dict[str, Any], dims: tuple[int, ...], between: str) -> list[str]:
    """A parameter is frozen, and later trained again, after a forward that leaves whole parameters where the options keep them."""
    plain = made()
    model = sharded(options, dims, plain)
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    wrong = []
    for turn in range(4):
        if between == "evaluation":
            with torch.no_grad():
                model(x)
        else:
            model(x)
        for one in (model, plain):
            one.blocks[0].weight.requires_grad_(turn % 2 == 1)
            one.head.bias.requires_grad_(turn % 2 == 1)
            one(x).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if (p.grad is None) != (q.grad is None):
                wrong.append(f"turn {turn}: {name} has {'no ' if p.grad is None else 'a '}gradient")
        for one in (model, plain):
            one.zero_grad()
    return wrong


@pytest.mark.parametrize("between", ["evaluation", "grad mode"])
@pytest.mark.parametrize("case", ["zero3", "zero0", "zero1", "kept", "hsdp kept"])
def test_changed_trainability(case: str, between: str, ranks: StartRanks) -> None:
    options, dims = CASES[case]
    for wrong in ranks(torch.Size(dims).numel()).run(change_trainability, options, dims, between):
        assert wrong == []
