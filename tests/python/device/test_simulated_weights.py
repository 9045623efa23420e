"""Weights for programs that change their stream between two tensors, on the simulated device. FSDP_TEST_DEVICE=sim runs it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import on_ranks
from support.training import CASES, Options, batch_of, full, seeded, shard

import libfsdp

pytestmark = pytest.mark.skipif(device.TYPE != "sim", reason="FSDP_TEST_DEVICE is not 'sim'")


@pytest.mark.parametrize("bucket_bytes", [1, 3000, 1 << 20])
@on_ranks(2)
def test_tensors_that_are_taken_on_two_streams(bucket_bytes: int) -> None:
    """As a sender does that packs on one stream while the pack before is sent on another."""
    case = CASES["transformer"]
    model = shard(seeded(case), case, "libfsdp", Options())
    module: Any = torch.get_device_module(device.TYPE)
    streams = [module.Stream(), module.Stream()]
    source = libfsdp.WeightSource(model, bucket_bytes=bucket_bytes)
    for step in range(2):
        case.loss(model, batch_of(case, step, 0, dist.get_rank())).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        pairs, found, k = iter(source), {}, 0
        while True:
            with module.stream(streams[k // 3 % 2]):
                pair = next(pairs, None)
                if pair is None:
                    break
                found[pair[0]] = pair[1].add(0)  # its memory goes, while this may not have run yet
            del pair
            k += 1
        for stream in streams:
            module.current_stream().wait_stream(stream)
        for name, value in model.state_dict().items():
            assert torch.equal(found[name].cpu(), full(value)), name
    torch.accelerator.synchronize()
    assert importlib.import_module("sim_device").take_reports() == []
