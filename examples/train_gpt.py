"""Trains a byte-level GPT on text, sharded over processes, from Python.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --steps 400

`make train-python` does this with the package of the build folder. By default the text is LibTorch's own headers, which
every machine with torch has.
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from libfsdp import fully_shard

DIM, LAYERS, HEADS, CONTEXT = 256, 6, 4, 256
SEQUENCES = 4  # per step, over all ranks
LR, WARMUP, CLIP = 1e-3, 30, 1.0


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each behind a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Bytes in, logits of the bytes that follow out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, DIM)
        self.positions = nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith(("out.weight", "mlp.2.weight"))  # to the residual stream, 2 * LAYERS times
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def read_text(path: Path) -> tuple[Tensor, Tensor]:
    """The bytes of a file, or of all text files below a folder; the last twentieth is for validation."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    texts = [file.read_bytes() for file in files]
    text = torch.frombuffer(bytearray().join(text for text in texts if b"\0" not in text), dtype=torch.uint8)
    return text[: -len(text) // 20], text[-len(text) // 20 :]


def cut(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The sequences that start there, and the bytes that follow each of theirs."""
    sequences = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return sequences[:, :-1], sequences[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up, times a cosine from 1 to 0.05."""
    return min(1.0, (step + 1) / WARMUP) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a byte-level GPT on text, sharded over processes.")
    parser.add_argument("--steps", type=int, default=400, help="default: %(default)s, some minutes on two cores")
    headers = Path(torch.__file__).parent / "include"
    parser.add_argument("--data", type=Path, default=headers, help="a text file, or a folder of them: %(default)s")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    train, validation = read_text(options.data)
    torch.manual_seed(1)  # the same first values on all ranks
    model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, options.steps))

    share = SEQUENCES // ranks
    draws = torch.Generator().manual_seed(rank)  # each rank its own part of the batch
    begin = time.monotonic()
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(train) - CONTEXT, (share,), generator=draws)
        loss = loss_of(model, *cut(train, starts))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step in (1, options.steps):
            mean = mean_over_ranks(loss)
            speed = step * SEQUENCES * CONTEXT / (time.monotonic() - begin)
            if rank == 0:
                print(f"step {step:5}  loss {mean:.4f}  {speed:7.0f} tokens/s", flush=True)

    with torch.no_grad():
        starts = torch.linspace(0, len(validation) - CONTEXT - 1, 64).long()[rank::ranks]
        bits = mean_over_ranks(loss_of(model, *cut(validation, starts))) / math.log(2)
    if rank == 0:
        print(f"done: {options.steps} steps in {time.monotonic() - begin:.0f} s, validation {bits:.3f} bits per byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
