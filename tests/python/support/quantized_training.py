"""Models with quantized parameters, and their training in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from libfsdp.megatron import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from support import device
from support.megatron import batch, ranks_of, whole
from support.quantized import DelayedQuantizer, Quantized, QuantizedLinear

POLICY = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)


def model_of(dtype: torch.dtype, **options: Any) -> nn.Sequential:
    """Three quantized layers, of which the last has rows that no number of ranks divides."""
    torch.manual_seed(0)
    return nn.Sequential(
        device.move(nn.Linear(8, 8, dtype=dtype)),
        *(QuantizedLinear(8, 8, dtype, **options) for _ in range(2)),
        QuantizedLinear(8, 3, dtype, **options),
    )


def sharded(module: nn.Module, kind: str = "fsdp", **options: Any) -> Any:
    """With the quantized layers as units."""
    options.setdefault("mixed_precision_policy", POLICY)
    options.setdefault("fsdp_unit_modules", [QuantizedLinear])
    return fully_shard_model(module, **{"zero_dp_strategy": 3, **ranks_of(kind), **options})


def quantizers_of(module: nn.Module) -> list[Any]:
    """Of a module that is not sharded."""
    return [p._quantizer for p in module.parameters() if isinstance(p, Quantized)]


def roll(quantizers: Sequence[Any]) -> None:
    """A forward has ended."""
    for quantizer in quantizers:
        if isinstance(quantizer, DelayedQuantizer):
            quantizer.roll()


class Alone:
    """The same training in one process: main weights in fp32, of which each step makes the quantized ones."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.main = [
            (p.get_high_precision_init_val() if isinstance(p, Quantized) else p.detach()).float().clone()
            for p in module.parameters()
        ]
        self.optimizer = torch.optim.AdamW(self.main, lr=0.05)

    def step(self, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The losses of all ranks. Their gradients are added up in pairs."""
        ranks = dist.get_world_size()
        for p, main in zip(self.module.parameters(), self.main, strict=True):
            if isinstance(p, Quantized):
                p._quantizer.update_quantized(main.to(dtype), p)
            else:
                p.data.copy_(main)
        losses: list[torch.Tensor] = []
        gradients: list[list[torch.Tensor]] = []
        for rank in range(ranks):
            loss = self.module(batch(step, rank, dtype=dtype)).float().square().mean()
            if rank == 0:
                roll(quantizers_of(self.module))
            loss.backward()
            losses.append(loss.detach())
            gradients.append([])
            for p in self.module.parameters():
                assert p.grad is not None
                gradients[-1].append(p.grad.float())
                p.grad = None
        while len(gradients) > 1:
            pairs = zip(gradients[::2], gradients[1::2], strict=True)
            gradients = [[a + b for a, b in zip(one, other, strict=True)] for one, other in pairs]
        for main, gradient in zip(self.main, gradients[0], strict=True):
            main.grad = gradient / ranks
        self.optimizer.step()
        return losses

    def assert_same_training(self, model: Any, dtype: torch.dtype, quantizers: Sequence[Any] = ()) -> Any:
        """Four steps of a sharded model, whose `quantizers` get other scales after each forward, have the same bits.

        Returns:
            Its optimizer.
        """
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
        for step in range(4):
            loss = model(batch(step, dist.get_rank(), dtype=dtype)).float().square().mean()
            roll(quantizers)
            loss.backward()
            assert torch.equal(loss.detach(), self.step(step, dtype)[dist.get_rank()])
            optimizer.step()
            optimizer.zero_grad()
        for p, main in zip(model.parameters(), self.main, strict=True):
            assert torch.equal(whole(p.detach()), main)
        return optimizer
