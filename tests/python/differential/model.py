"""The modules of random models. They know nothing of sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from differential.program import Node, Program


class PlannedFailure(RuntimeError):
    """What a random operator raises."""


class Fuse:
    """A node that is to fail, in forward or in backward."""

    node: str | None = None
    in_backward = False

    @classmethod
    def arm(cls, node: str | None, *, in_backward: bool = False) -> None:
        """The next use of the node fails; None: nothing does."""
        cls.node, cls.in_backward = node, in_backward

    @classmethod
    def burn(cls, node: str) -> None:
        """Called where a node computes."""
        if cls.node == node:
            raise PlannedFailure(node)


class Product(torch.autograd.Function):
    """A custom Function: x @ weight.t(), its backward written by hand."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Part(nn.Module):
    """A node of a model; its class says what it computes."""

    def __init__(self, node: Node, width: int) -> None:
        super().__init__()
        self.node = node
        self.dtype = getattr(torch, node.dtype)
        self.make(width)
        self.to(self.dtype)
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(not node.frozen)

    def make(self, width: int) -> None:
        """Parameters and buffers."""

    def forward(self, x: Tensor) -> Tensor:
        if not Fuse.in_backward:
            Fuse.burn(self.node.name)
        y = self.compute(x)
        if Fuse.in_backward and Fuse.node == self.node.name and y.requires_grad:
            y.register_hook(lambda _: Fuse.burn(self.node.name))
        return y

    def own(self, x: Tensor) -> Tensor:
        """In the dtype of the parameters, whoever has given it (a policy casts inputs, this does the rest)."""
        parameter = next(self.parameters(recurse=False), None)
        return x if parameter is None else x.to(parameter.dtype)

    def compute(self, x: Tensor) -> Tensor:
        return x


def random(*shape: int) -> nn.Parameter:
    """Small values."""
    return nn.Parameter(torch.randn(*shape) / 3)


class Linear(Part):
    def make(self, width: int) -> None:
        self.weight, self.bias = random(width, width), random(width)

    def compute(self, x: Tensor) -> Tensor:
        return x + torch.tanh(nn.functional.linear(self.own(x), self.weight, self.bias)).to(x.dtype) / 2


class Mlp(Part):
    def make(self, width: int) -> None:
        self.up, self.down = random(width + 4, width), random(width, width + 4)
        self.scale = nn.Parameter(torch.ones(1))

    def compute(self, x: Tensor) -> Tensor:
        inner = torch.tanh(nn.functional.linear(self.own(x), self.up))
        return x + (self.scale * nn.functional.linear(inner, self.down)).to(x.dtype)


class Norm(Part):
    def make(self, width: int) -> None:
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def compute(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(self.own(x), (x.shape[-1],), self.weight, self.bias).to(x.dtype)


class Statistics(Part):
    """A buffer that training updates and evaluation reads."""

    mean: Tensor

    def make(self, width: int) -> None:
        self.gain = nn.Parameter(torch.ones(1, width))
        self.register_buffer("mean", torch.zeros(width))

    def compute(self, x: Tensor) -> Tensor:
        if self.training and x.numel() > 0:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0).to(self.mean.dtype))
        return (self.own(x) * self.gain - (self.mean if not self.training else 0)).to(x.dtype)


class Odd(Part):
    """Parameters of one element, one row, fewer rows than ranks, three dimensions; one that nobody uses."""

    def make(self, width: int) -> None:
        self.one, self.row, self.cube, self.never = random(1), random(1, width), random(3, 2, width), random(2, 3)

    def compute(self, x: Tensor) -> Tensor:
        x_own = self.own(x)
        return (
            x
            + (self.one * x_own * self.row + torch.tanh(x_own.unsqueeze(1) * self.cube.flatten(0, 1)).sum(1)).to(
                x.dtype
            )
            / 4
        )


class Custom(Part):
    def make(self, width: int) -> None:
        self.weight = random(width, width)

    def compute(self, x: Tensor) -> Tensor:
        product: Tensor = Product.apply(self.own(x), self.weight)
        return x + torch.tanh(product).to(x.dtype) / 2


class Plain(Part):
    """An output that needs nothing else after it: backward begins in it."""

    def make(self, width: int) -> None:
        self.weight = random(width, width)

    def compute(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.own(x), self.weight).to(x.dtype)


class Tied(Part):
    """Its weight is another module's parameter."""

    weight: nn.Parameter

    def make(self, width: int) -> None:
        if self.node.late:
            self.weight = random(width, width)

    def compute(self, x: Tensor) -> Tensor:
        return x + torch.tanh(nn.functional.linear(self.own(x), self.weight)).to(x.dtype) / 2


class Reader(Part):
    """Reads the weight of another module, which it has not registered."""

    other: Callable[[], nn.Module]

    def make(self, width: int) -> None:
        self.bias = random(width)

    def compute(self, x: Tensor) -> Tensor:
        weight = self.other().weight
        assert isinstance(weight, Tensor)
        return x + torch.tanh(x.to(weight.dtype) @ weight + self.bias.to(weight.dtype)).to(x.dtype) / 2


class Owner(Part):
    """Calls other modules, with a parameter of its own around them."""

    callees: dict[str, Callable[[], nn.Module]]

    def make(self, width: int) -> None:
        self.gain = nn.Parameter(torch.ones(width))

    def compute(self, x: Tensor) -> Tensor:
        y = (self.own(x) * self.gain).to(x.dtype)
        for name in self.node.calls:
            part = self.callees[name]()
            kind = part.node.checkpoint if isinstance(part, Part) else ""
            repeats = kind and torch.is_grad_enabled()
            y = checkpoint(part, y, use_reentrant=kind == "reentrant") if repeats else part(y)
        return y


class Root(Owner):
    """An owner that ends with a parameter of its own, and gives the loss's terms."""

    def compute(self, x: Tensor) -> Tensor:
        return super().compute(x)


KINDS: dict[str, type[Part]] = {
    "linear": Linear,
    "mlp": Mlp,
    "norm": Norm,
    "statistics": Statistics,
    "odd": Odd,
    "custom": Custom,
    "plain": Plain,
    "tied": Tied,
    "reader": Reader,
    "owner": Owner,
    "root": Root,
}


class Built:
    """A model and its modules by name."""

    def __init__(self, program: Program, number: int) -> None:
        torch.manual_seed(program.seed * 7 + number)
        self.parts: dict[str, Part] = {}
        for node in program.nodes:
            part = KINDS[node.kind](node, program.width)
            self.parts[node.name] = part
            if isinstance(part, Tied) and not node.late:
                part.weight = self.parts[node.weight_of].weight
            if isinstance(part, Reader):
                self._borrow(part, "other", node.weight_of)
            if isinstance(part, Owner):
                for child in node.children:
                    part.add_module(child, self.parts[child])
                names = (*node.children, *node.borrowed)
                part.callees = {name: (lambda name=name: self.parts[name]) for name in names}  # type: ignore[misc]
        self.root = self.parts[program.root]

    def tie_weights(self) -> None:
        """As users call it after sharding, and after a load that assigns: each name then has a parameter of its own."""
        for part in self.parts.values():
            if isinstance(part, Tied):
                part.weight = self.parts[part.node.weight_of].weight

    def _borrow(self, part: Part, attribute: str, name: str) -> None:
        object.__setattr__(part, attribute, lambda: self.parts[name])


def batch_of(program: Program, number: int, rank: int, model: int) -> Tensor:
    """A rank's batch. Numbers that end in 9 are empty on the last rank."""
    generator = torch.Generator().manual_seed(program.seed * 1000 + number * 10 + rank + 100_000 * model)
    rows = 0 if number % 10 == 9 and rank == program.world - 1 and program.world > 1 else program.rows
    return torch.randn(rows, program.width, generator=generator)


def loss_of(program: Program, model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """A mean that an empty batch has, too."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=program.autocast):
        y = model(batch)
    y = y.float()
    return (y.square().sum() + y.sum()) / max(y.numel(), 1)
