"""What contenders train: a model, the modules that become units, its batches and its loss. All from formulas, so that all do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contenders.gpt import GPT, BatchPlace, GPTConfig, cross_entropy, draw_batch, fill_parameters

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model before it is sharded, and its data."""

    model: nn.Module
    units: list[nn.Module]
    draw: Callable[[BatchPlace], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def gpt(config: GPTConfig, sequences: int) -> Workload:
    """The transformer of gpt.py; each block is a unit."""
    model = GPT(config)
    fill_parameters(model)
    return Workload(
        model,
        list(model.blocks),
        lambda place: draw_batch(config, sequences, place),
        lambda sharded, batch: cross_entropy(sharded(batch[0]), batch[1]),
    )


def regression(model: nn.Module, units: list[nn.Module], *shape: int) -> Workload:
    """A model that maps features to features, with the mean square of its outputs as the loss."""
    fill_parameters(model)

    def draw(place: BatchPlace) -> Batch:
        features = torch.frac(torch.sin(torch.arange(torch.Size(shape).numel()) + 7.0 * (place.step * place.world + place.rank)) * 437.5)
        return features.view(shape), torch.empty(0)

    return Workload(model, units, draw, lambda sharded, batch: sharded(batch[0]).square().mean())


class SmallUnit(nn.Module):
    """Three small parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(dim))
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(self.linear(x * self.norm))


def many_units() -> Workload:
    """300 units of three small parameters: little arithmetic, many messages."""
    units: list[nn.Module] = [SmallUnit(48) for _ in range(300)]
    return regression(nn.Sequential(*units), units, 64, 48)


def large_unit() -> Workload:
    """One unit of 200 MB: nothing to overlap with."""
    large = nn.Linear(5120, 10240, bias=False)
    return regression(nn.Sequential(large, nn.Tanh(), nn.Linear(10240, 16)), [large], 32, 5120)


class Residual(nn.Module):
    """Two convolutions with norms of channels, around a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(8, channels), nn.SiLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(8, channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x + self.body(x))


def conv() -> Workload:
    """A convolutional net on small images."""
    units: list[nn.Module] = [Residual(96) for _ in range(6)]
    stem = nn.Conv2d(3, 96, 3, padding=1)
    return regression(nn.Sequential(stem, *units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)), units, 4, 3, 24, 24)


class Recurrent(nn.Module):
    """An LSTM over the second dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(x)[0]
        return x + outputs


def lstm() -> Workload:
    """Four recurrent layers."""
    units: list[nn.Module] = [Recurrent(384) for _ in range(4)]
    return regression(nn.Sequential(*units), units, 8, 32, 384)


OTHERS: dict[str, Callable[[], Workload]] = {
    "many_units": many_units,
    "large_unit": large_unit,
    "conv": conv,
    "lstm": lstm,
}
