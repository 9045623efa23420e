"""What is registered in modules after fully_shard: ties are taken in, and what would never be reduced is an error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.marks import on_ranks
from support.ranks import ComparedRanks, StartRanks, run_both
from support.states import assert_equal
from support.training import api
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import parametrizations, weight_norm

import libfsdp
from libfsdp import fully_shard


class Tied(nn.Module):
    """Embeddings and a head, of one shape."""

    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 6)
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, rows, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.block(self.embedding(tokens))))


def plain(rows: int = 8) -> Tied:
    torch.manual_seed(0)
    return Tied(rows)


# The modules of each unit but the root's, whose parameters are those that are left.
UNITS: dict[str, list[list[str]]] = {
    "one unit": [["block"]],
    "root reads": [["embedding"], ["block"]],
    "child reads": [["head"], ["block"]],
    "apart": [["embedding"], ["block"], ["head"]],
    "groups": [["embedding", "block"], ["head"]],
    "group and root": [["block", "embedding"]],
}


def shard(model: nn.Module, units: str = "one unit", by: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    for names in UNITS[units]:
        modules = [model.get_submodule(name) for name in names]
        by(modules if len(modules) > 1 else modules[0], **options)
    return by(model, **options)


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(8, (5,), generator=torch.Generator().manual_seed(10 * step + rank))


def tie(model: Any) -> None:
    model.head.weight = model.embedding.weight


def tie_backwards(model: Any) -> None:
    model.embedding.weight = model.head.weight


Tie = Callable[[Any], None]
TIES: dict[str, Tie] = {"tie": tie, "backwards": tie_backwards}


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def compare_backward(model: nn.Module, reference: nn.Module, step: int) -> None:
    """Runs a forward and a backward on all ranks, and compares loss and gradients with those of the same model unsharded."""
    expected = [
        nn.functional.cross_entropy(reference(tokens(step, r)), tokens(step, r)) for r in range(dist.get_world_size())
    ]
    torch.stack(expected).mean().backward()
    mine = tokens(step, dist.get_rank())
    loss = nn.functional.cross_entropy(model(mine), mine)
    loss.backward()
    torch.testing.assert_close(loss, expected[dist.get_rank()])
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, msg=name, check_dtype=False)


def train_tied(how: str, when: str, units: str, options: dict[str, Any]) -> None:
    """Ties at some moment, and compares with the same model unsharded, on every rank's batch."""
    rows = 8 if units == "one unit" else 9  # which are cut unevenly
    reference = plain(rows)
    if "replicas" in options:
        options = {"mesh": init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))}
    model = shard(plain(rows), units, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, reference)]
    for step in range(4):
        if (when, step) in (("before the first forward", 0), ("after a step", 1)):
            TIES[how](model)
            TIES[how](reference)
        if (when, step) == ("after an evaluation", 1):
            with torch.no_grad():
                model(tokens(0, 0))  # which leaves the root whole
            TIES[how](model)
            TIES[how](reference)
        for optimizer in optimizers:
            optimizer.zero_grad()
        compare_backward(model, reference, step)
        for optimizer in optimizers:
            optimizer.step()
        TIES[how](model) if step > 1 else None  # as often as one likes
    assert model.head.weight is model.embedding.weight
    for (name, value), expected_value in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(whole(value), expected_value, msg=name, check_dtype=False)


@pytest.mark.parametrize("when", ["before the first forward", "after a step", "after an evaluation"])
@pytest.mark.parametrize("how", TIES)
def test_ties_are_taken_in(ranks: StartRanks, how: str, when: str) -> None:
    for options in ({}, {"placements": "optim"}, {"reshard_after_forward": False}, {"placements": "no_shard"}):
        ranks(2).run(train_tied, how, when, "one unit", options)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "optim": {"placements": "optim"},
    "no_shard": {"placements": "no_shard"},
    "kept": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "optim offload": {"placements": "optim", "offload_policy": CPUOffloadPolicy()},
    "float64": {"main_params_dtype": torch.float64},
    "replicas": {"replicas": 2},
}


@pytest.mark.parametrize("when", ["before the first forward", "after a step", "after an evaluation"])
@pytest.mark.parametrize("units", [units for units in UNITS if units != "one unit"])
def test_ties_across_units_are_taken_in(ranks: StartRanks, units: str, when: str) -> None:
    for how in TIES:
        ranks(2).run(train_tied, how, when, units, {})
    for world, options in ((4, "default"), (4, "replicas"), *((2, options) for options in OPTIONS)):
        ranks(world).run(train_tied, "tie", when, units, OPTIONS[options])


class Pair(nn.Module):
    """Two models that are a unit each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = plain(), plain()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.first(tokens) + self.second(tokens)


@on_ranks(2)
def test_ties_of_several_units_are_taken_in_at_once() -> None:
    """Ties within two units at once, while both are whole, and compares with the same model unsharded."""
    reference, model = Pair(), Pair()
    for unit in (model.first, model.second, model):
        fully_shard(unit, reshard_after_forward=False)
    with torch.no_grad():
        model(tokens(0, 0))  # which leaves both units whole
    for pair in (model, reference):
        tie(pair.first)
        tie(pair.second)
    for step in range(2):
        compare_backward(model, reference, step)
    assert model.second.head.weight is model.second.embedding.weight


def tied_as_fsdp2(implementation: str, units: str, when: str, options: str) -> list[Any]:
    """Ties as programs do that FSDP2 takes, and returns what was computed: losses, norms and final values."""
    by = api(implementation).fully_shard
    chosen: dict[str, Any] = {}
    if "bf16" in options:
        chosen["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "offload" in options:
        chosen["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if "replicas" in options:
        chosen["mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    values = plain().state_dict()
    with torch.device("cpu" if when == "tied" else "meta"):
        model = shard(plain(), units, by, **chosen)
    if when == "tied, to_empty":
        tie(model)
        model.to_empty(device="cpu")
    cut = {n: distribute_tensor(values[n], p.device_mesh, p.placements) for n, p in model.named_parameters()}
    if when == "tied, to_empty":
        model.load_state_dict({**cut, "head.weight": cut["embedding.weight"]})
    elif when != "tied":
        model.load_state_dict(cut, assign=True)
    tie(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(3):
        for microbatch in range(2 if "accumulated" in options else 1):
            if "no_sync" in options:
                model.set_requires_gradient_sync(microbatch == 1)
            mine = tokens(2 * step + microbatch, dist.get_rank())
            loss = nn.functional.cross_entropy(model(mine).float(), mine)
            loss.backward()
            seen.append(loss.item())
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    assert model.head.weight is model.embedding.weight
    return [*seen, {name: whole(value) for name, value in model.state_dict().items()}]


@pytest.mark.parametrize("when", ["tied", "assigned and tied", "tied, to_empty"])
@pytest.mark.parametrize("units", [units for units in UNITS if units != "one unit"])
def test_ties_across_units_have_fsdp2s_bits(compared_ranks: ComparedRanks, units: str, when: str) -> None:
    # Where each backward reduces, FSDP2 adds the gradients of units in the order of their backward.
    accumulated = ["accumulated"] if units in ("root reads", "group and root") else []
    for options in ("", "no_sync accumulated", "bf16", "bf16 offload", "replicas", *accumulated):
        assert_equal(*run_both(compared_ranks, 2, tied_as_fsdp2, units, when, options))


@on_ranks(2)
def test_tied_parameters_have_all_uses(tmp_path: Path) -> None:
    """Checkpoints, whole weights and hooks know one parameter with two names, whichever unit has it."""
    folder = str(tmp_path)
    for units in ("root reads", "child reads", "apart"):
        model = shard(plain(), units)
        tie(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        calls: list[torch.Tensor] = []
        model.head.weight.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(whole(p.grad).clone()))
        for step in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens(step, 0)), tokens(step, 0)).backward()
            assert len(calls) == step + 1
            assert torch.equal(calls[-1], whole(model.head.weight.grad))  # of both uses
            optimizer.step()
        expected = {name: whole(value) for name, value in model.state_dict().items()}
        assert torch.equal(expected["head.weight"], expected["embedding.weight"])
        streamed = {name: t.clone() for part in libfsdp.full_weights(model) for name, t in part}
        assert all(torch.equal(streamed[name], value) for name, value in expected.items())
        for part in (model.embedding, model.head):
            if units != "apart":
                break
            ((name, value),) = [(n, t.clone()) for some in libfsdp.full_weights(part) for n, t in some]
            assert torch.equal(value, expected["head.weight"]), name
        held = libfsdp.local_shards(model)
        shards = {one.name: one.tensor for one in held}
        assert shards["head.weight"].data_ptr() == shards["embedding.weight"].data_ptr()
        with torch.no_grad():
            model(tokens(0, 0))
        assert held.is_valid()  # The shard stays with its owner.
        libfsdp.save(f"{folder}/{units}", model, optimizer)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/{units} dcp")
        for how in ("before", "after", "dcp", "assigned", "assigned while whole"):
            torch.manual_seed(1)
            other = shard(Tied(), units, reshard_after_forward=False if how == "assigned while whole" else None)
            if how != "after":
                tie(other)
            its = torch.optim.AdamW(other.parameters(), lr=0.1)
            if how == "dcp":
                found = {"model": get_model_state_dict(other)}
                dcp.load(found, checkpoint_id=f"{folder}/{units} dcp")
                other.load_state_dict(found["model"])
            elif how.startswith("assigned"):
                if "whole" in how:
                    other(tokens(0, 0))
                copies = {name: value.clone() for name, value in model.state_dict().items()}
                other.load_state_dict(copies, assign=True)
                tie(other)
            elif how == "before":
                libfsdp.load(f"{folder}/{units}", other, its)
            else:
                libfsdp.load(f"{folder}/{units}", other, strict=False)
                tie(other)
            assert torch.equal(other(tokens(3, 0)), model(tokens(3, 0))), how
            assert all(torch.equal(whole(value), expected[name]) for name, value in other.state_dict().items()), how


@on_ranks(2)
def test_ties_that_one_shard_cannot_serve_are_refused() -> None:
    model = plain()
    fully_shard(model.embedding, placements="no_shard")
    fully_shard(model)
    tie(model)
    with pytest.raises(ValueError, match=r"'weight' is tied to 'weight' .*in another way .*\[module_a, mod"):
        model(tokens(0, 0))

    model = plain()
    model.other = nn.Linear(6, 8, bias=False)
    model.other.weight = model.head.weight
    shard(model, "root reads")
    model(tokens(0, 0))
    tie(model)
    with pytest.raises(ValueError, match=r"'other.weight' .*only some were tied to parameter 'embedding.weight'"):
        model(tokens(0, 0))
    model.other.weight = model.embedding.weight
    model(tokens(0, 0))

    model = shard(plain(), "root reads")
    model(tokens(0, 0))
    model.head.weight, model.embedding.weight = model.embedding.weight, model.head.weight
    with pytest.raises(ValueError, match="can't move to another unit"):
        model(tokens(0, 0))

    model = shard(plain(), "root reads")
    own = nn.Parameter(model.head.weight.detach().clone())
    tie(model)
    model(tokens(0, 0))
    new = nn.Parameter(model.embedding.weight.detach().clone())
    model.embedding.weight = new
    with pytest.raises(RuntimeError, match=r"'embedding.weight' was replaced, and parameter 'head.weight' .* tied to the one before"):
        model(tokens(0, 0))
    model.head.weight = own  # It is a parameter of its own again.
    model(tokens(0, 0)).sum().backward()
    assert not torch.equal(whole(model.head.weight.grad), whole(model.embedding.weight.grad))


def add_parameter(model: Any) -> None:
    model.block.scale = nn.Parameter(torch.ones(6))


def add_module(model: Any) -> None:
    model.block.adapter = nn.Linear(6, 6)


def replace_module(model: Any) -> None:
    model.head = nn.Linear(6, 8)


def insert(model: Any) -> None:
    model.more = nn.ModuleList([nn.Tanh()])
    model.more.insert(0, nn.Linear(6, 6))


def fill_in(model: Any) -> None:
    model.head.bias = nn.Parameter(torch.zeros(8))


def old_weight_norm(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Programs call it all the same.
        weight_norm(model.block)


def new_weight_norm(model: Any) -> None:
    parametrizations.weight_norm(model.block)


def parametrize(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Softplus())


def delete(model: Any) -> None:
    del model.block.bias
    model.block.bias = None


def delete_directly(model: Any) -> None:
    del model.head._parameters["weight"]


LATE: dict[Callable[[Any], None], str] = {
    add_parameter: r"parameters \['block\.scale'\] were registered after fully_shard",
    add_module: r"parameters \['block\.adapter\.weight', 'block\.adapter\.bias'\] were registered",
    replace_module: r"parameters \['head\.weight', 'head\.bias'\] were registered",
    insert: r"parameters \['more\.0\.weight', 'more\.0\.bias'\] were registered",
    fill_in: r"parameters \['head\.bias'\] were registered",
    old_weight_norm: r"parameters \['.*weight'\] are no longer where fully_shard found them",
    new_weight_norm: r"parameters \['.*weight'\] are no longer where",
    parametrize: r"parameters \['.*weight'\] are no longer where",
    delete: r"parameters \['.*bias'\] are no longer where",
    delete_directly: r"parameters \['.*weight'\] are no longer where",
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("change", LATE)
@on_ranks(2)
def test_late_registrations_are_refused(change: Callable[[Any], None], early: bool) -> None:
    model = shard(plain())
    if not early:
        model(tokens(0, 0)).sum().backward()
    change(model)
    for _ in range(2):  # and again, until it is mended
        with pytest.raises(RuntimeError, match=LATE[change]):
            model(tokens(0, 0))


@on_ranks(2)
def test_frozen_sharded_and_ignored_ones_may_come_late() -> None:
    model = plain()
    ignored = model.head.weight
    fully_shard(model.block)
    fully_shard(model, ignored_params={ignored})
    model(tokens(0, 0)).sum().backward()
    model.teacher = nn.Linear(6, 6).requires_grad_(False)
    model.register_buffer("table", torch.ones(3))
    model.norm = fully_shard(nn.LayerNorm(6))
    model.head.weight = nn.Parameter(torch.zeros(8, 6))  # ignored as before
    model(tokens(0, 0)).sum().backward()
    model.teacher.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"\['teacher\.weight', 'teacher\.bias'\] were registered"):
        model(tokens(0, 0))
    model.teacher.requires_grad_(False)
    model(tokens(0, 0)).sum().backward()


@on_ranks(2)
def test_sharded_modules_may_come_late() -> None:
    """A module that is sharded and then put in place is trained as an unsharded one."""
    reference, model = plain(), shard(plain())
    model(tokens(0, 0)).sum().backward()
    model.zero_grad()
    torch.manual_seed(5)
    reference.head = nn.Linear(6, 8)
    model.head = fully_shard(copy.deepcopy(reference.head))
    for step in range(2):
        torch.stack([reference(tokens(step, rank)).square().sum() for rank in range(2)]).mean().backward()
        model(tokens(step, dist.get_rank())).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, msg=name, check_dtype=False)
