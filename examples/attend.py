"""A model with a vision tower, of which ranks without images skip the tower.

Every forward needs the shards of all ranks. attend() tells the ranks who uses the tower in this forward, so that a rank
without images skips it, instead of running it on zeros.

torchrun --nproc-per-node 2 examples/attend.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import libfsdp
from libfsdp import fully_shard, optim


class Multimodal(nn.Module):
    """Reads a text, and images if there are some. It knows nothing of sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.tower = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0) for _ in range(2)))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor, images: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        if images is not None:
            x = torch.cat([self.tower(images), x], dim=1)
        return self.head(self.blocks(x)[:, -tokens.shape[1] :].flatten(0, 1))


def attend_to_images(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Runs on every rank before the model's forward."""
    libfsdp.attend(model.tower, kwargs.get("images") is not None)


def train(steps: int = 40) -> tuple[list[float], int]:
    """The losses of this rank, and how often it had no images."""
    torch.manual_seed(0)
    model = Multimodal()
    for module in (model.tower, *model.blocks, model):
        fully_shard(module)
    # The model's own code may also call attend(). A hook serves models that come from a library.
    model.register_forward_pre_hook(attend_to_images, with_kwargs=True)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)

    losses, without = [], 0
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        tokens = torch.randint(32, (4, 6), generator=data)
        images = torch.randn(4, 2, 24, generator=data) if torch.rand((), generator=data) < 0.5 else None
        without += images is None
        loss = nn.functional.cross_entropy(model(tokens, images=images), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, without


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found, skipped = train()
    if dist.get_rank() == 0:
        print(f"loss {found[0]:.3f} at first, {found[-1]:.3f} at last; rank 0 skipped the tower {skipped} times")
    dist.destroy_process_group()
