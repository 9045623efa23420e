"""Small models for tests of the Megatron-FSDP interface, and the same training without sharding."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from libfsdp.megatron import MegatronFSDP, fully_shard_model
from support import device

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Block(nn.Module):
    """Odd sizes, so that shards are uneven and some ranks have none of a bias."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


def plain_model(width: int = 8, hidden: int = 12, blocks: int = 3, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The same values on every rank."""
    torch.manual_seed(0)
    layers = [Block(width, hidden) for _ in range(blocks)]
    return device.move(nn.Sequential(nn.Linear(width, width), *layers, nn.Linear(width, 3)).to(dtype))


@functools.cache  # DTensor's caches take equal meshes for the same, and the process groups of the older one with it.
def mesh_of(*dims: int) -> DeviceMesh:
    """A mesh of all ranks: (data, tensor) or (outer, data), the latter with both in one as "both"."""
    mesh = init_device_mesh(
        device.TYPE, dims, mesh_dim_names=("dp", "tp") if dims[0] == dist.get_world_size() else ("outer", "dp")
    )
    if dims[0] != dist.get_world_size():
        mesh["outer", "dp"]._flatten("both")
    return mesh


def ranks_of(kind: str) -> dict[str, Any]:
    """The arguments for a mesh of all ranks: "fsdp", "hsdp" or "hfsdp"."""
    world = dist.get_world_size()
    if kind == "fsdp":
        return {"device_mesh": mesh_of(world, 1), "dp_shard_dim": "dp", "tp_dim": "tp"}
    mesh = mesh_of(2, world // 2)
    return {
        "device_mesh": mesh,
        "dp_shard_dim": "dp",
        "dp_outer_dim": "outer",
        "hybrid_fsdp_group": mesh["both"].get_group(),
        "outer_dp_sharding_strategy": "optim" if kind == "hfsdp" else "no_shard",
    }


def shard(model: nn.Module, strategy: str = "optim_grads_params", kind: str = "fsdp", **options: Any) -> MegatronFSDP:
    """A sharded model whose units are its blocks."""
    options.setdefault("fsdp_unit_modules", [Block])
    return fully_shard_model(model, zero_dp_strategy=strategy, **ranks_of(kind), **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that ranks have pieces of. It is gathered on the host: torch's Gloo can't do it on a GPU."""
    return tensor.cpu().full_tensor().to(tensor.device) if isinstance(tensor, DTensor) else tensor


def batch(step: int, rank: int, width: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One rank's part of a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, width, generator=generator).to(device.TYPE, dtype)


def mean_gradients(model: nn.Module, steps: list[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of a model without sharding: of all ranks' batches of these steps, the mean over the ranks, added up over the steps."""
    ranks = dist.get_world_size()
    model.zero_grad()
    for step in steps:
        for rank in range(ranks):
            (model(batch(step, rank, dtype=dtype)).square().mean() / ranks).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return gradients


def gathered_gradients(model: MegatronFSDP, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Those that the model's parameters have; zeros, of that dtype or the parameter's, where there are none."""
    found = []
    for p in model.parameters():
        gradient = p.grad
        if gradient is None:  # Others may have rows of it.
            assert isinstance(p, DTensor)
            gradient = DTensor(torch.zeros_like(p._local_tensor, dtype=dtype), p._spec, requires_grad=False)
        found.append(whole(gradient).clone())
    return found


def set_mean_gradients(model: nn.Module, steps: list[int]) -> None:
    """Gives a model without sharding its mean_gradients."""
    for p, gradient in zip(model.parameters(), mean_gradients(model, steps), strict=True):
        p.grad = gradient


def assert_same_parameters(model: nn.Module, reference: nn.Module, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Compares the parameters of a sharded model with those of one without sharding."""
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=rtol, atol=atol)


class AllGather(torch.autograd.Function):
    """Rows of all ranks of a group; each gets the sum of all ranks' gradients of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> Any:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None
