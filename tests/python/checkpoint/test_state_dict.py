"""State of sharded models and optimizers: the same DTensors as FSDP2's, and checkpoints that both read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import device
from support.marks import IMPLEMENTATIONS, on_ranks
from support.ranks import StartRanks
from support.states import assert_same_state, flatten, train_more, trained
from support.training import CASES, DEFAULT, Options, full, seeded, shard, sharded
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from libfsdp import fully_shard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@each_implementation
@pytest.mark.parametrize(
    ("size", "case", "options"),
    [
        *((2, case, DEFAULT) for case in ("mlp", "tied", "batch_norm", "nested", "odd_shapes")),
        # odd_shapes has 5 rows, 3 rows and 1 row for 4 ranks.
        *((4, case, options) for case in ("mlp", "odd_shapes") for options in (DEFAULT, Options(replicas=2))),
    ],
)
@on_ranks("size")
def test_the_same_dtensors_as_fsdp2(case: str, implementation: str, options: Options) -> None:
    """Parameters, gradients and state_dict, before and after training."""
    ours, _ = trained(case, implementation, options, steps=0)
    theirs, _ = trained(case, "fsdp2", options, steps=0)
    assert_same_state(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    assert_same_state(ours.state_dict(), theirs.state_dict())
    for name, parameter in ours.named_parameters():
        assert isinstance(parameter, torch.nn.Parameter), name
        assert isinstance(parameter.data, DTensor), name
    ours, _ = trained(case, implementation, options)
    theirs, _ = trained(case, "fsdp2", options)
    if options.replicas == 1 and dist.get_world_size() == 2:
        assert_same_state(ours.state_dict(), theirs.state_dict())


@each_implementation
@on_ranks(2)
def test_a_part_of_a_unit_is_saved_and_loaded_as_shards(implementation: str) -> None:
    """A module that is no unit by itself, after an evaluation, which leaves the root's parameters gathered."""
    model = sharded("transformer", implementation=implementation)
    batch = torch.zeros(2, 8, dtype=torch.long)
    state = {name: 2 * value for name, value in model.head.state_dict().items()}
    with torch.no_grad():
        before = model(batch)
        saved = model.head.state_dict()
        assert all(isinstance(value, DTensor) for value in saved.values())
        model(batch)
        model.head.load_state_dict(state)
        assert torch.equal(model(batch), 2 * before)
    expected = {name: full(value) for name, value in seeded(CASES["transformer"]).state_dict().items()}
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), 2 * expected[name] if name.startswith("head.") else expected[name]), name


@each_implementation
@pytest.mark.parametrize("case", ["mlp", "odd_shapes"])
@on_ranks(2)
def test_the_same_optimizer_state_as_fsdp2(case: str, implementation: str) -> None:
    """The optimizer's state as torch.distributed.checkpoint asks for it."""
    states = []
    for name in (implementation, "fsdp2"):
        model, optimizer = trained(case, name)
        states.append([get_optimizer_state_dict(model, optimizer, options=o) for o in (StateDictOptions(), FULL)])
    for ours, theirs in zip(*states, strict=True):
        assert_same_state(ours, theirs)
    assert any(isinstance(value, DTensor) for value in flatten(states[0][0]).values())


@each_implementation
@pytest.mark.parametrize("case", ["transformer", "batch_norm", "odd_shapes"])
@on_ranks(2)
def test_full_state_dict_on_rank_0_and_back(case: str, implementation: str) -> None:
    """full_state_dict: plain tensors, on rank 0 alone; and back, sent by rank 0."""
    model, _ = trained(case, implementation)
    expected = {name: full(value) for name, value in model.state_dict().items()}
    from_rank_0: list[Any] = [expected]  # Running statistics differ by rank.
    dist.broadcast_object_list(from_rank_0, src=0)
    state = get_model_state_dict(model, options=FULL)
    assert list(state) == (list(expected) if dist.get_rank() == 0 else [])
    for name, value in state.items():
        assert type(value) is Tensor, f"{name}: {type(value)}"
        assert torch.equal(value, expected[name]), name
    fresh, _ = trained(case, implementation, steps=0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(fresh, state, options=options)
    assert_same_state({name: full(value) for name, value in fresh.state_dict().items()}, from_rank_0[0])


@pytest.mark.parametrize("reader", IMPLEMENTATIONS)
@pytest.mark.parametrize("writer", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ["mlp", "odd_shapes"])
@on_ranks(2)
def test_training_goes_on_from_a_checkpoint_of_either(tmp_path: Path, case: str, writer: str, reader: str) -> None:
    def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    model, optimizer = trained(case, writer)
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path)
    losses = train_more(model, optimizer, case, range(2, 4))
    model, optimizer = trained(case, reader, steps=1)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert train_more(model, optimizer, case, range(2, 4)) == losses


def save_model(case: str, implementation: str, folder: str) -> dict[str, Tensor]:
    """Saves the model alone, by its own state_dict."""
    model, _ = trained(case, implementation)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return {name: full(value) for name, value in model.state_dict().items()}


def load_model(case: str, implementation: str, folder: str) -> dict[str, Tensor]:
    """Loads it in place, as dcp.load does, and by load_state_dict."""
    model, _ = trained(case, implementation, steps=0)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return {name: full(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("reader", IMPLEMENTATIONS)
@pytest.mark.parametrize("writer", IMPLEMENTATIONS)
def test_two_ranks_save_and_four_load(ranks: StartRanks, tmp_path: Path, writer: str, reader: str) -> None:
    saved = ranks(2).run(save_model, "odd_shapes", writer, str(tmp_path / "step"))
    for loaded in ranks(4).run(load_model, "odd_shapes", reader, str(tmp_path / "step")):
        assert_same_state(loaded, saved[0])


@each_implementation
@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
@on_ranks(2)
def test_a_model_without_memory_gets_its_values(implementation: str, assign: bool) -> None:
    """A model on the meta device, sharded, then given values from a whole state."""
    case = CASES["transformer"]
    plain = seeded(case)
    with torch.device("meta"):
        model = case.build()
    model = shard(model, case, implementation, DEFAULT)
    assert all(p.is_meta for p in model.parameters())
    if not assign:
        model.to_empty(device=device.TYPE)
        set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    else:
        expected = sharded("transformer", implementation=implementation)
        model.load_state_dict(expected.state_dict(), assign=True)
    reference = shard(plain, case, "fsdp2", DEFAULT)
    assert_same_state(model.state_dict(), reference.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    losses = [train_more(m, o, "transformer", range(2)) for m, o in zip((model, reference), optimizers, strict=True)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("what", ["load", "assign", "own", "converts"])
@on_ranks(2)
def test_in_inference_mode(what: str) -> None:
    """The same as without it, and the model trains afterwards. FSDP2 fails in it where DTensors are detached."""
    results = []
    for mode in (False, True):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        with torch.inference_mode(mode):
            fully_shard(model[0])
            fully_shard(model)
        state = {name: 2 * value for name, value in model.state_dict().items()}
        with torch.inference_mode(mode), torch.no_grad():
            if what == "load":
                model.load_state_dict(state)
            elif what == "assign":
                model.load_state_dict(state, assign=True)
            elif what == "own":
                model.load_state_dict(model.state_dict())
            else:
                model.to(torch.float64).to(torch.float32)
        model(torch.ones(2, 4)).sum().backward()
        results.append([full(value) for p in model.parameters() for value in (p, p.grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
