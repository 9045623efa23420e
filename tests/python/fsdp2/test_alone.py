"""A rank that has all rows holds and moves nothing twice."""

from __future__ import annotations

import pytest
import torch
from support.marks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard

import libfsdp


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)))


def copies(recorded: torch.profiler.profile) -> int:
    return sum(event.count for event in recorded.key_averages() if event.key == "aten::copy_")


@pytest.mark.parametrize("placements", ["optim_grads_params", "optim"])
@pytest.mark.parametrize("cut", [0, 1])
@on_ranks(1)
def test_whole_parameters_are_the_shards(placements: str, cut: int) -> None:
    """In the same memory; along whatever dimension they are cut. FSDP2 copies them into what it gathers, and gradients twice."""
    plain, model, peer = stack(), stack(), stack()
    for block in model:
        libfsdp.fully_shard(
            block, placements=placements, shard_placement_fn=lambda p: Shard(cut if p.ndim > cut else 0)
        )
    libfsdp.fully_shard(model, placements=placements)
    for block in peer:
        fsdp2(block)
    fsdp2(peer)
    seen: dict[str, int] = {}

    def see(module: nn.Module, _: object) -> None:
        seen.update((name, p.data_ptr()) for name, p in model.named_parameters() if not hasattr(p, "to_local"))

    for block in model:
        block.register_forward_pre_hook(see)
    makers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (plain, model, peer)]
    made: list[int] = []
    for step in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        losses = []
        made = []
        for one, optimizer in zip((plain, model, peer), makers, strict=True):
            optimizer.zero_grad()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
                loss = one(x).square().mean()
                loss.backward()
            made.append(copies(recorded))
            losses.append(loss.item())
            optimizer.step()
        assert losses[0] == losses[1]
        shards = {name: p.to_local().data_ptr() for name, p in model.named_parameters()}
        assert seen == shards
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b.full_tensor())
    stats = libfsdp.memory_stats(model)
    assert stats["gathered_parameters.peak"] == stats["unreduced_gradients.peak"] == stats["slots.peak"] == 0
    assert made[1] <= made[2] / 2
