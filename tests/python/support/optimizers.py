"""Sharded parameters with gradients that tests choose: optimizers are compared on the same numbers, whatever computed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from support.training import api, full, mesh_of

Shapes = Sequence[tuple[int, ...]]
# On four ranks, each one's part of these fills whole registers of 64 bytes; nobody's of those.
ALIGNED: Shapes = ((64, 16), (128, 3), (64,), (64, 4, 4))
ODD: Shapes = ((5, 3), (7,), (1, 9), (13, 1), (64, 16))


class Parameters(nn.Module):
    """A model of nothing but parameters."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
        self.values = nn.ParameterList(nn.Parameter(value) for value in values)

    def forward(self) -> Tensor:
        return torch.stack([value.sum() for value in self.values]).sum()


def sharded(implementation: str, shapes: Shapes, replicas: int = 1, **options: Any) -> list[nn.Parameter]:
    """The parameters as an implementation of fully_shard leaves them; "replica": whole, in one process."""
    dtype = options.pop("dtype", torch.float32)
    model = Parameters(shapes, dtype)
    if implementation != "replica":
        api(implementation).fully_shard(model, mesh=mesh_of(replicas), **options)
        keep_alive.append(model)
    return list(model.parameters())


keep_alive: list[nn.Module] = []  # A parameter does not keep its model.


def gradient_of(parameter: Tensor, number: int, step: int, scale: float = 1.0) -> Tensor:
    """The gradient of a parameter in a step, placed as the parameter is."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    whole = (scale * torch.randn(*parameter.shape, generator=generator)).to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def give_gradients(parameters: Sequence[Tensor], step: int, without: Sequence[int] = (), scale: float = 1.0) -> None:
    """Each its own, but for those whose numbers are in `without`."""
    for number, parameter in enumerate(parameters):
        parameter.grad = None if number in without else gradient_of(parameter, number, step, scale)


@contextmanager
def without_torchs_steps() -> Iterator[None]:
    """torch's own Adam and SGD can't step: what does, is C++."""
    refusing = AssertionError("torch's own step was called")
    with (
        mock.patch("torch.optim.adam.adam", side_effect=refusing),
        mock.patch("torch.optim.sgd.sgd", side_effect=refusing),
    ):
        yield


Change = Callable[[torch.optim.Optimizer], None]


def train(
    parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, steps: int = 4, change: Change | None = None
) -> None:
    """Steps in which some parameters have no gradient; `change` is called in the middle."""
    for step in range(steps):
        if change is not None and step == steps // 2:
            change(optimizer)
        give_gradients(parameters, step, without=(1,) if step == 0 else (2,) if step == 2 else ())
        optimizer.step()
        optimizer.zero_grad()


def whole_state(parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Values and state, gathered."""
    state = {f"{i}": full(p) for i, p in enumerate(parameters)}
    for i, p in enumerate(parameters):
        state.update({f"{i}.{name}": full(value) for name, value in optimizer.state.get(p, {}).items()})
    return state
