"""Kernels that add weight gradients to main_grad themselves: the same updates as with autograd's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.megatron import STRATEGIES, batch, shard, whole
from torch import nn

from libfsdp.megatron import MixedPrecisionPolicy, fully_shard_optimizer


class FusedLinear(nn.Module):
    """Without a bias.

    `way` of its backward: "plain"; "fused", with a tensor of no meaning for autograd, or with None ("none"); or "detached": fused, of a
    weight that autograd does not know.
    """

    def __init__(self, width: int, rows: int, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width) / width**0.5)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = self.weight.detach() if self.way == "detached" else self.weight
        return torch.tanh(_Multiply.apply(x, known, [self.weight], self.way))


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, parameter: list[Any], way: str) -> Any:
        ctx.weight, ctx.way = parameter[0], way
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, saved = ctx.saved_tensors
        of_weight = gradient.t() @ x
        weight = ctx.weight
        if ctx.way != "plain":
            main = weight.get_main_grad()
            assert main.shape == weight.shape
            if getattr(weight, "overwrite_main_grad", False):
                main.copy_(of_weight)
            else:
                main.add_(of_weight)
            weight.grad_added_to_main_grad = True
            of_weight = None if ctx.way == "none" else torch.full_like(saved, 1e6)
        return gradient @ saved, of_weight, None, None


def model_of(way: str, *, overwrites: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    # The ordinary layer is between others, whose hooks come in the same unit.
    made = nn.Sequential(FusedLinear(8, 7, way), nn.Linear(7, 8), FusedLinear(8, 8, way), FusedLinear(8, 3, way))
    for p in made.parameters():
        if overwrites:
            p.overwrite_main_grad = True
    return made


def train(way: str, strategy: str, microbatches: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters after three updates."""
    overwrites = options.pop("overwrites", False)
    model = shard(model_of(way, overwrites=overwrites), strategy, fsdp_unit_modules=[FusedLinear], **options)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    for step in range(3):
        for k in range(microbatches):
            model.set_model_auto_sync(k == microbatches - 1)
            model(batch(10 * step + k, dist.get_rank())).square().mean().backward()
        for p in model.parameters():
            # Each rank has rows of all matrices; of the bias, too.
            assert p.grad is not None
            assert p.main_grad is not None
        optimizer.step()
        optimizer.zero_grad()
    return [whole(p.detach()).clone() for p in model.parameters()]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_same_updates_as_by_autograd(strategy: str, microbatches: int) -> None:
    plain = train("plain", strategy, microbatches, {})
    ways: list[tuple[str, dict[str, Any]]] = [("fused", {}), ("fused", {"overwrites": True}), ("none", {})]
    for way, options in ways:
        for mine, other in zip(train(way, strategy, microbatches, options), plain, strict=True):
            assert torch.equal(mine, other)


@on_ranks(2)
def test_modules_that_are_called_twice() -> None:
    """A module that is called twice has one buffer in a backward, to which both calls add."""
    results = []
    for way in ("plain", "fused"):
        torch.manual_seed(0)
        layer = FusedLinear(8, 8, way)
        model = shard(nn.Sequential(layer, layer), fsdp_unit_modules=[FusedLinear])
        model(batch(0, dist.get_rank())).square().mean().backward()
        results.append(whole(model.module[0].weight.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_dtypes_of_buffers() -> None:
    """The buffer has the dtype in which gradients travel, so nothing of a gradient in fp32 is rounded."""
    seen: list[torch.dtype] = []
    for policy in (
        MixedPrecisionPolicy(main_grads_dtype=torch.float32),
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16),
    ):
        model = shard(model_of("fused").bfloat16(), fsdp_unit_modules=[FusedLinear], mixed_precision_policy=policy)
        leaves: list[Any] = []
        model.module[0].register_forward_pre_hook(lambda module, _, leaves=leaves: leaves.append(module.weight))
        model(batch(0, 0, dtype=torch.bfloat16)).sum()
        seen.append(leaves[0].get_main_grad().dtype)
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16]


@on_ranks(2)
def test_gradients_that_autograd_does_not_get() -> None:
    model = shard(model_of("detached"), fsdp_unit_modules=[FusedLinear])
    with pytest.raises(RuntimeError, match=r"main_grad of parameters \['3\.weight', '2\.weight'\]"):
        model(batch(0, 0)).sum().backward()
    model.zero_grad_buffer()
    # What it has left does not come into the next one.
    for layer in (model.module[0], model.module[2], model.module[3]):
        layer.way = "fused"
    model(batch(0, dist.get_rank())).square().mean().backward()
    plain = shard(model_of("plain"), fsdp_unit_modules=[FusedLinear])
    plain(batch(0, dist.get_rank())).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(p.grad), whole(q.grad))
    with pytest.raises(RuntimeError, match="before a forward"):
        shard(model_of("fused")).module[0].weight.get_main_grad()
