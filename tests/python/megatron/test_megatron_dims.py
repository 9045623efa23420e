"""Dimensions of meshes beside data parallelism: experts that are cut, context parallelism, and 1,024 ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.megatron import STRATEGIES, AllGather, assert_same_parameters, batch, mean_gradients, mesh_of, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp.megatron import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer


class CutExpert(nn.Module):
    """An expert of which each rank of a group has half of the hidden features; tokens of all of them go to each."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        up, down = torch.randn(12, 8) / 3, torch.randn(8, 12) / 3
        self.group = group
        if group is not None:
            mine = slice(6 * dist.get_rank(group), 6 * dist.get_rank(group) + 6)
            up, down = up[mine].clone(), down[:, mine].clone()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)
        if group is not None:
            for p, mode, dim in ((self.up, "column", 0), (self.down, "row", 1)):
                p.allreduce = False
                p._tensor_parallel_mode, p.partition_dim, p.partition_stride = mode, dim, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return x + torch.tanh(x @ self.up.t()) @ self.down.t()
        tokens = AllGather.apply(x, self.group)
        return x + SumOfMine.apply(torch.tanh(tokens @ self.up.t()) @ self.down.t(), self.group)


class SumOfMine(torch.autograd.Function):
    """The sum over a group's ranks of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> Any:
        ctx.group = group
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts), None


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_experts_that_are_cut(strategy: str) -> None:
    rank = dist.get_rank()
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    single, module = (
        nn.Sequential(nn.Linear(8, 8), CutExpert(group), nn.Linear(8, 3)) for group in (None, experts.get_group("tp"))
    )
    for one in (single, module):
        torch.manual_seed(7)
        for i in (0, 2):
            one[i].reset_parameters()
    model = fully_shard_model(
        module,
        device_mesh=mesh_of(4, 1),
        dp_shard_dim="dp",
        tp_dim="tp",
        expt_device_mesh=experts,
        fsdp_unit_modules=[CutExpert],
        zero_dp_strategy=strategy,
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    alone = torch.optim.AdamW(single.parameters(), lr=0.05)
    up, down = model.module[1].up, model.module[1].down
    # Whole shapes, over the experts' ranks: half of the features each, and of these half of the rows, if they are sharded.
    assert (up.shape, down.shape) == ((12, 8), (8, 12))
    sharded = strategy != "no_shard"
    assert up.to_local().numel() == up.numel() // (4 if sharded else 2)
    assert model.module[0].weight.numel() == 64
    for step in range(3):
        loss = model(batch(step, rank)).square().mean()
        expected = single(batch(step, rank)).square().mean()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
        loss.backward()
        gradients = mean_gradients(single, [step])
        for p, q, gradient in zip(model.parameters(), single.parameters(), gradients, strict=True):
            q.grad = gradient
            if p.grad is not None and p in {up, down}:
                torch.testing.assert_close(whole(p.grad), gradient, rtol=1e-4, atol=1e-6)
        alone.step()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(model, single)


class Attention(nn.Module):
    """Each rank of a group has a part of the sequence, and looks at all of it."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.key(x)
        if self.group is not None:
            keys = AllGather.apply(keys, self.group)
        return x + (self.query(x) @ keys.t()).softmax(-1) @ keys


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_context_parallelism_in_a_flattened_dimension(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("data", "cp", "tp"))
    mesh["data", "cp"]._flatten("dp_cp")
    models = []
    for group in (None, mesh.get_group("cp")):
        torch.manual_seed(0)
        models.append(nn.Sequential(Attention(group), Attention(group), nn.Linear(8, 3)))
    single, module = models
    model = fully_shard_model(
        module,
        device_mesh=mesh,
        dp_shard_dim="dp_cp",
        tp_dim="tp",
        fsdp_unit_modules=[Attention],
        zero_dp_strategy=strategy,
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    alone = torch.optim.AdamW(single.parameters(), lr=0.05)
    weight = model.module[0].key.weight
    if strategy != "no_shard":
        assert isinstance(weight, DTensor)
        assert weight.device_mesh.mesh_dim_names[0] == "dp_cp"
        assert weight.to_local().shape == (2, 8)
    for step in range(3):
        sequence = batch(step, mesh.get_local_rank("data"))
        mine = sequence.chunk(2)[mesh.get_local_rank("cp")]
        model(mine).square().mean().backward()
        for data in range(2):
            (single(batch(step, data)).square().mean() / 2).backward()
        alone.step()
        optimizer.step()
        alone.zero_grad()
        optimizer.zero_grad()
    assert_same_parameters(model, single)


class Layer(nn.Module):
    """Matrices of a decoder layer, by their numbers of outputs and inputs, and two norms; it computes nothing."""

    def __init__(self, matrices: list[tuple[int, int]], width: int) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(nn.Linear(inputs, rows, bias=False) for rows, inputs in matrices)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


ATTENTION = {"llama": [(4096, 4096)] * 4, "mixtral": [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]}
REST = {
    "llama": [(11008, 4096), (11008, 4096), (4096, 11008)],
    "mixtral": [(8, 4096), *[(14336, 4096), (4096, 14336), (14336, 4096)] * 8],
}


def gathered_on_fake(layer: str, world: int) -> float:
    """Bytes of a layer that is gathered on so many ranks, by those of its parameters. The process group has no other ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=world - 1, world_size=world, store=FakeStore())
    with torch.device("meta"):
        module = nn.Sequential(Layer(ATTENTION[layer] + REST[layer], 4096).bfloat16())
    payload = sum(p.nbytes for p in module.parameters())
    model = fully_shard_model(
        module,
        device_mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Layer],
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model(torch.ones(1))
    return libfsdp.memory_stats(model.module)["gathered_parameters.peak"] / payload


@pytest.fixture
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.mark.parametrize(("layer", "bound"), [("llama", 1.011), ("mixtral", 1.004)])
def test_padding_on_1024_ranks(process: ProcessPoolExecutor, layer: str, bound: float) -> None:
    ratio = process.submit(gathered_on_fake, layer, 1024).result(timeout=120)
    assert 1 <= ratio <= bound < 1.02
