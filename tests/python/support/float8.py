"""torchao's float8, whose weights travel in eight bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.clients import STEPS, Trained, values
from support.training import full_gradients


def float8_model(*, sharded: bool) -> nn.Sequential:
    """Linear layers that multiply in float8, the same on every rank."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=sharded, emulate=True))
    return model


def float8_loss(model: Callable[..., Any], step: int, rank: int) -> Tensor:
    """Of a rank's batch."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = (model(x) - x).square().mean()
    return loss


def with_torchao(*options: str) -> tuple[Trained, int]:
    """Option "precompute": all scales at once after the optimizer's step. Also gives the bytes that the last forward received."""
    libfsdp = importlib.import_module("libfsdp")
    with libfsdp.installed():
        from torch.distributed.fsdp import fully_shard
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        model: Any = float8_model(sharded=True)
        for module in (*model, model):
            fully_shard(module)
        trained = Trained()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(STEPS):
            loss = float8_loss(model, step, dist.get_rank())
            loss.backward()
            trained.losses.append(loss.item())
            trained.gradients.append(full_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
            if "precompute" in options:
                precompute_float8_dynamic_scale_for_fsdp(model)
        trained.parameters = values(model)
        before = libfsdp.wire_stats(model)["all_gather_bytes"]
        float8_loss(model, 0, 0)
        return trained, libfsdp.wire_stats(model)["all_gather_bytes"] - before


def torchao_in_one_process(world: int) -> Trained:
    """The same training on replicas."""
    model = float8_model(sharded=False)
    trained = Trained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world):
            (float8_loss(model, step, rank) / world).backward()
        trained.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    trained.parameters = {name: p.detach() for name, p in model.named_parameters()}
    return trained
