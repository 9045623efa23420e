"""Whole weights in a stream, of models behind Megatron-FSDP's interface: those of state_dict()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.megatron import batch, plain_model, shard, whole
from support.quantized_training import model_of, sharded
from support.ranks import StartRanks

import libfsdp


def assert_same(model: Any) -> dict[str, torch.Tensor]:
    expected = {name: whole(value).clone() for name, value in model.state_dict().items()}
    for options in ({}, {"bucket_bytes": 200}, {"dtype": torch.bfloat16}, {"bucket_bytes": 200, "ranks": "first"}):
        found = {name: tensor.clone() for bucket in libfsdp.full_weights(model, **options) for name, tensor in bucket}
        if "ranks" in options and dist.get_rank() != 0:
            assert not found
            continue
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value.to(options.get("dtype", value.dtype))), name
    source = libfsdp.WeightSource(model, names=list(expected)[::2])
    assert source.metadata() == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    return expected


def strategies(kind: str) -> None:
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        if kind == "hfsdp" and strategy != "optim_grads_params":
            continue
        model = shard(plain_model(), strategy, kind)
        plain = dict(plain_model().state_dict())
        first = assert_same(model)
        for (name, value), (_, of_plain) in zip(first.items(), plain.items(), strict=True):
            assert torch.equal(value, of_plain), name
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(batch(step, dist.get_rank())).square().mean().backward()
            model.finish_grad_sync()
            assert_same(model)
            optimizer.step()
            optimizer.zero_grad()
            after = assert_same(model)
        assert not torch.equal(next(iter(after.values())), next(iter(first.values())))


@pytest.mark.parametrize(("size", "kind"), [(2, "fsdp"), (4, "hsdp"), (4, "hfsdp")])
def test_the_state_dict(ranks: StartRanks, size: int, kind: str) -> None:
    ranks(size).run(strategies, kind)


def quantized() -> None:
    model = sharded(model_of(torch.bfloat16, block=2))
    for step in range(2):
        model(batch(step, dist.get_rank(), dtype=torch.bfloat16)).square().mean().backward()
        model.finish_grad_sync()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad.to(p.dtype), alpha=0.1)
        assert_same(model)


def test_main_parameters_of_quantized_ones(ranks: StartRanks) -> None:
    ranks(2).run(quantized)
