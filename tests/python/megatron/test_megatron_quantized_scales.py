"""Quantized parameters with one scale per tensor: each rank quantizes its rows, and all have the values of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.collectives import all_gather
from support.errors import raises_everywhere
from support.marks import on_ranks
from support.megatron import batch, whole
from support.quantized import CurrentQuantizer, DelayedQuantizer, Quantized, QuantizedLinear
from support.quantized_training import Alone, model_of, quantizers_of, roll, sharded
from support.ranks import StartRanks
from torch import nn

import libfsdp
from libfsdp.megatron import MixedPrecisionPolicy, fully_shard_optimizer

WIDE = MixedPrecisionPolicy(
    main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32
)


def expect_equal(mine: list[Any], alone: list[Any]) -> None:
    """Of quantizers: their scales, and what they have recorded."""
    for one, other in zip(mine, alone, strict=True):
        assert torch.equal(one.scale, other.scale)
        assert torch.equal(one.amax, other.amax)


def train(kind: str, strategy: str, recipe: str, dtype: torch.dtype, keeps: bool) -> None:
    """Scales change between forward and backward, as TransformerEngine's do; the values that backward computes with do not."""
    alone = Alone(model_of(dtype, recipe=recipe))
    module = model_of(dtype, recipe=recipe)
    quantizers = quantizers_of(module)
    model = sharded(
        module, kind, zero_dp_strategy=strategy, mixed_precision_policy=WIDE, keep_fp8_transpose_cache=keeps
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    seen: dict[nn.Module, Any] = {}
    for layer in module:
        layer.register_forward_pre_hook(lambda one, _: seen.__setitem__(one, one.weight))
    for step in range(7):
        if step == 4:  # TransformerEngine's modules give their weights other quantizers.
            for one, other in zip(list(module)[1:], list(alone.module)[1:], strict=True):
                seen[one]._quantizer = type(seen[one]._quantizer)()
                other.weight._quantizer = type(other.weight._quantizer)()
            quantizers = [seen[one]._quantizer for one in list(module)[1:]]
        loss = model(batch(step, dist.get_rank(), dtype=dtype)).float().square().mean()
        roll(quantizers)
        loss.backward()
        assert torch.equal(loss.detach(), alone.step(step, dtype)[dist.get_rank()])
        expect_equal(quantizers, quantizers_of(alone.module))
        optimizer.step()
        optimizer.zero_grad()
    for p, main in zip(model.parameters(), alone.main, strict=True):
        assert torch.equal(whole(p.detach()), main)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("keeps", [False, True])
def test_trains_as_one_process_does(ranks: StartRanks, recipe: str, keeps: bool) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        ranks(2).run(train, "fsdp", "optim_grads_params", recipe, dtype, keeps)
    ranks(4).run(train, "fsdp", "optim_grads_params", recipe, torch.bfloat16, keeps)
    ranks(4).run(train, "hsdp", "optim_grads_params", recipe, torch.bfloat16, keeps)


def bytes_of_forwards(recipe: str, dtype: torch.dtype) -> list[tuple[int, int]]:
    """That one rank sends, and in how many gathers: after an update, and again with the same values."""
    model = sharded(model_of(dtype, recipe=recipe))
    x = batch(0, 0, dtype=dtype)
    model(x)
    counts: list[tuple[int, int]] = []
    for is_written in (True, False):
        if is_written:
            model.install_optimized_model_weights()
        before = libfsdp.wire_stats(model.module)
        model.module[1](x)  # one quantized layer, of 8 rows
        model.module[1].reshard()
        after = libfsdp.wire_stats(model.module)
        sent, gathers = (int(after[key] - before[key]) for key in ("all_gather_bytes", "all_gathers"))
        counts.append((sent, gathers))
    return counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks(2)
def test_eight_bits_travel(dtype: torch.dtype) -> None:
    # Each rank sends half of 8 rows of 8 elements, and of the bias. With delayed scaling the scale and the largest value go along, with
    # current scaling the largest values have been exchanged before, once for each update.
    rows = 4 * 8 + 4 * dtype.itemsize
    assert bytes_of_forwards("delayed", dtype) == [(rows + 8, 1), (rows + 8, 1)]
    assert bytes_of_forwards("current", dtype) == [(rows + 4, 2), (rows, 1)]


@on_ranks(2)
def test_the_largest_values_of_a_unit_travel_together() -> None:
    module = nn.Sequential(*(QuantizedLinear(8, 8, torch.bfloat16, recipe="current") for _ in range(3)))
    model = sharded(module, fsdp_unit_modules=None)
    model(batch(0, 0, dtype=torch.bfloat16))
    before = libfsdp.wire_stats(model.module)["all_gathers"]
    model.install_optimized_model_weights()
    model(batch(0, 0, dtype=torch.bfloat16))
    assert libfsdp.wire_stats(model.module)["all_gathers"] - before == 2


@pytest.mark.parametrize(("size", "kind"), [(2, "fsdp"), (4, "hfsdp")])
@on_ranks("size")
def test_a_function_for_gathers_gathers_them(kind: str) -> None:
    """All gathers go through the program's function, also that of the largest values."""
    model, other = (sharded(model_of(torch.bfloat16, recipe="current"), kind) for _ in range(2))
    sizes: list[int] = []

    def gather(*, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        sizes.append(input_tensor.nbytes)
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)

    for module in model.module.modules():
        if isinstance(module, libfsdp.FSDPModule):
            module.set_custom_all_gather(gather)
    x = batch(0, dist.get_rank(), dtype=torch.bfloat16)
    assert torch.equal(model(x), other(x))
    model(x).sum().backward()
    assert 4 in sizes


@on_ranks(2, 4)
def test_all_ranks_record_the_largest_value_of_the_whole() -> None:
    """The largest value lies in one rank's rows, and all ranks record it, once for each update."""
    values = torch.full((4, 8), 0.5)
    values[3, 2] = -3.0
    layer = QuantizedLinear(8, 4, torch.float32, recipe="delayed")
    layer.weight.get_high_precision_init_val().copy_(values)
    quantizer: Any = layer.weight._quantizer
    model = sharded(nn.Sequential(layer))
    quantizer.amax.zero_()
    x = torch.ones(2, 8)
    model(x)
    assert quantizer.amax.tolist() == [3.0]
    quantizer.amax.zero_()
    model.module[0].reshard()
    loss = model(x).sum()
    model.module[0].reshard()
    loss.backward()  # The same values have been gathered twice more.
    assert quantizer.amax.tolist() == [0.0]
    with torch.no_grad():
        layer.weight.mul_(2)
    quantizer.amax.fill_(100.0)  # What was recorded stays, if it is more.
    model(x)
    assert quantizer.amax.tolist() == [100.0]
    model.install_optimized_model_weights()
    quantizer.amax.zero_()
    model(x)
    assert quantizer.amax.tolist() == [6.0]


@on_ranks(2)
def test_frozen_ones_keep_their_scale() -> None:
    """It is quantized once, with the scale that it had then."""
    layer = QuantizedLinear(8, 8, torch.float32, recipe="delayed")
    dist.broadcast(layer.weight.get_high_precision_init_val(), src=0)
    layer.weight.requires_grad_(False)
    quantizer: Any = layer.weight._quantizer
    model = sharded(nn.Sequential(layer))
    x = torch.ones(2, 8)
    first = model(x)
    quantizer.roll()
    quantizer.roll()
    model.install_optimized_model_weights()
    assert torch.equal(model(x), first)
    assert quantizer.amax.tolist() == [0.0]


@on_ranks(2)
def test_scales_that_differ_are_an_error_on_every_rank() -> None:
    reason = "1/scale is [0.20000000298023224, 0.25]" if device.TYPE == "cpu" else "and so did the values of the last update"
    parts = ("parameter '2.weight' is quantized with delayed scaling", f"({reason})", "reduce_amax=True")
    module = model_of(torch.bfloat16, recipe="delayed")
    quantizer = quantizers_of(module)[1]
    quantizer.scale.fill_(4.0 + dist.get_rank())
    model = sharded(module)
    with raises_everywhere(ValueError, *parts):
        model(batch(0, 0, dtype=torch.bfloat16))
        assert device.TYPE != "cpu", "a device is not waited for, so there the next values tell it"
        model.install_optimized_model_weights()
        model(batch(0, 0, dtype=torch.bfloat16))
    quantizer.scale.fill_(4.0)  # The way out.
    expected = model_of(torch.bfloat16, recipe="delayed")
    quantizers_of(expected)[1].scale.fill_(4.0)
    assert torch.equal(model(batch(0, 0, dtype=torch.bfloat16)), sharded(expected)(batch(0, 0, dtype=torch.bfloat16)))



@on_ranks(2)
def test_quantizers_that_reduce_themselves_get_all_rows() -> None:
    """A quantizer that exchanges the largest values itself gets the whole tensor, as ever."""
    layer = QuantizedLinear(8, 8, torch.bfloat16, recipe="current")
    quantizer: Any = layer.weight._quantizer
    quantizer.with_amax_reduction = True
    model = sharded(nn.Sequential(layer))
    model(batch(0, 0, dtype=torch.bfloat16))
    before = libfsdp.wire_stats(model.module)["all_gather_bytes"]
    model.install_optimized_model_weights()
    model(batch(0, 0, dtype=torch.bfloat16))
    assert libfsdp.wire_stats(model.module)["all_gather_bytes"] - before == (4 * 8 + 4) * 2


def test_the_stand_in_tells_its_recipes() -> None:
    values = torch.randn(4, 8).to(device.TYPE)
    delayed, current = DelayedQuantizer(), CurrentQuantizer()
    delayed.scale.fill_(127 / float(values.abs().amax()))
    one, other = delayed(values), current(values)
    assert type(one) is type(other) is Quantized
    assert torch.equal(one._data, other._data)
    assert delayed.amax == current.amax == values.abs().amax()
