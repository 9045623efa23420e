"""The names of ranges in profiles."""

from __future__ import annotations

from collections import Counter

import torch
from support.marks import on_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

from libfsdp import fully_shard


@on_ranks(2)
def test_ranges_have_the_names_of_fsdp2() -> None:
    """The third step of two blocks and a root has each range as often as FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3))
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(torch.ones(3, 4)).sum().backward()
    found = Counter(event.name for event in profiled.events() if event.name.startswith("FSDP::"))
    assert found == {
        "FSDP::root_pre_forward": 1,
        "FSDP::root_post_backward_callback": 1,
        # The root stays gathered from forward to backward, the last block is still there, the first one is gathered twice.
        "FSDP::all_gather (Sequential)": 1,
        "FSDP::all_gather (2)": 1,
        "FSDP::all_gather (0)": 2,
        **{
            f"FSDP::{what} ({unit})": 1
            for what in ("pre_forward", "post_forward", "pre_backward", "post_backward_reduce")
            for unit in ("Sequential", "0", "2")
        },
    }


@on_ranks(2)
def test_memory_is_shown_by_its_kind() -> None:
    """The profiler shows the bytes that each range of the library allocates, while a model is sharded and trained for a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 50))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        fully_shard(model[0])
        fully_shard(model)
        model(torch.ones(3, 40)).sum().backward()
    found: Counter[str] = Counter()
    for event in profiled.events():
        if event.name.startswith("libfsdp::"):
            found[event.name.removeprefix("libfsdp::")] += event.cpu_memory_usage
    gradients = sum(p.grad.to_local().nbytes for p in model.parameters())
    assert found["main_gradients"] >= gradients
    assert all(found[kind] > 0 for kind in ("main_parameters", "gathered_parameters", "unreduced_gradients"))
