"""Models that are converted, replaced or formed anew between steps: nothing is lost in silence, and what is left over is an error."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.errors import FailsInBackward
from support.marks import on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp import fully_shard


def model(*, frozen: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    sharded[0].requires_grad_(not frozen)
    fully_shard(sharded[0], **options)
    return fully_shard(sharded, **options)


def batch(number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(7 * number + dist.get_rank()))


def gradients(sharded: Any) -> list[torch.Tensor]:
    return [p.grad.full_tensor() for p in sharded.parameters() if p.grad is not None]


def assert_trains_as_new(sharded: Any) -> None:
    expected = model()
    for one in (sharded, expected):
        one(batch(1)).sum().backward()
    torch.testing.assert_close(gradients(sharded), gradients(expected))


@on_ranks(2)
def test_gradients_that_add_up_are_not_dropped() -> None:
    expected = model()
    for number in (0, 1):
        expected.set_requires_gradient_sync(number == 1)
        expected(batch(number)).sum().backward()
    for convert in ("double", "unfreeze"):
        sharded = model(frozen=convert == "unfreeze")
        sharded.set_requires_gradient_sync(False)
        sharded(batch(0)).sum().backward()
        sharded.set_requires_gradient_sync(True)
        if convert == "double":
            assert sharded.to("cpu").float() is sharded  # which changes nothing
            with pytest.raises(libfsdp.Error, match="FSDPSequential is converted, while backwards have left gradients"):
                sharded.double()
        else:
            sharded[0].requires_grad_(True)
            with pytest.raises(libfsdp.Error, match="or are trained now, while backwards have left gradients"):
                sharded(batch(1))
            sharded[0].requires_grad_(False)
        sharded(batch(1)).sum().backward()
        last = gradients(expected)[2 if convert == "unfreeze" else 0 :]
        assert all(map(torch.equal, gradients(sharded), last))
        # Gradients that are reduced are the program's.
        sharded.double()
        sharded[0].requires_grad_(True)
        sharded(batch(2).double()).sum().backward()
        assert libfsdp.memory_stats(sharded)["main_gradients.live"] >= 0


@on_ranks(2)
def test_a_model_may_be_converted_after_a_backward_that_failed() -> None:
    """What a backward that failed has left is nobody's."""
    sharded = model()
    for _ in range(2):
        output = sharded(batch(0))
        with pytest.raises(RuntimeError, match="told to"):
            (output.sum() + FailsInBackward.apply(sharded[0](batch(0))).sum()).backward()
        sharded.double().float()
    assert_trains_as_new(sharded)


@on_ranks(2)
def test_gradients_that_add_up_on_the_host_are_not_dropped() -> None:
    sharded = model(placements="no_shard", offload_policy=CPUOffloadPolicy())
    sharded.set_requires_gradient_sync(False)
    sharded(batch(0)).sum().backward()
    with pytest.raises(libfsdp.Error, match="FSDPSequential is converted, while backwards have left gradients"):
        sharded.double()
    sharded.zero_grad()
    sharded.double()


@pytest.mark.parametrize("steps", [0, 2])
@on_ranks(2)
def test_a_graph_that_outlives_its_model_is_an_error(steps: int) -> None:
    sharded = model()
    for step in range(steps):
        sharded(batch(step)).sum().backward()
        sharded.zero_grad()
    loss = sharded(batch(9)).sum()
    sharded.double()
    with pytest.raises(libfsdp.Error, match=r"converted.*run forward again before backward"):
        loss.backward()
    sharded.float()
    assert_trains_as_new(sharded)


@on_ranks(2)
def test_units_of_another_root_are_not_gathered_ahead() -> None:
    torch.manual_seed(1)
    text, vision = nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    plain = [p.detach().clone() for p in text.parameters()]
    fully_shard(text)
    for layer in vision:
        fully_shard(layer)
    fully_shard(vision)
    for formed in (False, True):
        text.set_modules_to_forward_prefetch([vision[3]])
        text.set_modules_to_backward_prefetch([vision[2], vision[3]])
        output = text(batch(0))
        assert torch.equal(output, torch.nn.functional.linear(batch(0), *plain))
        output.sum().backward()
        text.zero_grad()
        if not formed:
            vision(batch(0)).sum().backward()


@on_ranks(2)
def test_a_unit_may_be_partly_on_meta() -> None:
    torch.manual_seed(2)
    base, adapter = nn.Linear(8, 8, bias=False, device="meta"), nn.Linear(8, 8, bias=False)
    value = adapter.weight.detach().clone()
    sharded: Any = nn.Sequential(base, adapter)
    fully_shard(sharded)
    assert base.weight.is_meta
    assert torch.equal(adapter.weight.full_tensor(), value)
    rows = torch.ones(8 // dist.get_world_size(), 8)
    given = DTensor.from_local(rows, adapter.weight.device_mesh, adapter.weight.placements)
    sharded.load_state_dict({"0.weight": given}, assign=True, strict=False)
    x = torch.ones(2, 8)
    assert torch.equal(sharded(x), torch.nn.functional.linear(x.sum(-1, keepdim=True).expand(2, 8), value))
    sharded(x).sum().backward()
    assert all(p.grad is not None for p in sharded.parameters())


class ReturnsLeaves(nn.Module):
    """Returns a parameter of its own, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.layer(x), self.temperature, x


@on_ranks(2)
def test_leaves_that_are_returned_keep_nothing_alive() -> None:
    torch.manual_seed(3)
    plain = ReturnsLeaves()
    sharded: Any = ReturnsLeaves()
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded)
    x = torch.ones(2, 4, requires_grad=True)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, sharded)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            for one, optimizer in zip((plain, sharded), optimizers, strict=True):
                output, temperature, passed = one(x)
                (output.sum() * temperature.square().sum() + passed.sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
    for one, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other.detach())
    unit = weakref.ref(sharded._get_fsdp_state().unit)
    del one, sharded, optimizers, optimizer, output, temperature, passed
    gc.collect()
    assert unit() is None
