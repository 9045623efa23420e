"""The benchmark's model, operator for operator that of examples/gpt.cpp, and its data: all do the same work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FILL_CHUNK = 1 << 14  # Elements filled at a time: temporaries small enough not to show in the resident set.


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a model; the fields that examples/gpt.h has too carry the same names."""

    vocab: int
    dim: int
    layers: int
    heads: int
    context: int
    rotary_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def hidden(self) -> int:
        """Width of SwiGLU: 8/3 of dim, rounded up to a multiple of 64."""
        return (self.dim * 8 // 3 + 63) // 64 * 64


def rotary_table(config: GPTConfig) -> Tensor:
    """Cosines and sines, [context, head_dim / 2, 2]."""
    head_dim = config.dim // config.heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / -head_dim
    angles = torch.outer(torch.arange(config.context, dtype=torch.float64), torch.pow(config.rotary_base, exponents))
    return torch.stack((angles.cos(), angles.sin()), -1).float()


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turns neighbouring elements of x, [batch, time, 2, heads, head_dim], as complex numbers."""
    turns = torch.view_as_complex(rotary.float()).unsqueeze(1).unsqueeze(1)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class GPTBlock(nn.Module):
    """Causal self-attention and a SwiGLU layer, each behind a norm and around a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.attention_out = nn.Linear(config.dim, config.dim, bias=False)
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.mlp_out = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        y = x + self.attend(self.attention_norm(x), rotary)
        return y + self.swiglu(self.mlp_norm(y))

    def attend(self, x: Tensor, rotary: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).split_with_sizes((2, 1), 2)
        queries, keys = rotate(parts[0], rotary).unbind(2)
        values = parts[1].squeeze(2)
        y = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True
        )
        return self.attention_out(y.transpose(1, 2).flatten(-2))

    def swiglu(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.mlp_out(F.silu(gate) * up)


class GPT(nn.Module):
    """Embedding, blocks, norm, and an output layer of its own (untied)."""

    rotary: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.register_buffer("rotary", rotary_table(config))

    def forward(self, tokens: Tensor) -> Tensor:
        rotary = self.rotary.narrow(0, 0, tokens.size(1))
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of the targets [batch, time]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def fill_parameters(model: nn.Module) -> None:
    """Fills matrices with what looks random (deviation 0.02) by a formula that contender.cpp repeats; norms stay 1."""
    for index, parameter in enumerate(model.parameters()):
        if parameter.dim() < 2:
            continue
        for first, part in enumerate(parameter.view(-1).split(FILL_CHUNK)):
            positions = torch.arange(part.numel(), dtype=torch.float64) + first * FILL_CHUNK
            part.copy_(torch.frac(torch.sin(positions * 12.9898 + index * 78.233) * 43758.5453) * 0.0346)


@dataclass(frozen=True)
class BatchPlace:
    """Which batch: the same place gives the same tokens in every contender."""

    step: int
    rank: int
    world: int


def draw_batch(config: GPTConfig, sequences: int, place: BatchPlace) -> tuple[Tensor, Tensor]:
    """Tokens [sequences, context] and the tokens that follow each, by a formula that contender.cpp repeats."""
    count = sequences * (config.context + 1)
    x = torch.arange(count) + count * (place.step * place.world + place.rank)
    tokens = ((x * x * 48271 + x * 7) % 1_000_003 % config.vocab).view(sequences, config.context + 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
