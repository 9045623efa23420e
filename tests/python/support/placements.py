"""A small model of units by placements, and the same without sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import libfsdp
from libfsdp.megatron import MixedPrecisionPolicy
from libfsdp.megatron.experimental import Placements, fully_shard, fully_shard_context
from libfsdp.megatron.experimental.module import FsdpContext
from libfsdp.megatron.experimental.placement import Flat
from support import device

# Of parameter, gradient and optimizer state along one dimension.
ZERO = {
    "zero0": (Replicate(), Partial("avg"), Replicate()),
    "zero1": (Replicate(), Partial("avg"), Shard(0)),
    "zero2": (Replicate(), Shard(0), Shard(0)),
    "zero3": (Shard(0), Flat(), Shard(0)),
}
# And of two.
NESTED = {
    "hsdp0": ("zero0", "zero0"),
    "hsdp1": ("zero0", "zero1"),
    "hsdp2": ("zero0", "zero2"),
    "hsdp3": ("zero0", "zero3"),
    "hfsdp": ("zero1", "zero3"),
}
WIDTH = 8


class Model(nn.Module):
    """Two blocks that are units, and parameters of the root's own."""

    def __init__(self, width: int = WIDTH, outputs: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, outputs)
        self.repeats = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            run = block if not self.repeats else lambda y, block=block: checkpoint(block, y, use_reentrant=False)
            x = torch.tanh(run(x))
        return self.head(x)


def plain(dtype: torch.dtype = torch.float64, width: int = WIDTH, outputs: int = 4) -> Model:
    """The same values on every rank."""
    torch.manual_seed(0)
    return Model(width, outputs).to(device.TYPE, dtype)


def placements_of(kind: str) -> Placements:
    axes = [ZERO[name] for name in NESTED.get(kind, (kind,))]
    parameter, gradient, optimizer = zip(*axes, strict=True)
    return Placements(tuple(range(len(axes))), parameter, gradient, optimizer)


def mesh_of(kind: str, inner: int | None = None) -> DeviceMesh:
    world = dist.get_world_size()
    if kind in ZERO:
        return init_device_mesh(device.TYPE, (world,))
    inner = world // 2 if inner is None else inner
    return init_device_mesh(device.TYPE, (world // inner, inner), mesh_dim_names=("outer", "inner"))


def shard(model: Model, kind: str = "zero3", mesh: DeviceMesh | None = None, **options: Any) -> tuple[Any, FsdpContext]:
    mesh = mesh or mesh_of(kind)
    options.setdefault("mixed_precision_policy", MixedPrecisionPolicy(main_params_dtype=None))
    with fully_shard_context(device.of_rank(dist.get_rank())) as context:
        for module in (*model.blocks, model):
            fully_shard(module, mesh, placements_of(kind), **options)
    return model, context


def batch(step: int, rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step)).to(device.TYPE, dtype)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wire(model: Any, run: Callable[[], None]) -> dict[str, int]:
    before = libfsdp.wire_stats(model)
    run()
    return {key: value - before[key] for key, value in libfsdp.wire_stats(model).items()}
