"""Quantized parameters whose optimizer state is sharded over an outer dimension, too (HFSDP), and with ZeRO-1 and 2."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.megatron import batch
from support.quantized import Multiply, QuantizedLinear, Quantizer
from support.quantized_training import Alone, model_of, quantizers_of, sharded
from support.ranks import StartRanks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp.megatron import MixedPrecisionPolicy, fully_shard_optimizer

# Sums over two dimensions have the bits of one process where gradients travel in fp32.
WIDE = MixedPrecisionPolicy(
    main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32
)
# A scale for the tensor by an unknown recipe; scales for rows, for 2 as each of 4 ranks has, for 4 as two have; known recipes.
FORMS: list[dict[str, Any]] = [
    {},
    *({"block": block} for block in (1, 2, 4)),
    *({"recipe": recipe} for recipe in ("delayed", "current")),
]


@functools.cache
def outer_ranks_alone() -> dict[str, Any]:
    """The arguments for HFSDP with one inner rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("outer", "dp"))
    mesh["outer", "dp"]._flatten("both")
    return {
        "device_mesh": mesh,
        "dp_shard_dim": "dp",
        "dp_outer_dim": "outer",
        "hybrid_fsdp_group": mesh["both"].get_group(),
        "outer_dp_sharding_strategy": "optim",
        "tp_dim": None,
    }


def train(kind: str, form: dict[str, Any], dtype: torch.dtype, reshards: bool, keeps: bool, **options: Any) -> None:
    alone = Alone(model_of(dtype, **form))
    module = model_of(dtype, **form)
    quantizers = quantizers_of(module)
    model = sharded(
        module,
        kind if dist.get_world_size() > 2 else "fsdp",
        mixed_precision_policy=WIDE,
        keep_fp8_transpose_cache=keeps,
        fsdp_unit_modules=[QuantizedLinear] if reshards else None,
        **(outer_ranks_alone() if kind == "hfsdp" and dist.get_world_size() == 2 else {}),
        **options,
    )
    optimizer = alone.assert_same_training(model, dtype, quantizers)
    if kind != "hfsdp":
        return
    for layer in (
        module[1],
        module[2],
    ):  # Their rows divide by all ranks: main weights and optimizer state are cut by all.
        weight: Any = layer.weight
        rows = weight.size(0) // dist.get_world_size()
        assert type(weight._local_tensor) is torch.Tensor
        assert weight._local_tensor.shape == (rows, 8)
        assert weight._local_tensor.dtype == torch.float32
        assert optimizer.state[weight]["exp_avg"]._local_tensor.shape == (rows, 8)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_hfsdp_trains_as_one_process_does(ranks: StartRanks, form: dict[str, Any]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        ranks(4).run(train, "hfsdp", form, dtype, True, False)
    ranks(4).run(train, "hfsdp", form, torch.bfloat16, False, False)
    ranks(4).run(train, "hfsdp", form, torch.bfloat16, True, True)
    ranks(2).run(train, "hfsdp", form, torch.bfloat16, True, False)


def train_replicated(strategy: str, form: dict[str, Any], dtype: torch.dtype, keeps: bool) -> None:
    train("fsdp", form, dtype, True, keeps, zero_dp_strategy=strategy)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_zero_1_and_2_train_as_one_process_does(ranks: StartRanks, strategy: str, form: dict[str, Any]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        ranks(2).run(train_replicated, strategy, form, dtype, False)
    ranks(4).run(train_replicated, strategy, form, torch.bfloat16, True)


class WithoutBias(nn.Module):
    """A unit that has nothing but a quantized parameter."""

    def __init__(self, form: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        layer = QuantizedLinear(8, 8, dtype, **form)
        dist.broadcast(layer.weight.get_high_precision_init_val(), src=0)
        self.weight = layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Multiply.apply(x, self.weight)
        return made


def bytes_of_forwards(form: dict[str, Any], dtype: torch.dtype) -> list[int]:
    """That one rank of HFSDP sends in gathers: after an update, and again with the same values."""
    layer = WithoutBias(form, dtype)
    model = sharded(nn.Sequential(layer), "hfsdp", fsdp_unit_modules=[WithoutBias])
    x = batch(0, 0, dtype=dtype)
    model(x)
    counts = []
    for is_written in (True, False):
        if is_written:
            model.install_optimized_model_weights()
        model.module[0].reshard()
        before = libfsdp.wire_stats(model.module)["all_gather_bytes"]
        model(x)
        counts.append(int(libfsdp.wire_stats(model.module)["all_gather_bytes"] - before))
    return counts


@on_ranks(4)
def test_rows_travel_over_the_outer_ranks_once_for_each_update() -> None:
    # Each of four ranks has 2 rows of 8 elements, which go to the other outer rank; 4 rows go to the other inner one.
    for dtype in (torch.bfloat16, torch.float32):
        size = dtype.itemsize
        expected: list[tuple[dict[str, Any], int, int]] = [
            ({}, 16 * size, 32 * size),  # as main weights
            ({"block": 1}, 16 + 2 * 4, 32 + 4 * 4),  # in eight bits, and a scale for each row
            ({"block": 2}, 16 + 4, 32 + 2 * 4),
            ({"block": 4}, 16 * size, 32 + 4),  # in eight bits where no block is cut
            ({"recipe": "delayed"}, 16 + 8, 32 + 2 * 8),  # and the scale and the largest value of each rank
            ({"recipe": "current"}, 16 + 4 + 4, 32),  # after the largest value has gone over both dimensions
        ]
        for form, outer, inner in expected:
            assert bytes_of_forwards(form, dtype) == [outer + inner, inner]


@pytest.mark.parametrize("strategy", [1, 2])
@pytest.mark.parametrize(
    ("form", "sent"), [({}, 64), ({"block": 1}, 32 + 4 * 4), ({"recipe": "delayed"}, 40), ({"recipe": "current"}, 36)]
)
@on_ranks(2)
def test_replicas_are_gathered_once_for_each_update(strategy: int, form: dict[str, Any], sent: int) -> None:
    model = sharded(nn.Sequential(WithoutBias(form, torch.bfloat16)), zero_dp_strategy=strategy)
    x = batch(0, 0, dtype=torch.bfloat16)
    model(x)
    model.install_optimized_model_weights()
    counts = []
    for _ in range(2):
        before = libfsdp.wire_stats(model.module)["all_gather_bytes"]
        model(x)
        counts.append(libfsdp.wire_stats(model.module)["all_gather_bytes"] - before)
    assert counts == [sent, 0]


@on_ranks(4)
def test_memory_of_quantized_values() -> None:
    """Between steps there is no quantized tensor of a unit that reshards, and with ZeRO-1 there is one all the time."""
    for kind, strategy, stays in (("hfsdp", 3, False), ("fsdp", 1, True), ("fsdp", 2, True)):
        model = sharded(model_of(torch.bfloat16, block=1), kind, zero_dp_strategy=strategy)
        seen: list[Any] = []
        model.module[1].register_forward_pre_hook(lambda layer, _, seen=seen: seen.append(layer.weight))
        model(batch(0, 0, dtype=torch.bfloat16)).sum().backward()
        assert (seen[0]._data.untyped_storage().nbytes() == 64) == stays
        assert (seen[0]._data.untyped_storage().nbytes() == 0) != stays


@on_ranks(4)
def test_the_engine_has_no_copies() -> None:
    """The engine has no memory for parameters that the extension gathers: neither shards nor whole ones."""
    for dtype in (torch.bfloat16, torch.float32):
        for kind, strategy in (("hfsdp", 3), ("fsdp", 1), ("fsdp", 2)):
            layer = WithoutBias({"recipe": "delayed"}, dtype)
            model = sharded(nn.Sequential(layer), kind, zero_dp_strategy=strategy, fsdp_unit_modules=[WithoutBias])
            model(batch(0, 0, dtype=dtype)).sum().backward()
            stats = libfsdp.memory_stats(model.module)
            assert stats["main_parameters.peak"] == stats["gathered_parameters.peak"] == 0
            assert layer.weight.grad is not None


def quantizations(kind: str, strategy: int) -> list[int]:
    """In forward and in backward of the second step."""
    model = sharded(model_of(torch.bfloat16, block=1), kind, zero_dp_strategy=strategy)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    counts: list[int] = []
    for step in range(2):
        counts = []
        Quantizer.log.clear()
        loss = model(batch(step, dist.get_rank(), dtype=torch.bfloat16)).float().square().mean()
        counts.append(Quantizer.log.count("quantize"))
        Quantizer.log.clear()
        loss.backward()
        counts.append(Quantizer.log.count("quantize"))
        optimizer.step()
        optimizer.zero_grad()
    return counts


def test_what_is_there_is_not_quantized_again(ranks: StartRanks) -> None:
    # Backward finds the last layer gathered; the others' shards have been quantized before the outer ranks gathered them.
    assert ranks(4).run(quantizations, "hfsdp", 3) == [[3, 0]] * 4
    assert ranks(2).run(quantizations, "fsdp", 3) == [[3, 2]] * 2
    assert ranks(2).run(quantizations, "fsdp", 1) == [[3, 0]] * 2


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize(("kind", "strategy"), [("hfsdp", 3), ("fsdp", 1), ("fsdp", 2)])
@on_ranks(4)
def test_checkpoints_and_models_on_meta(tmp_path: Path, kind: str, strategy: int, recipe: str) -> None:
    folder = str(tmp_path)
    options = {"zero_dp_strategy": strategy}
    model = sharded(model_of(torch.bfloat16, recipe=recipe), kind, **options)
    torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.device("meta"):
        empty = model_of(torch.bfloat16, recipe=recipe)
    other = sharded(empty, kind, init_model_with_meta_device=True, **options)
    for layer in empty[1:]:  # They are no part of the memory of a unit that was made on meta.
        assert layer.weight._local_tensor.untyped_storage().resizable()
    x = batch(0, 0, dtype=torch.bfloat16)
    assert not torch.equal(model(x), other(x))
    state = {"model": other.state_dict()}
    assert all(value.dtype == torch.float32 for value in state["model"].values() if isinstance(value, DTensor))
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    assert torch.equal(model(x), other(x))
    other(x).sum().backward()
    fully_shard_optimizer(torch.optim.SGD(other.parameters(), lr=0.1)).step()
    assert not torch.equal(model(x), other(x))
