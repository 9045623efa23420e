"""Shards by address, of models behind Megatron-FSDP's interface: the boxes of all ranks are those of state_dict()."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from support.boxes import reassembled
from support.marks import on_ranks
from support.megatron import STRATEGIES, batch, plain_model, shard, whole
from support.quantized_training import model_of, sharded
from torch import nn

import libfsdp


def assert_whole(model: nn.Module) -> None:
    found = reassembled(model)
    expected = {name: whole(value).cpu() for name, value in model.state_dict().items()}
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("size", "kind"), [(2, "fsdp"), (4, "hsdp"), (4, "hfsdp")])
@on_ranks("size")
def test_all_boxes_are_the_state_dict(kind: str) -> None:
    for strategy in STRATEGIES if kind != "hfsdp" else STRATEGIES[-1:]:
        model = shard(plain_model(), strategy, kind)
        assert_whole(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before: list[int] = []
        for step in range(3):
            model(batch(step, dist.get_rank())).square().mean().backward()
            model.finish_grad_sync()
            optimizer.step()
            optimizer.zero_grad()
            shards = libfsdp.local_shards(model)
            before = before or [one.tensor.data_ptr() for one in shards]
            assert [one.tensor.data_ptr() for one in shards] == before
            assert_whole(model)
        with shards.reading():
            with pytest.raises(libfsdp.Error, match="by the thread that reads them"):
                optimizer.step()
            writer = threading.Thread(target=optimizer.step)
            writer.start()
            writer.join(0.1)
            assert writer.is_alive()
        writer.join()


@on_ranks(2)
def test_main_parameters_of_quantized_ones() -> None:
    model = sharded(model_of(torch.bfloat16, block=2))
    model(batch(0, dist.get_rank(), dtype=torch.bfloat16)).square().mean().backward()
    model.finish_grad_sync()
    assert_whole(model)
