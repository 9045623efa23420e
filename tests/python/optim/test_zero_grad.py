"""zero_grad() begins anew: what backwards without synchronization have collected is dropped, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import on_ranks
from support.megatron import STRATEGIES
from support.training import full
from torch import nn

import libfsdp
from libfsdp import fully_shard

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "libfsdp AdamW": lambda parameters: libfsdp.optim.AdamW(parameters, lr=0.1),
    "libfsdp SGD": lambda parameters: libfsdp.optim.SGD(parameters, lr=0.1),
    "fused by libfsdp": lambda parameters: libfsdp.fuse(torch.optim.SGD(parameters, lr=0.1)),
    "libfsdp Muon": lambda parameters: libfsdp.optim.Muon(parameters, lr=0.1),
}


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3))).to(device.TYPE)


def sharded(placements: str) -> Any:
    model = plain()
    fully_shard(model[1], placements=placements)
    fully_shard(model[2], placements=placements)
    return fully_shard(model, placements=placements)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(device.TYPE)


def expected(steps: list[int]) -> list[torch.Tensor]:
    model, ranks = plain(), dist.get_world_size()
    for step in steps:
        for rank in range(ranks):
            (model(batch(step, rank)).square().mean() / ranks).backward()
    return [full(p.grad) for p in model.parameters() if p.grad is not None]


def require_gradients(model: nn.Module, steps: list[int]) -> None:
    for p, wanted in zip(model.parameters(), expected(steps), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(full(p.grad), wanted)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("placements", STRATEGIES)
@pytest.mark.parametrize("which", ["module", *OPTIMIZERS])
@on_ranks(2)
def test_what_is_not_synchronized_is_dropped(placements: str, which: str, to_none: bool) -> None:
    for reduced_before in (False, True):
        model = sharded(placements)
        zero_grad = model.zero_grad if which == "module" else OPTIMIZERS[which](model.parameters()).zero_grad
        if reduced_before:
            model(batch(0, dist.get_rank())).square().mean().backward()
        model.set_requires_gradient_sync(False)
        model(batch(1, dist.get_rank())).square().mean().backward()
        zero_grad(set_to_none=to_none)
        model(batch(2, dist.get_rank())).square().mean().backward()
        model.set_requires_gradient_sync(True)
        model(batch(3, dist.get_rank())).square().mean().backward()
        require_gradients(model, [2, 3])
        zero_grad(set_to_none=to_none)
        model(batch(4, dist.get_rank())).square().mean().backward()
        require_gradients(model, [4])


@pytest.mark.parametrize("to_none", [True, False])
@on_ranks(2)
def test_between_forward_and_backward(to_none: bool) -> None:
    """The root shows whole parameters then: the gradients are those of its shards."""
    model = sharded("optim_grads_params")
    model(batch(0, dist.get_rank())).square().mean().backward()
    loss = model(batch(1, dist.get_rank())).square().mean()
    model.zero_grad(set_to_none=to_none)
    loss.backward()
    require_gradients(model, [1])


@on_ranks(2)
def test_a_finalization_is_dropped() -> None:
    """The next one is not refused for one that was dropped, and the old handle waits for nothing."""
    model = sharded("optim_grads_params")
    model.set_manual_backward_finalization(True)
    model(batch(0, dist.get_rank())).square().mean().backward()
    handle = model.finalize_backward(async_op=True)
    model.zero_grad()
    model(batch(1, dist.get_rank())).square().mean().backward()
    model.finalize_backward()
    handle.wait()
    require_gradients(model, [1])


@on_ranks(2)
def test_within_a_backward_what_is_on_its_way_stays() -> None:
    """An optimizer that steps when the gradient is there drops that of no other unit."""
    model = sharded("optim_grads_params")
    seen = []
    optimizer = libfsdp.optim.SGD(model.parameters(), lr=0.0)

    def step(p: torch.Tensor) -> None:
        seen.append(p)
        optimizer.step()
        optimizer.zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for step_number in range(2):
        model(batch(step_number, dist.get_rank())).square().mean().backward()
    assert len(seen) == 6


@on_ranks(2)
def test_gradients_of_others_stay() -> None:
    """Who zeroes some parameters leaves what the others have collected."""
    model = sharded("optim_grads_params")
    some = libfsdp.optim.SGD(model[1].parameters(), lr=0.1)
    model.set_requires_gradient_sync(False)
    model(batch(0, dist.get_rank())).square().mean().backward()
    some.zero_grad()
    model[1].zero_grad()
    model.set_requires_gradient_sync(True)
    model(batch(1, dist.get_rank())).square().mean().backward()
    for k, (p, wanted) in enumerate(zip(model.parameters(), expected([0, 1]), strict=True)):
        if k != 1:
            torch.testing.assert_close(full(p.grad), wanted)
