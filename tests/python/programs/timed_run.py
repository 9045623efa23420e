"""One rank of a run, the second of which is late in step 4: `timed_run.py OUT [SECONDS]`. Writes OUT/report-RANK.json, of steps 3 to 5."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import libfsdp

LATE_STEP = 4
LATE_SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 0.25
step_number = 0


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, number: int, width: int = 64) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.number == 2 and step_number == LATE_STEP and dist.get_rank() == 1:
            time.sleep(LATE_SECONDS)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        z: Tensor = self.mlp(x)
        return x + z


class GPT(nn.Module):
    def __init__(self, blocks: int = 5, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Block(number) for number in range(blocks))
        self.head = nn.Linear(width, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y.clone()  # libfsdp warns of a view


def main(out: Path) -> None:
    global step_number
    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks:
        libfsdp.fully_shard(block)
    libfsdp.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step_number in range(1, 7):
        tokens = torch.randint(128, (4, 33))
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step_number == 5:
            report = libfsdp.step_report(model, steps=3)
            (out / f"report-{dist.get_rank()}.json").write_text(json.dumps(asdict(report)))


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
