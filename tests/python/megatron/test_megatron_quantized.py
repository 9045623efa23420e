"""Parameters that TransformerEngine has quantized, with a stand-in that keeps its protocol."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import on_ranks
from support.megatron import batch, whole
from support.quantized import Quantized, QuantizedLinear, Quantizer, quantized_parameter
from support.quantized_training import Alone, model_of, sharded
from torch import nn
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp.megatron import MixedPrecisionPolicy, fully_shard_optimizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("keeps", "reshards"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize(
    "block", [None, 2]
)  # Rows of 8 and of 3 are cut into blocks of 2, so each rank quantizes its own.
@on_ranks(2)
def test_trains_as_one_process_does(dtype: torch.dtype, keeps: bool, reshards: bool, block: int | None) -> None:
    alone = Alone(model_of(dtype, block=block))
    model = sharded(
        model_of(dtype, block=block),
        keep_fp8_transpose_cache=keeps,
        fsdp_unit_modules=[QuantizedLinear] if reshards else None,
    )
    for p in model.parameters():
        assert type(p._local_tensor) is torch.Tensor
        assert p.dtype == torch.float32
    alone.assert_same_training(model, dtype)


@pytest.mark.parametrize("options", [{}, {"block": 1}, {"recipe": "delayed"}, {"recipe": "current"}])
@on_ranks(2)
def test_inference_may_come_first(options: dict[str, Any]) -> None:
    """The first forward is one of inference, which makes the tensors that training computes with."""
    model, other = (sharded(model_of(torch.bfloat16, **options)) for _ in range(2))
    x = batch(0, dist.get_rank(), dtype=torch.bfloat16)
    with torch.inference_mode():
        model(x)
    for one in (model, other):
        one(x).sum().backward()
        one.finish_grad_sync()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(whole(p.grad), whole(q.grad))
    with torch.no_grad():
        for p in (*model.parameters(), *other.parameters()):
            p.mul_(1.5)
    assert torch.equal(model(x), other(x))


def observe(keeps: bool, block: int | None) -> tuple[list[str], list[str]]:
    """What was done in forward and in backward of a second step, of the first of the quantized units."""
    model = sharded(model_of(torch.bfloat16, block=block), keep_fp8_transpose_cache=keeps)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[Any] = []
    model.module[1].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    logs: list[list[str]] = []
    for step in range(2):
        logs = []
        Quantizer.log.clear()
        loss = model(batch(step, dist.get_rank(), dtype=torch.bfloat16)).float().square().mean()
        logs.append(list(Quantizer.log))
        weight = seen[-1]
        assert weight._data.untyped_storage().nbytes() == 0  # freed after forward
        assert (weight._transpose is not None) == keeps
        Quantizer.log.clear()
        loss.backward()
        logs.append(list(Quantizer.log))
        assert weight._data.untyped_storage().nbytes() == 0
        assert (weight._transpose is not None) == keeps
        optimizer.step()
        optimizer.zero_grad()
    assert type(seen[0]) is Quantized
    assert seen[0] is seen[1]
    assert type(model.module[1].weight) is nn.Parameter or isinstance(model.module[1].weight, DTensor)
    return logs[0], logs[1]


@pytest.mark.parametrize("keeps", [False, True])
@on_ranks(2)
def test_transposed_copies_of_units_that_stay_gathered(keeps: bool) -> None:
    """A unit that stays gathered: backward's copy goes after the next forward."""
    model = sharded(model_of(torch.bfloat16), keep_fp8_transpose_cache=keeps, fsdp_unit_modules=None)
    seen: list[Any] = []
    model.module[1].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    for step in range(2):
        loss = model(batch(step, dist.get_rank(), dtype=torch.bfloat16)).float().square().mean()
        assert (seen[0]._transpose is not None) == keeps
        loss.backward()
        assert seen[0]._transpose is not None


@on_ranks(2)
def test_transposed_copies() -> None:
    # Forward gathers three units, of which backward finds the last one still gathered: that one's layer makes its copy.
    for block in (None, 2):
        forward, backward = observe(False, block)
        assert forward == ["quantize"] * 3
        assert sorted(backward) == ["quantize"] * 2 + ["transpose"] * 3
        forward, backward = observe(True, block)
        # Ranks that quantize their rows do so ahead, for the unit that is gathered next.
        assert (forward if block is None else sorted(forward, reverse=True)) == (
            ["quantize", "transpose"] * 3 if block is None else ["transpose"] * 3 + ["quantize"] * 3
        )
        assert backward == ["quantize"] * 2


def gathered_bytes(dtype: torch.dtype, block: int | None) -> int:
    """Of one forward of all units, on one rank."""
    module = nn.Sequential(*(QuantizedLinear(8, rows, dtype, block=block) for rows in (8, 8, 3)))
    model = sharded(module)
    model(batch(0, 0, dtype=dtype))
    before = libfsdp.wire_stats(model.module)["all_gather_bytes"]
    model.install_optimized_model_weights()
    model(batch(0, 0, dtype=dtype))
    return int(libfsdp.wire_stats(model.module)["all_gather_bytes"] - before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks(2)
def test_what_travels(dtype: torch.dtype) -> None:
    """Main weights travel in the dtype that the parameter says, and rows that ranks quantize in eight bits."""
    # Each rank sends half of the rows, of 3 rows as many as of 4, and of biases as much.
    rows, bias = 4 + 4 + 2, 4 + 4 + 2
    for block in (None, 3):  # Blocks of three rows are cut between the ranks.
        assert gathered_bytes(dtype, block) == (rows * 8 + bias) * dtype.itemsize
    for block in (1, 2):
        scales = rows // block * torch.float32.itemsize
        assert gathered_bytes(dtype, block) == rows * 8 + scales + bias * dtype.itemsize


@on_ranks(2)
def test_checkpoints_hold_main_weights(tmp_path: Any) -> None:
    folder = str(tmp_path)
    model = sharded(model_of(torch.bfloat16))
    torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    torch.manual_seed(5)
    other = sharded(
        nn.Sequential(*(type(one)(8, one.bias.numel(), dtype=torch.bfloat16) for one in model_of(torch.bfloat16)))
    )
    x = batch(0, 0, dtype=torch.bfloat16)
    assert not torch.equal(model(x), other(x))
    state = {"model": other.state_dict()}
    assert all(value.dtype == torch.float32 for value in state["model"].values())
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    assert torch.equal(model(x), other(x))
    # Tensors that are assigned are main weights, too.
    third = sharded(model_of(torch.bfloat16))
    third.module.load_state_dict({k.removeprefix("module."): v.clone() for k, v in state["model"].items()}, assign=True)
    assert torch.equal(model(x), third(x))
    assert libfsdp.wire_stats(third.module)["all_gathers"] > 0


@on_ranks(2)
def test_models_on_meta() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(QuantizedLinear(8, 8, torch.bfloat16) for _ in range(2)))
    torch.manual_seed(dist.get_rank())
    model = sharded(module, init_model_with_meta_device=True)
    torch.manual_seed(0)
    last, first = (QuantizedLinear(8, 8, torch.bfloat16) for _ in range(2))  # The last one is reset first.
    x = batch(0, 0, dtype=torch.bfloat16)
    for name, single in (("0", first), ("1", last)):
        weight: Any = model.module.get_submodule(name).weight
        preserved: Any = single.weight
        assert weight.dtype == torch.float32
        assert torch.equal(whole(weight.detach()), preserved.get_high_precision_init_val().float())
    Quantizer.log.clear()
    assert torch.equal(model(x), last(first(x)))
    assert Quantizer.log.count("quantize") == 2
    model(x).sum().backward()
    fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)).step()
    assert not torch.equal(model(x), last(first(x)))


@on_ranks(2)
def test_frozen_ones_have_their_quantized_values() -> None:
    module = nn.Sequential(QuantizedLinear(8, 8, torch.float32, preserved=False), nn.Linear(8, 3).to(device.TYPE))
    dist.broadcast(module[0].weight._data, src=0)
    dist.broadcast(module[0].weight._scale_inv, src=0)
    module[0].weight.requires_grad_(False)
    before = module[0].weight.dequantize().clone()
    model = sharded(module)
    assert model.module[0].weight.dtype == torch.float32
    torch.testing.assert_close(whole(model.module[0].weight.detach()), before)
    model(batch(0, 0)).sum().backward()
    assert model.module[0].weight.grad is None


@on_ranks(2)
def test_what_cannot_be_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"zero_dp_strategy": "no_shard"}, r"parameter '1\.weight' .*sharded 'no_shard'.* give zero_dp_strategy 1"),
        (
            {"mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=None)},
            r"parameter '1\.weight' .*main_params_dtype is None",
        ),
    ]
    for options, text in cases:
        with pytest.raises(ValueError, match=text):
            sharded(model_of(torch.bfloat16), **options)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = quantized_parameter(torch.ones(4, 4), preserved=False)
    with pytest.raises(ValueError, match=r"parameter '1\.weight' .*preserve_high_precision_init_val=True"):
        sharded(module)
