"""torch.func over sharded modules: transformations of the module as a function of its input, and training through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from libfsdp import fully_shard


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3))


def shard(model: nn.Sequential, **options: Any) -> Any:
    for unit in (model[0], model[2], model):
        fully_shard(unit, **options)
    return model


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: model(x).square().sum()


Transformed = Callable[[nn.Module, torch.Tensor], torch.Tensor]
TRANSFORMS: dict[str, Transformed] = {
    "jvp": lambda model, x: jvp(model, (x,), (x.cos(),))[1],
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(3, 3))[0],
    "grad": lambda model, x: grad(loss_of(model))(x),
    "vmap": lambda model, x: vmap(model)(x),
    "grad for each sample": lambda model, x: vmap(grad(loss_of(model)))(x),
    "jacrev": lambda model, x: jacrev(model)(x),
    "jacfwd": lambda model, x: jacfwd(model)(x),
    "hessian": lambda model, x: hessian(loss_of(model))(x),
}


def train(model: Any, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


@pytest.mark.parametrize("first", ["the transformation", "a step", "an evaluation"])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("options", [{}, {"placements": "no_shard"}])
@on_ranks(2)
def test_transformations(name: str, first: str, options: dict[str, Any]) -> None:
    reference, model = plain(), shard(plain(), **options)
    x = batch(dist.get_rank())
    if first == "a step":
        train(model, x)
        model.zero_grad()
    elif first == "an evaluation":
        with torch.no_grad():
            model(x)
    for _ in range(2):
        torch.testing.assert_close(TRANSFORMS[name](model, x), TRANSFORMS[name](reference, x))
        with torch.no_grad():
            torch.testing.assert_close(TRANSFORMS[name](model, x), TRANSFORMS[name](reference, x))
    torch.stack([reference(batch(rank)).square().sum() for rank in range(2)]).mean().backward()
    train(model, x)
    for (parameter, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        mine = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(mine, q.grad, msg=parameter)


@pytest.mark.parametrize("name", ["jvp", "vmap", "jacfwd"])
@on_ranks(2)
def test_training_through_transformations(name: str) -> None:
    """The transformed module is part of the loss."""
    reference, model = plain(), shard(plain())
    for step in range(2):
        for one in (reference, model):
            one.zero_grad()
        losses = [TRANSFORMS[name](reference, batch(rank, step)).square().sum() for rank in range(2)]
        torch.stack(losses).mean().backward()
        TRANSFORMS[name](model, batch(dist.get_rank(), step)).square().sum().backward()
        for (parameter, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None or not p.grad.full_tensor().any()
            else:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=parameter)
