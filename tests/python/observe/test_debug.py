"""Ranks that differ: FSDP_DEBUG=1 compares each collective before anything is sent, and a time-out ends what no peer comes to."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import libfsdp
from libfsdp import fully_shard


def model() -> Any:
    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))
    fully_shard(sharded[0])
    fully_shard(sharded[2])
    return fully_shard(sharded)


def control_bytes(debug: str) -> tuple[int, int]:
    """Of one step: bytes of control, and collectives."""
    os.environ["FSDP_DEBUG"] = debug
    sharded = model()
    sharded(torch.ones(2, 4)).sum().backward()
    before = libfsdp.wire_stats(sharded)
    sharded(torch.ones(2, 4)).sum().backward()
    after = libfsdp.wire_stats(sharded)
    collectives = sum(after[key] - before[key] for key in ("all_gathers", "reduce_scatters"))
    return after["control_bytes"] - before["control_bytes"], collectives


def diverge() -> str:
    """One rank leaves a layer out."""
    os.environ["FSDP_DEBUG"] = "1"
    sharded = model()
    sharded(torch.ones(2, 4)).sum().backward()
    layer = sharded[0] if dist.get_rank() == 0 else sharded[2]
    with pytest.raises(libfsdp.CommError) as raised:
        layer.unshard()
    return str(raised.value)


@pytest.fixture
def fresh() -> Any:
    """Ranks whose process groups nobody has used: the variable is read when connections are made."""
    started: list[Ranks] = []

    def start(size: int) -> Ranks:
        started.append(Ranks(size))
        return started[-1]

    yield start
    for ranks in started:
        ranks.end()


def test_each_collective_is_compared(fresh: Any) -> None:
    (quiet, collectives), *_ = fresh(2).run(control_bytes, "0")
    (compared, same), *_ = fresh(2).run(control_bytes, "1")
    assert same == collectives > 0
    assert compared - quiet >= 32 * collectives


def test_ranks_that_differ_are_named_at_once(fresh: Any) -> None:
    for text in fresh(2).run(diverge):
        assert "unit '0'" in text
        assert "unit '2'" in text
        assert "rank 0" in text
        assert "rank 1" in text


def wait_in_vain(shared: str) -> str:
    """Rank 1 comes too late."""
    os.environ["FSDP_SHARED_MEMORY"] = shared
    group = dist.new_group(timeout=timedelta(seconds=3))
    assert isinstance(group, dist.ProcessGroup)
    layer: Any = nn.Linear(4, 4)
    fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(7)
    with pytest.raises(libfsdp.CommError) as raised:
        layer(torch.ones(2, 4))
    return str(raised.value)


@pytest.mark.parametrize("shared", ["1", "0"])
def test_the_time_out_is_that_of_the_process_group(fresh: Any, shared: str) -> None:
    waited, _ = fresh(2).run(wait_in_vain, shared)
    assert "Timed out waiting 3000ms" in waited
    assert "receiving from rank 1" in waited
