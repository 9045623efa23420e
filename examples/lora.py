"""Freezing and LoRA: a frozen model of which small additions are trained, and saved by themselves.

torchrun --nproc-per-node 2 examples/lora.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from libfsdp import fully_shard, optim


class LoRA(nn.Module):
    """A linear layer that stays as it is, plus a product of two thin matrices that is trained."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # the model begins as it was

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def train(folder: str, steps: int = 60) -> list[float]:
    """The losses of this rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(3)]
    target = nn.Linear(16, 16)  # what the model is to learn; the same on all ranks
    model = nn.Sequential(*(LoRA(layer, rank=4) for layer in layers))
    # Frozen and trained parameters may share a unit: only the trained ones have gradients, which alone are reduced.
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    losses = []
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        x = torch.randn(32, 16)
        loss = (model(x) - target(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    # What was trained, alone: it goes onto the frozen model that everybody has.
    additions = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert not any("base" in name for name in additions)
    dcp.save({"model": additions}, checkpoint_id=f"{folder}/additions")
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    where = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where)
    found = train(where[0])
    if dist.get_rank() == 0:
        print(f"loss {found[0]:.3f} at first, {found[-1]:.3f} at last; the additions are in {where[0]}")
    dist.destroy_process_group()
