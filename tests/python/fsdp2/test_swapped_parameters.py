"""Sharded modules under torch.__future__.set_swap_module_params_on_conversion(True): conversions exchange tensors below the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from torch import nn

from libfsdp import fully_shard


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def shard(model: nn.Sequential, **options: Any) -> Any:
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def compare(model: Any, reference: nn.Module) -> None:
    """A step of both: losses, gradients and parameters."""
    dtype = next(reference.parameters()).dtype
    batches = [torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(2)]
    for one in (model, reference):
        one.zero_grad()
    torch.stack([reference(batch).square().sum() for batch in batches]).mean().backward()
    model(batches[dist.get_rank()]).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.dtype == q.dtype
        torch.testing.assert_close(whole(p.grad), q.grad, msg=name)
    for one in (model, reference):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q.detach(), msg=name)


def load(model: Any) -> None:
    model.load_state_dict({name: 2 * value.clone() for name, value in model.state_dict().items()})


def load_part(model: Any) -> None:
    model[2].load_state_dict({name: -value.clone() for name, value in model[2].state_dict().items()})


def assign(model: Any) -> None:
    model.load_state_dict({name: 3 * value.clone() for name, value in model.state_dict().items()}, assign=True)


def load_twice(model: Any) -> None:
    load(model)
    load_part(model)


def to_double(model: Any) -> None:
    model.to(torch.float64)


def through_half(model: Any) -> None:
    model.bfloat16()
    model.float()


def part_to_itself(model: Any) -> None:
    model[2].to("cpu")


def apply_inside(model: Any) -> None:
    model._apply(lambda tensor: tensor * 2)


CHANGES = [load, load_part, assign, load_twice, to_double, through_half, part_to_itself, apply_inside]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [{}, {"placements": "optim"}, {"placements": "no_shard"}])
@on_ranks(2)
def test_conversions(change: Callable[[Any], None], options: dict[str, Any], early: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        reference, model = plain(), shard(plain(), **options)
        if not early:
            compare(model, reference)
        for _ in range(2):
            for one in (model, reference):
                one.zero_grad()
                change(one)
            compare(model, reference)
        with torch.no_grad():
            model(torch.ones(1, 5, dtype=next(reference.parameters()).dtype))
        if change is part_to_itself:
            model.reshard()  # It exchanges what the module shows.
        change(model)  # while the root may be whole
        change(reference)
        compare(model, reference)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
