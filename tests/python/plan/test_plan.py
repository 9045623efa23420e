"""Plans: the same bytes as runs have, kind by kind and on the wire; of modules without memory, and of worlds that are not there."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import hugging_face, training
from support.marks import at_night, needs_transformers, on_ranks
from support.models import Case, Transformer, floats
from support.training import batch_of, mesh_of, seeded
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

import libfsdp

# Of "even", each parameter divides by four ranks.
EVEN = Case(lambda: nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)), floats(5, 8), lambda m: [m[0], m[2]])
CASES = {**training.CASES, "even": EVEN}
STEPS = 6  # From the sixth on, steps are alike.
BF16 = torch.bfloat16


# How gradients add up: options of plan().
ACCUMULATION: dict[str, dict[str, Any]] = {
    "reduced": {"microbatches": 3},
    "unreduced": {"microbatches": 3, "sync_each_microbatch": False},
    "two, unreduced": {"microbatches": 2, "sync_each_microbatch": False},
}


def units_of(case: Case) -> Any:
    """Which modules are units, for plan()."""
    model = seeded(case)
    names = {name for name, module in model.named_modules() if module in case.units(model)}
    return (lambda name, module: name in names) if names else None


def real(case: Case, options: dict[str, Any], replicas: int) -> tuple[dict[str, int], dict[str, int]]:
    """memory_stats after a step, and what the step adds to wire_stats."""
    microbatches = options.pop("microbatches", 1)
    syncs = options.pop("sync_each_microbatch", True)
    model = seeded(case)
    for unit in case.units(model):
        libfsdp.fully_shard(unit, mesh=mesh_of(replicas), **options)
    model = libfsdp.fully_shard(model, mesh=mesh_of(replicas), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before: dict[str, int] = {}
    for step in range(STEPS):
        if step == STEPS - 1:
            before = libfsdp.wire_stats(model)
            libfsdp.reset_peak_memory_stats(model)
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(syncs or microbatch == microbatches - 1)
            case.loss(model, batch_of(case, step, microbatch, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = libfsdp.wire_stats(model)
    return libfsdp.memory_stats(model), {name: after[name] - before[name] for name in after}


def plan_of(case: Case, options: dict[str, Any], replicas: int, inputs: Any = None) -> libfsdp.Plan:
    """A plan of this rank."""
    model = seeded(case)
    without_memory = seeded(case).to("meta")
    if len(list(without_memory.parameters())) == len(list(model.parameters())):  # No tied one has become two.
        model = without_memory
    mesh = libfsdp.PlannedMesh(
        dist.get_world_size() // replicas, replicas=replicas, rank=dist.get_rank(), device_type="cpu"
    )
    return libfsdp.plan(model, mesh, units=units_of(case), inputs=inputs, **options)


def compare(case: Case, options: dict[str, Any], replicas: int = 1, inputs: Any = None) -> dict[str, int]:
    """A plan and a run on this rank. Returns the memory of the run."""
    plan = plan_of(case, options, replicas, inputs)
    memory, wire = real(case, dict(options), replicas)
    # What peers read is not in plans, and how often blocks were made in earlier steps.
    left_out = {"shared_slots.live", "shared_slots.peak", "slot_allocations"}
    for planned, found in ((plan.memory, memory), (plan.wire, wire)):
        differences = {name: (planned.get(name), found[name]) for name in found if planned.get(name) != found[name]}
        assert not differences.keys() - left_out, f"planned, and found: {differences}"
    return memory


OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "bf16": {"mp_policy": libfsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)},
    "bf16 reductions": {"mp_policy": libfsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bf16 offload": {
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "mp_policy": libfsdp.MixedPrecisionPolicy(param_dtype=BF16),
    },
    "kept": {"reshard_after_forward": False},
    "resharded root": {"reshard_after_forward": True},
    "bytes kept": {"keep_gathered_bytes": 12_000},
    "optim_grads": {"placements": "optim_grads"},
    "optim": {"placements": "optim"},
    "no_shard": {"placements": "no_shard"},
    "bf16 no_shard": {"placements": "no_shard", "mp_policy": libfsdp.MixedPrecisionPolicy(param_dtype=BF16)},
    "differences": {
        "placements": "optim_grads",
        "gather_format": lambda p: libfsdp.Int4Differences(16) if p.ndim == 2 and p.size(1) % 16 == 0 else None,
    },
    "main dtypes": {"main_params_dtype": torch.float64, "main_grads_dtype": torch.float64},
}


BATCH_NORM = ["fsdp"]  # Its averages are kept in fp32, which torch does not mix with bf16 on a CPU.
LAYERS = ["fsdp", "bf16 reductions"]
SOME = ["fsdp", "bf16 offload", "kept", "optim_grads"]


@pytest.mark.parametrize(
    ("size", "case", "names", "replicas", "more"),
    [
        (2, "transformer", list(OPTIONS), 1, {}),
        (4, "transformer", list(OPTIONS), 1, {}),
        (4, "transformer", list(OPTIONS), 2, {}),
        *((2, "transformer", list(OPTIONS) if how == "unreduced" else SOME, 1, more) for how, more in ACCUMULATION.items()),
        *((4, "transformer", ["fsdp", "bf16", "optim", "kept"], 2, more) for more in ACCUMULATION.values()),
        # Shards that are cut over both dimensions, and if they are even.
        (4, "even", ["fsdp", "bf16", "offload", "kept"], 2, {"outer_placements": "optim"}),
        (4, "transformer", ["fsdp", "bf16", "kept"], 2, {"outer_placements": "optim_if_even"}),
        (4, "transformer", ["fsdp", "bf16"], 1, {"reshard_after_forward": 2}),
        *((2, case, LAYERS, 1, {}) for case in ("mlp", "one_unit", "tied", "odd_shapes")),
        (2, "batch_norm", BATCH_NORM, 1, {}),
        *(
            pytest.param(2, f"hf_{case}", ["fsdp", "bf16"], 1, {}, marks=needs_transformers)
            for case in ("gpt2", "llama", "qwen2", "bert", "vit")
        ),
    ],
)
@on_ranks("size")
def test_what_ranks_need_and_send(case: str, names: list[str], replicas: int, more: dict[str, Any]) -> None:
    for name in names:
        try:
            compare(CASES[case], {**OPTIONS[name], **more}, replicas)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


class RandomBlock(nn.Module):
    """A residual block of layers that are drawn; it may hold other ones, and use a parameter of its own before, between or after them."""

    def __init__(self, draw: random.Random, width: int, depth: int) -> None:
        super().__init__()
        hidden = draw.randint(1, 3 * width)
        self.norm = nn.LayerNorm(width) if draw.random() < 0.7 else nn.Identity()
        self.up = nn.Linear(width, hidden, bias=draw.random() < 0.5)
        self.inner = RandomBlock(draw, hidden, depth - 1) if depth > 0 and draw.random() < 0.5 else nn.Tanh()
        self.further = RandomBlock(draw, hidden, depth - 1) if depth > 0 and draw.random() < 0.3 else nn.Tanh()
        self.down = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.ones(hidden)) if draw.random() < 0.4 else None
        self.place = draw.randrange(3)
        self.again = draw.random() < 0.2
        if draw.random() < 0.15:
            self.up.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        for place, layer in enumerate((self.inner, self.further, nn.Identity())):
            if place == self.place and self.scale is not None:
                hidden = hidden * self.scale
            hidden = layer(hidden)
        return x + self.down(self.inner(hidden) if self.again else hidden)


def random_case(seed: int) -> tuple[Case, dict[str, Any]]:
    """A model with its units, and options."""
    draw = random.Random(seed)
    width, blocks, share = draw.randint(2, 24), draw.randint(1, 5), draw.choice((0.3, 0.6, 1.0))

    def build() -> nn.Module:
        layers = random.Random(seed)
        drawn = [RandomBlock(layers, width, 2) for _ in range(blocks)]
        used = [*drawn, layers.choice(drawn)] if layers.random() < 0.3 else drawn
        return nn.Sequential(*used, nn.Linear(width, layers.randint(1, 9)))

    def units(model: nn.Module) -> list[nn.Module]:
        chosen = random.Random(seed)
        modules = [module for module in model.modules() if isinstance(module, RandomBlock) and chosen.random() < share]
        return modules[::-1]  # Inner ones come first.

    options = dict(OPTIONS[draw.choice(sorted(OPTIONS))])
    if draw.random() < 0.3:
        options["keep_gathered_bytes"] = draw.randint(1, 20_000)
    if draw.random() < 0.3:
        options |= {"microbatches": draw.randint(2, 4), "sync_each_microbatch": draw.random() < 0.5}
    return Case(build, floats(3, width), units), options


@pytest.mark.parametrize(
    ("size", "first", "count"),
    [
        (2, 0, 4),
        *(at_night(size, first, 25) for size in (2, 4) for first in range(100, 200, 25)),
    ],
)
@on_ranks("size")
def test_random_models(first: int, count: int) -> None:
    for seed in range(first, first + count):
        case, options = random_case(seed)
        replicas = 2 if dist.get_world_size() == 4 and seed % 2 else 1
        try:
            memory = compare(case, options, replicas, inputs=case.batch(torch.Generator()))
            # What the order of registration does not say is planned to need no less.
            if not any(block.again for block in seeded(case).modules() if isinstance(block, RandomBlock)):
                without_inputs = plan_of(case, options, replicas).memory
                for kind in ("total.peak", "unreduced_gradients.peak", "gathered_parameters.peak"):
                    assert without_inputs[kind] >= memory[kind], f"without inputs, {kind}: {without_inputs[kind]} < {memory[kind]}"
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {replicas} replicas, {options}: {error}") from error


def test_worlds_that_are_not_there() -> None:
    with torch.device("meta"):
        model = Transformer(blocks=20, dim=2048)
    blocks = type(model.blocks[0])
    plan = libfsdp.plan(
        model,
        libfsdp.PlannedMesh(16_384, ranks_per_host=8),
        units=blocks,
        mp_policy=libfsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    )
    elements = sum(p.numel() for p in model.parameters())
    assert plan.ranks == 16_384
    assert plan.elements == elements
    assert len(plan.units) == 21
    assert all(p.is_meta for p in model.parameters())
    block = plan.units[1]
    assert block.name == "blocks.0"
    assert block.gathered == 2 * block.elements + block.padding
    # Two blocks at a time, and the root.
    assert plan.memory["gathered_parameters.peak"] == 2 * block.gathered + plan.units[0].gathered
    assert plan.fits(plan.peak["device"])
    assert not plan.fits(plan.peak["device"] - 1)
    assert plan.fits(f"{plan.peak['device']}B")


def test_what_the_program_has() -> None:
    with torch.device("meta"):
        model = Transformer(blocks=4)
    blocks = type(model.blocks[0])
    mesh = libfsdp.PlannedMesh(4, device_type="cpu")
    plain = libfsdp.plan(model, mesh, units=blocks)
    shards = sum(unit.main_parameters for unit in plain.units)
    assert plain.memory["main_gradients.live"] == 0  # They are the shards' .grad.
    assert plain.moment == "the end of backward"
    assert plain.peak["main_gradients"] == plain.memory["main_gradients.peak"]
    assert dict(plain.moments)["the update"]["main_gradients"] == plain.memory["main_gradients.peak"]
    state = plain.peak["optimizer_state"]
    assert state == sum(unit.optimizer_state for unit in plain.units)
    assert 1.8 * shards < state <= 2 * shards  # without the padding
    assert libfsdp.plan(model, mesh, units=blocks, optimizer_values=0).peak["optimizer_state"] == 0
    offloaded = libfsdp.plan(model, mesh, units=blocks, offload_policy=CPUOffloadPolicy())
    assert offloaded.peak["optimizer_state"] == offloaded.peak["main_parameters"] == 0

    of_host = next(line for line in str(offloaded).splitlines() if line.startswith("  host "))
    at_peak, most, _ = (float(number) for number in of_host.replace("KiB", "").split()[1:])
    assert most >= at_peak

    activations = {unit.name: 1 << 30 for unit in plain.units}
    full = libfsdp.plan(model, mesh, units=blocks, activations=activations)
    assert full.peak["activations"] == 5 << 30
    assert "ward of '" in full.moment


def test_activations_of_modules_without_parameters() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.ReLU())))
    mesh = libfsdp.PlannedMesh(4, device_type="cpu")
    without = libfsdp.plan(model, mesh, units=nn.Linear)
    assert [unit.name for unit in without.units] == ["0", "2", "4"]
    given = libfsdp.plan(model, mesh, units=nn.Linear, activations={"(root)": 1 << 20, "2": 1 << 10})
    assert [unit.activations for unit in given.units] == [1 << 20, 1 << 10, 0]
    assert given.peak["activations"] == (1 << 20) + (1 << 10)
    # What ReLU keeps is what the next layer keeps, too, but for the last one.
    x = torch.empty(1000, 16, device="meta")
    found = libfsdp.plan(model, mesh, units=nn.Linear, inputs=(x,))
    assert found.peak["activations"] == 4 * x.nbytes


def kept_in_a_run(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype | None) -> int:
    """The bytes that autograd keeps of a forward, beside parameters."""
    model = model.to(dtype)
    seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)


@pytest.mark.skipif(not hugging_face.available(), reason="transformers is not installed")
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize("case", ["hf_gpt2", "hf_llama"])
def test_activations(case: str, dtype: torch.dtype | None, *, recomputes: bool) -> None:
    model: Any = seeded(CASES[case])
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.zeros(3, 16, dtype=torch.int64)
    inputs = {"input_ids": tokens, "labels": tokens}
    plan = libfsdp.plan(
        model.to("meta"),
        libfsdp.PlannedMesh(4),
        units=units_of(CASES[case]),
        inputs={name: value.to("meta") for name, value in inputs.items()},
        mp_policy=libfsdp.MixedPrecisionPolicy(param_dtype=dtype),
    )
    real: Any = seeded(CASES[case])
    if recomputes:
        real.gradient_checkpointing_enable({"use_reentrant": False})
    expected = kept_in_a_run(real, inputs, dtype)
    planned = sum(unit.activations for unit in plan.units)
    # A checkpoint keeps GPT-2's mask, which attention does without where it can look into it.
    assert planned == pytest.approx(expected, rel=0.1 if recomputes else 0.01)
    assert plan.peak["activations"] > 0
    given = libfsdp.plan(
        model,
        libfsdp.PlannedMesh(4),
        units=units_of(CASES[case]),
        inputs=inputs,
        activations={plan.units[1].name: 7},
    )
    assert given.units[1].activations == 7


def test_a_table_json_and_a_notebook() -> None:
    with torch.device("meta"):
        model = Transformer(blocks=3)
    plan = libfsdp.plan(model, libfsdp.PlannedMesh(4, replicas=2), units=type(model.blocks[0]))
    assert "blocks.0 to blocks.2 (3, each)" in str(plan)
    assert json.loads(plan.json())["peak"] == plan.peak
    assert set(plan.links) == {"replicate", "shard"}
    assert sum(link["all_gathers"] for link in plan.links.values()) == plan.wire["all_gathers"]
    page = plan._repr_html_()
    assert page.startswith("<div>")
    assert "gathered parameters" in page
    assert "&#x27;" in page or "&#39;" in page or plan.moment in page


class Tied(nn.Module):
    """A parameter in two units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (TypeError, "mesh is 2: give a PlannedMesh", {"mesh": 2}),
        (TypeError, "units is 3", {"units": 3}),
        (TypeError, "options is \\['unit'\\]", {"unit": nn.Linear}),
        (ValueError, "in two units, 'first' and 'second'", {"units": nn.Linear}),
        (ValueError, "\\['block'\\], which are no units", {"activations": {"block": 1}}),
        (ValueError, "give a mesh that has two", {"outer_placements": "optim"}),
        (ValueError, "factor of 4", {"reshard_after_forward": 3}),
        (TypeError, "inputs is tensor", {"inputs": torch.zeros(2, 3)}),
        (ValueError, "optimizer_values is -1: give 0 or more", {"optimizer_values": -1}),
        (ValueError, "activations\\['\\(root\\)'\\] is -5", {"activations": {"(root)": -5}}),
        (AssertionError, "Shard dim 1 is invalid for 1D tensor", {"shard_placement_fn": lambda p: Shard(p.ndim == 1)}),
        (NotImplementedError, "uneven sharding on dim 1", {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}),
        (
            TypeError,
            "a plan has one mesh",
            {"shard_placement_fn": lambda _: libfsdp.ShardPlacementResult(Shard(0), None)},
        ),
        (libfsdp.Error, "'tpu' is not known", {"mesh": libfsdp.PlannedMesh(2, device_type="tpu")}),
        (ValueError, "no module below the root is one: give None", {"units": nn.Conv2d}),
        (ValueError, "microbatches is 0: give 1 or more", {"microbatches": 0}),
    ],
)
def test_errors(error: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        libfsdp.plan(Tied(), **{"mesh": libfsdp.PlannedMesh(4), **arguments})


class Chooses(nn.Module):
    """Its forward depends on values."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.how == "a branch":
            return -x if x.sum() > 0 else x
        return x[x > 0] if self.how == "a mask" else x * x.sum().item()


@pytest.mark.parametrize("how", ["a branch", "a mask", "a number"])
def test_what_depends_on_values_has_its_activations_given(how: str) -> None:
    mesh, module = libfsdp.PlannedMesh(2), Chooses(how)
    with pytest.raises(ValueError, match=r"inputs: the forward of Chooses depends on values .* as activations=\{name: bytes\}"):
        libfsdp.plan(module, mesh, inputs=(torch.ones(2, 4),))
    assert libfsdp.plan(module, mesh, activations={"(root)": 100}).units[0].activations == 100


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "ranks is 0: give 1 or more", {"ranks": 0}),
        (ValueError, "replicas is 0: give 1 or more", {"ranks": 2, "replicas": 0}),
        (ValueError, "ranks is -1", {"ranks": -1}),
        (TypeError, "ranks is 2.5: give a whole number", {"ranks": 2.5}),
        (ValueError, "ranks_per_host is -8", {"ranks": 8, "ranks_per_host": -8}),
        (ValueError, "there is no rank 4 of 4", {"ranks": 2, "replicas": 2, "rank": 4}),
    ],
)
def test_meshes_that_can_not_be(error: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"PlannedMesh: {text}"):
        libfsdp.PlannedMesh(**arguments)


class Around(nn.Module):
    """A unit that uses a parameter of its own between units within it, and the first of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.second(self.first(x).tanh() * self.scale))


AROUND = Case(
    lambda: nn.Sequential(Around(), nn.Linear(16, 16)),
    floats(4, 16),
    lambda m: [m[0].first, m[0].second, m[0], m[1]],
)
TWICE = Case(lambda: nn.Sequential(*2 * [nn.Linear(64, 16), nn.Linear(16, 64)]), floats(4, 64), lambda m: [m[0], m[1]])


@on_ranks(2)
def test_order_of_uses() -> None:
    x = (torch.empty(4, 16, device="meta"),)
    memory = compare(AROUND, {}, inputs=x)
    compare(TWICE, {})
    compare(TWICE, {}, inputs=(torch.empty(4, 64, device="meta"),))
    model = seeded(TWICE)
    before = list(model.parameters())
    libfsdp.plan(model, libfsdp.PlannedMesh(2), inputs=(torch.empty(4, 64, device="meta"),))
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert plan_of(AROUND, {}, 1).memory["unreduced_gradients.peak"] >= memory["unreduced_gradients.peak"]


def test_moments_and_their_picture() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    plan = libfsdp.plan(model, libfsdp.PlannedMesh(4), units=nn.Linear)
    names = [name for name, _ in plan.moments]
    assert names.index("forward of '0'") < names.index("forward of '2'") < names.index("backward of '2'") < names.index("backward of '0'")
    assert max(most["device"] for _, most in plan.moments) == plan.peak["device"]
    assert all(f"{name}: " in plan.svg() for name in names)
    assert plan.svg() in plan._repr_html_()
