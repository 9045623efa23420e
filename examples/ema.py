"""An exponential moving average of the weights, kept in shards, evaluated, and saved with the model.

torchrun --nproc-per-node 2 examples/ema.py
"""

from __future__ import annotations

import copy
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import libfsdp

DECAY = 0.9


def shard(model: nn.Sequential) -> nn.Sequential:
    """The model, a unit per layer."""
    for layer in model[:-1]:
        libfsdp.fully_shard(layer)
    libfsdp.fully_shard(model)
    return model


@torch.no_grad()
def update(average: nn.Module, model: nn.Module) -> None:
    """Each rank averages its own shards: nothing is sent."""
    for mean, value in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(value, 1 - DECAY)
    for mean, value in zip(average.buffers(), model.buffers(), strict=True):
        mean.copy_(value)


def train(folder: str, steps: int = 60) -> tuple[float, float]:
    """The losses of the model and of its average on the same data."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    average = shard(copy.deepcopy(plain).requires_grad_(False))  # a sharded model can't be copied: before fully_shard
    model = shard(plain)
    optimizer = libfsdp.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        x = torch.randn(16, 8)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update(average, model)

    # Both in one checkpoint, by the names of a module that holds them.
    both = nn.ModuleDict({"model": model, "average": average})
    libfsdp.save(f"{folder}/step-{steps}", both, optimizer)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    libfsdp.load(f"{folder}/step-{steps}", both, optimizer)

    with torch.no_grad():
        x = torch.randn(256, 8)
        expected = x.sum(1, keepdim=True)
        losses = [(one(x) - expected).square().mean().item() for one in (model, average)]
    return losses[0], losses[1]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    where = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where)
    of_model, of_average = train(where[0])
    if dist.get_rank() == 0:
        print(f"loss of the model {of_model:.3f}, of its average {of_average:.3f}; the checkpoint is in {where[0]}")
    dist.destroy_process_group()
