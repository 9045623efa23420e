"""Models that tests train: small, and each with something that sharding could get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 37
Batch = tuple[Tensor, ...]


def no_units(_: nn.Module) -> list[nn.Module]:
    """The root is the only unit."""
    return []


@dataclass(frozen=True)
class Case:
    """A model, its units below the root (children before their parents), and a step of its training."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    units: Callable[[Any], list[nn.Module]] = no_units
    loss: Callable[[Callable[..., Any], Batch], Tensor] = lambda model, batch: model(*batch).square().mean()
    called_twice: bool = False  # Whether a unit is called twice in a forward.


def floats(*shape: int) -> Callable[[torch.Generator], Batch]:
    """Batches of one tensor of normal numbers."""
    return lambda generator: (torch.randn(*shape, generator=generator),)


def tokens(sequences: int, length: int) -> Callable[[torch.Generator], Batch]:
    """Batches of one tensor of token ids."""
    return lambda generator: (torch.randint(VOCABULARY, (sequences, length), generator=generator),)


def next_token_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Mean cross-entropy of each token after the first."""
    logits = model(batch[0]).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


class MLP(nn.Module):
    """Three layers of a few rows, whose numbers divide by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(6, 13), nn.Linear(13, 11), nn.Linear(11, 3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


class Block(nn.Module):
    """Attention and a layer of width 2 dim, each behind a norm and around a residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList((nn.LayerNorm(dim), nn.LayerNorm(dim)))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Blocks between an embedding and a head, which may be one tensor."""

    def __init__(self, blocks: int = 2, dim: int = 16, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads=2) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class PartlyUnused(nn.Module):
    """A unit that no rank uses, and a parameter of a used unit that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 4)
        self.first.register_parameter("never", nn.Parameter(torch.randn(3, 5)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class WithBatchNorm(nn.Module):
    """Buffers of running statistics, which differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()) for channels in (3, 5)
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Nested(nn.Module):
    """Units within units, with parameters of their own, the inner one called twice."""

    class Outer(nn.Module):
        """A parameter around an inner unit."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(7))
            self.inner = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.inner(self.inner(x))

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList((self.Outer(), self.Outer()))
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return x + self.bias


class OddShapes(nn.Module):
    """Parameters of one element, of one row, of fewer rows than ranks, and of four dimensions."""

    SHAPES = ((1,), (1, 6), (3, 6), (5, 6), (2, 1, 3, 6), (7, 1))

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(shape) for shape in self.SHAPES)
        self.linear = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total = self.linear(x).sum(-1)
        for part in self.parts:
            total = total + (x.unsqueeze(1) * part.reshape(-1, part.size(-1))).tanh().sum((1, 2))
        return total


def linears(model: nn.Module) -> list[nn.Module]:
    """Each linear layer a unit."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


CASES = {
    "mlp": Case(MLP, floats(5, 6), linears),
    "one_unit": Case(MLP, floats(5, 6)),
    "transformer": Case(Transformer, tokens(2, 8), lambda m: list(m.blocks), next_token_loss),
    "tied": Case(lambda: Transformer(tied=True), tokens(2, 8), lambda m: list(m.blocks), next_token_loss),
    "unused": Case(PartlyUnused, floats(4, 6), lambda m: [m.first, m.spare]),
    "batch_norm": Case(WithBatchNorm, floats(4, 3, 6, 6), lambda m: list(m.stages)),
    "nested": Case(
        Nested, floats(4, 7), lambda m: [unit for part in m.parts for unit in (part.inner, part)], called_twice=True
    ),
    "odd_shapes": Case(OddShapes, floats(4, 6), lambda m: [m.linear]),
}
