"""Parameters that FSDP2 refuses or loses, and gradients of gradients: the same numbers as without sharding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import device
from support.marks import IMPLEMENTATIONS, on_ranks
from support.training import api, full, mesh_of
from torch import Tensor, nn

import libfsdp


class Layer(nn.Module):
    """With a parameter of half precision, one of double, and two without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.narrow = nn.Parameter(torch.randn(5).bfloat16())
        self.wide = nn.Parameter(torch.randn(1, 5, dtype=torch.float64))
        self.no_rows, self.no_columns = nn.Parameter(torch.empty(0, 5)), nn.Parameter(torch.empty(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.linear(x) + self.narrow) * self.wide.to(x.dtype)
        return x.sigmoid() + self.no_rows.sum() + self.no_columns.sum()


class NoElements(nn.Module):
    """A unit of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


def replace_a_parameter(model: Any) -> None:
    """By one of twice its values."""
    model[0].linear.weight = nn.Parameter(2 * model[0].linear.weight.detach())


def to_double(model: Any) -> None:
    model.double()


CHANGES: dict[str, Callable[[Any], None]] = {
    "nothing": lambda _: None,
    "replace": replace_a_parameter,
    "double": to_double,
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_trains_as_without_sharding(change: str) -> None:
    """All ranks have the same batch, so means over them are exact."""
    torch.manual_seed(0)
    plain = nn.Sequential(Layer(), NoElements(), Layer()).to(device.TYPE)
    model = copy.deepcopy(plain)
    for layer in model:
        libfsdp.fully_shard(layer, mesh=mesh_of(1))
    libfsdp.fully_shard(model, mesh=mesh_of(1))
    for step in range(3):
        if step == 1:
            CHANGES[change](model)
            CHANGES[change](plain)
        dtype = plain[0].linear.weight.dtype
        batch = torch.randn(4, 5, dtype=dtype, generator=torch.Generator().manual_seed(step)).to(device.TYPE)
        losses = []
        for either in (model, plain):
            optimizer = torch.optim.SGD(either.parameters(), lr=0.1)
            optimizer.zero_grad()
            loss = either(batch).square().sum()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        assert losses[0] == losses[1]
        for (name, ours), theirs in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert theirs[0] == name
            assert ours.grad is not None
            assert theirs[1].grad is not None
            assert torch.equal(full(ours.grad), full(theirs[1].grad)), name
            assert torch.equal(full(ours), full(theirs[1])), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@on_ranks(2)
def test_gradients_of_gradients(implementation: str) -> None:
    """The loss has the gradient of another one, for whose backward the parameters must still be there."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh()).to(device.TYPE)
    model = copy.deepcopy(plain)
    fsdp: Any = api(implementation)
    units: list[Any] = [model[0], model[2], model]
    for unit in units:
        fsdp.fully_shard(unit, mesh=mesh_of(1), reshard_after_forward=False)
    units[-1].set_reshard_after_backward(False)
    for step in range(3):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(device.TYPE)
        for either in (model, plain):
            x = batch.clone().requires_grad_()
            loss = either(x).square().sum()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + gradient.square().sum()).backward()
        for unit in units:
            unit.reshard()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert ours.grad is not None
                assert torch.equal(full(ours.grad), full(theirs.grad))
                for parameter in (ours, theirs):
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
                assert torch.equal(full(ours), full(theirs))
