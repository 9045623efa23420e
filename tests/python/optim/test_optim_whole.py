"""What looks beyond single elements: libfsdp.optim's Muon against torch's on whole matrices, and AdamW8bit on cut parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.errors import raises
from support.marks import on_ranks
from support.optimizers import Parameters, give_gradients, keep_alive, sharded, train, whole_state
from support.states import assert_same_state, describe, flatten, load_by_torch, save_by_torch
from support.training import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

import libfsdp

MATRICES = [(64, 16), (32, 64), (64, 64), (16, 128)]
ODD_MATRICES = [(5, 3), (1, 9), (13, 7)]


def by_columns(parameter: nn.Parameter) -> Shard | None:
    """The second of them is cut along its second dimension."""
    return Shard(1) if parameter.shape == (32, 64) else None


@pytest.mark.parametrize(
    ("size", "shapes", "replicas", "exact", "options"),
    [
        (2, MATRICES, 1, True, {}),
        (2, MATRICES, 1, True, {"nesterov": False, "weight_decay": 0.0, "ns_steps": 3}),
        (2, MATRICES, 1, True, {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.5}),
        (4, MATRICES, 1, True, {}),
        (4, MATRICES, 2, True, {}),
        (4, ODD_MATRICES, 1, False, {}),  # Some ranks have nothing of a matrix.
    ],
)
@on_ranks("size")
def test_muon_is_torchs_on_whole_matrices(shapes: Any, replicas: int, exact: bool, options: dict[str, Any]) -> None:
    mine, whole = sharded("libfsdp", shapes, replicas, shard_placement_fn=by_columns), sharded("replica", shapes)
    results = []
    for parameters, module in ((mine, libfsdp.optim), (whole, torch.optim)):
        optimizer = module.Muon(parameters[:-1], lr=0.1, **options)

        def change(optimizer: torch.optim.Optimizer, last: nn.Parameter = parameters[-1]) -> None:
            optimizer.add_param_group({"params": [last], "lr": 0.02})

        train(parameters, optimizer, steps=4, change=change)
        results.append((whole_state(parameters, optimizer), optimizer))
    (got, ours), (expected, theirs) = results
    assert got.keys() == expected.keys()
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    eps = torch.finfo(torch.bfloat16).eps
    for name, value in expected.items():
        if exact:
            assert torch.equal(got[name], value), name
        else:
            # An ulp of fp32 may turn a rounding to bf16; an update has elements below 2, times lr (and the shape's factor, below 2).
            assert (got[name] - value).abs().max() <= 4 * 4 * eps * 0.1 * 2, name
    for parameter in mine:
        momentum = ours.state[parameter]["momentum_buffer"]
        assert describe(momentum)[:5] == describe(parameter.data.detach())[:5]


@on_ranks(4)
def test_muon_on_ranks_that_have_nothing_of_a_matrix_and_no_gradient() -> None:
    """Megatron-FSDP's front end gives no gradient where a rank has no elements."""
    results = []
    for leaves_out in (False, True):
        parameters = sharded("libfsdp", ODD_MATRICES)
        optimizer = libfsdp.optim.Muon(parameters, lr=0.1)
        for step in range(3):
            give_gradients(parameters, step, without=(1,) if step == 1 else ())
            if leaves_out:
                for parameter in parameters:
                    if parameter.to_local().numel() == 0:
                        parameter.grad = None
            had = [parameter.grad is not None for parameter in parameters]
            optimizer.step()
            assert [parameter.grad is not None for parameter in parameters] == had
        results.append(whole_state(parameters, optimizer))
    assert_same_state(results[1], results[0])


@on_ranks(2)
def test_muon_exchanges_twice_per_step() -> None:
    parameters = sharded("libfsdp", MATRICES)
    optimizer = libfsdp.optim.Muon(parameters, lr=0.1)
    train(parameters, optimizer, steps=1)
    with CommDebugMode() as seen:
        train(parameters, optimizer, steps=1)
    assert (
        seen.get_total_counts() == 3
    )  # with the numbers by which ranks see that they have gradients of the same matrices


@on_ranks(4)
def test_muon_refuses_what_is_cut_twice() -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
    weight = nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=r"Muon.*may be cut along one dimension of its mesh, by Shard. Leave it"):
        libfsdp.optim.Muon([weight]).step()


HAS_ONE = "has a gradient on ranks [0], and none on ranks [1]. A matrix is"


@pytest.mark.parametrize(
    ("size", "replicas", "how", "text"),
    [
        (2, 1, "one", f"Muon: parameter 1 of group 1, of the shape [64, 64], {HAS_ONE}"),
        (2, 1, "all", f"Muon: parameter 0 of group 0, of the shape [64, 16], {HAS_ONE}"),
        (
            2,
            1,
            "others",
            "Muon: matrix 0 of group 1 is of the shape [32, 64] on rank 0, and of the shape [64, 64] on rank 1; give",
        ),
        (
            2,
            1,
            "fewer",
            "Muon: matrix 2 of group 1 is of the shape [16, 128] on rank 0, and not there on rank 1; give Muon the",
        ),
        # Ranks 2 and 3 replicate 0 and 1, and would not notice by their own exchanges.
        (4, 2, "one", "has a gradient on ranks [0, 2, 3], and none on ranks [1]."),
    ],
)
@on_ranks("size")
def test_muon_on_ranks_that_differ_is_one_error(replicas: int, how: str, text: str) -> None:
    """All ranks have it, and nothing has changed: the next step is as without it."""
    rank, results = torch.distributed.get_rank(), []
    for failing in (False, True):
        parameters = sharded("libfsdp", MATRICES, replicas, shard_placement_fn=by_columns)
        optimizer = libfsdp.optim.Muon([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
        train(parameters, optimizer, steps=1)
        if failing:
            before = {name: value.clone() for name, value in whole_state(parameters, optimizer).items()}
            give_gradients(parameters, 1, without={"one": [2], "all": [0, 1, 2, 3]}.get(how, []) if rank == 1 else [])
            group = optimizer.param_groups[1]
            if how == "others" and rank == 1:
                group["params"] = [group["params"][i] for i in (1, 0, 2)]
            if how == "fewer" and rank == 1:
                group["params"] = group["params"][:2]
            with raises(libfsdp.Error, text):
                optimizer.step()
            group["params"] = parameters[1:]
            assert_same_state(whole_state(parameters, optimizer), before)
            optimizer.zero_grad()
        train(parameters, optimizer, steps=2)
        results.append(whole_state(parameters, optimizer))
    assert_same_state(results[1], results[0])


CUT = [(64, 256), (8, 1024), (64, 5), (4096,)]


@pytest.mark.parametrize(
    ("size", "replicas", "dtype"), [(2, 1, torch.float32), (2, 1, torch.bfloat16), (4, 2, torch.float32)]
)
@on_ranks("size")
def test_8_bits_do_not_depend_on_the_cut(replicas: int, dtype: torch.dtype) -> None:
    mine, whole = sharded("libfsdp", CUT, replicas, dtype=dtype), sharded("replica", CUT, dtype=dtype)
    results = []
    for parameters in (mine, whole):
        optimizer = libfsdp.optim.AdamW8bit(parameters, lr=0.1, weight_decay=0.1)
        train(parameters, optimizer)
        results.append(whole_state(parameters, optimizer))
    assert_same_state(results[0], results[1])
    dtypes = [results[0][f"0.{name}"].dtype for name in ("state1", "absmax1", "state2", "absmax2")]
    assert dtypes == [torch.uint8, torch.float32] * 2
    assert results[0]["1.absmax1"].shape == (32,)
    assert "2.exp_avg" in results[0], "below min_8bit_size"


def test_8_bits_follow_adamw() -> None:
    """Within what a step of the map may lose: about a hundredth of each update, of lr each."""
    results = []
    for cls in (libfsdp.optim.AdamW8bit, torch.optim.AdamW):
        parameters = sharded("replica", [(64, 256)])
        train(
            [*parameters, nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))], cls(parameters, lr=0.01), steps=4
        )
        results.append(parameters[0].detach())
    difference = (results[0] - results[1]).abs()
    assert difference.max() > 0
    assert difference.mean() < 4 * 0.01 * 0.05


def model_with_8_bits() -> tuple[nn.Module, torch.optim.Optimizer, list[nn.Parameter]]:
    model = Parameters(CUT, torch.bfloat16)
    libfsdp.fully_shard(model, mesh=mesh_of(1))
    keep_alive.append(model)
    parameters = list(model.parameters())
    return model, libfsdp.optim.AdamW8bit(parameters, lr=0.1), parameters


@on_ranks(2)
def test_8_bits_are_saved_and_loaded(tmp_path: Path) -> None:
    """Saved, and loaded by torch: codes stay codes, magnitudes fp32, also where parameters are bf16."""
    model, optimizer, parameters = model_with_8_bits()
    train(parameters, optimizer)
    save_by_torch(tmp_path, model, optimizer)
    other, its, its_parameters = model_with_8_bits()
    train(its_parameters, its, steps=2)
    load_by_torch(tmp_path, other, its)
    loaded, saved = (dict(sorted(flatten(of.state_dict()).items())) for of in (its, optimizer))
    assert_same_state(loaded, saved)
    for of_either, stepped in ((parameters, optimizer), (its_parameters, its)):
        train(of_either, stepped)
    assert_same_state(whole_state(its_parameters, its), whole_state(parameters, optimizer))


@on_ranks(2)
def test_8_bits_refuse_blocks_on_two_ranks() -> None:
    text = "AdamW8bit.*is cut within blocks of 256 elements, or into unequal numbers of them; put it into a group with"
    for shape in ((64, 65), (65, 512), (63, 130)):
        parameters = sharded("libfsdp", [shape])
        assert isinstance(parameters[0], DTensor)
        parameters[0].grad = torch.ones_like(parameters[0])
        optimizer = libfsdp.optim.AdamW8bit(parameters)
        with pytest.raises(ValueError, match=text):
            optimizer.step()
        optimizer.param_groups[0]["min_8bit_size"] = 1 << 20
        optimizer.step()
    with pytest.raises(ValueError, match="Invalid beta"):
        libfsdp.optim.AdamW8bit(parameters, betas=(1.0, 0.9))
