"""The model of tests/cpp/support/stack.h, for programs that go on where C++ has stopped."""

import torch
import torch.distributed as dist
from torch import nn


class Block(nn.Module):
    """StackBlock of tests/cpp/support/stack.h."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Stack of tests/cpp/support/stack.h."""

    def __init__(self, width: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.entry = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width, one) for one in hidden)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Of this rank's batch; stack_loss of tests/cpp/support/stack.h."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    loss: torch.Tensor = model(torch.randn(4, 3, generator=generator)).square().mean()
    return loss
