"""Ranks that differ: FSDP_DEBUG=1 compares each collective before anything is sent, and a time-out ends what no peer comes to."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.errors import raises
from support.marks import on_ranks
from support.ranks import StartRanks
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


def test_each_collective_is_compared(fresh_ranks: StartRanks) -> None:
    ranks = fresh_ranks(2)
    (quiet, collectives), *_ = ranks.run(control_bytes, "0")
    ranks.end()  # The variable is read when connections are made.
    (compared, same), *_ = ranks.run(control_bytes, "1")
    assert same == collectives > 0
    assert compared - quiet >= 32 * collectives


@on_ranks(2, fresh=True)
def test_ranks_that_differ_are_named_at_once() -> None:
    """One rank leaves a layer out."""
    os.environ["FSDP_DEBUG"] = "1"
    sharded = model()
    sharded(torch.ones(2, 4)).sum().backward()
    layer = sharded[0] if dist.get_rank() == 0 else sharded[2]
    with raises(libfsdp.CommError, "unit '0'", "unit '2'", "rank 0", "rank 1"):
        layer.unshard()


@pytest.mark.parametrize("shared", ["1", "0"])
@on_ranks(2, fresh=True)
def test_the_time_out_is_that_of_the_process_group(shared: str) -> None:
    """Rank 1 comes too late."""
    os.environ["FSDP_SHARED_MEMORY"] = shared
    group = dist.new_group(timeout=timedelta(seconds=3))
    assert isinstance(group, dist.ProcessGroup)
    layer: Any = nn.Linear(4, 4)
    fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(7)
    parts = ["Timed out waiting 3000ms", "receiving from rank 1"] if dist.get_rank() == 0 else []
    with raises(libfsdp.CommError, *parts):
        layer(torch.ones(2, 4))
