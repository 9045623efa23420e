"""What options and methods of a sharded module change: counts, order and values, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import all_gather
from support.errors import raises
from support.marks import on_ranks
from support.training import three_units as model
from torch import nn
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp import fully_shard
from libfsdp._core.model import states_in


class ToDouble(nn.Module):
    """Converts what passes through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def step(sharded: Any, scale: float = 1.0) -> list[torch.Tensor]:
    """One backward of this rank's own batch: the whole gradients."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    (scale * sharded(torch.randn(3, 4, generator=generator))).sum().backward()
    return [p.grad.full_tensor() for p in sharded.parameters()]


def train(placements: str) -> tuple[list[torch.Tensor], int]:
    """Three steps: the parameters, and the all-gathers of the last one."""
    sharded = model(placements=placements)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    before = 0
    for _ in range(3):
        before = libfsdp.wire_stats(sharded)["all_gathers"] if sharded._get_fsdp_state().model else 0
        step(sharded)
        optimizer.step()
        optimizer.zero_grad()
    gathers = libfsdp.wire_stats(sharded)["all_gathers"] - before
    return [p.full_tensor() for p in sharded.parameters()], gathers


@on_ranks(2)
def test_placements_train_the_same_and_gather_less() -> None:
    (expected, gathers), *others = (train(placements) for placements in ("optim_grads_params", "optim_grads", "optim"))
    assert gathers == 4  # the root, two blocks, and the first of these again in backward
    for parameters, fewer in others:
        assert all(map(torch.equal, parameters, expected))
        assert fewer < gathers or fewer == 3 + 3  # replicated gradients are gathered, too


@on_ranks(2)
def test_unknown_placements_are_refused() -> None:
    with raises(ValueError, "grads_only", "optim_grads"):
        model(placements="grads_only")


def separate_reductions(module: nn.Module) -> set[bool]:
    return {state.unit.separate_reduce_group for _, state, _ in states_in(module) if state.unit is not None}


@pytest.mark.parametrize("before_the_first_forward", [True, False])
@pytest.mark.parametrize("inner", [False, True])
@on_ranks(2)
def test_backwards_that_are_not_the_last_give_gradients(before_the_first_forward: bool, inner: bool) -> None:
    """Each backward gives gradients, whatever is said of it; those of the next one are added."""
    expected = step(model())
    sharded = model()
    if not before_the_first_forward:
        step(sharded)
        sharded.zero_grad()
    (sharded[0] if inner else sharded).set_is_last_backward(False)
    for backwards in (1, 2):
        for ours, value in zip(step(sharded), expected, strict=True):
            torch.testing.assert_close(ours, backwards * value)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    before = [p.full_tensor() for p in sharded.parameters()]
    optimizer.step()
    for p, value, gradient in zip(sharded.parameters(), before, expected, strict=True):
        torch.testing.assert_close(p.full_tensor(), value - 0.5 * 2 * gradient)


@on_ranks(2)
def test_controls() -> None:
    expected = step(model())

    factored = model()
    for module in (factored, factored[0], factored[2]):
        module.set_gradient_divide_factor(8.0)
    assert all(torch.equal(4 * ours, value) for ours, value in zip(step(factored), expected, strict=True))
    # What was set stays set where another dtype makes the unit anew.
    factored.to(torch.float64)
    factored.zero_grad()
    for ours, value in zip(step(factored.to(torch.float32)), expected, strict=True):
        torch.testing.assert_close(4 * ours, value)

    hooked, seen = model(), []

    def tenfold(gradients: torch.Tensor) -> None:
        seen.append(gradients.numel())
        gradients.mul_(10)

    hooked[0].set_all_reduce_hook(tenfold)
    found = step(hooked)
    assert len(seen) == 1
    assert all(torch.equal(ours, 10 * value) for ours, value in zip(found[:2], expected[:2], strict=True))
    assert all(map(torch.equal, found[2:], expected[2:]))

    several: Any = nn.Sequential(nn.Linear(4, 6), ToDouble(), nn.Linear(6, 3).double(), nn.Linear(3, 3).double())
    fully_shard(several[3])
    fully_shard(several)
    several.set_all_reduce_hook(tenfold)
    with pytest.raises(libfsdp.Error, match=r"gradients of unit .* have several dtypes"):
        several(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in several.parameters())  # They are delivered nevertheless.
    once = several[3].weight.grad.full_tensor()
    several.set_all_reduce_hook(lambda _: None)
    several[0].double()
    several.zero_grad()
    several(torch.ones(2, 4).double()).sum().backward()
    assert torch.allclose(several[3].weight.grad.full_tensor(), once)

    custom, calls = model(), []

    def gather(*, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        calls.append(input_tensor.numel())
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)

    custom[0].set_custom_all_gather(gather)
    assert all(map(torch.equal, step(custom), expected))
    assert len(calls) == 2  # forward and backward

    separate = model()
    separate.set_separate_reduce_scatter_group()
    assert all(map(torch.equal, step(separate), expected))
    separate.to(torch.float64)  # other units take the place of those before
    separate.zero_grad()
    for ours, value in zip(step(separate.to(torch.float32)), expected, strict=True):
        torch.testing.assert_close(ours, value)
    assert separate_reductions(separate) == {True}
    separate.set_separate_reduce_scatter_group(False)
    assert separate_reductions(separate) == {False}

    whole = model(reshard_after_forward=False)
    step(whole)
    before = libfsdp.wire_stats(whole)["all_gathers"]
    whole.zero_grad()
    step(whole)
    assert libfsdp.wire_stats(whole)["all_gathers"] - before == 3


@on_ranks(2)
def test_what_stays_on_meta_is_an_error_and_not_zero() -> None:
    with torch.device("meta"):
        sharded = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    fully_shard(sharded)
    first = sharded[0].weight
    value = DTensor.from_local(torch.ones(2, 4), first.device_mesh, first.placements)
    sharded.load_state_dict({"0.weight": value}, assign=True, strict=False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"materialized from meta device.*1\.weight"):
            sharded(torch.ones(2, 4))
    value = DTensor.from_local(torch.ones(2, 4), first.device_mesh, first.placements)
    sharded.load_state_dict({"1.weight": value}, assign=True, strict=False)
    assert torch.equal(sharded(torch.ones(2, 4)), torch.full((2, 4), 16.0))
