"""The Megatron-FSDP interface in whole programs: the package page's first example with a checkpoint, experts, tensor parallelism."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import on_ranks
from support.megatron import (
    STRATEGIES,
    AllGather,
    Block,
    assert_same_parameters,
    batch,
    mean_gradients,
    mesh_of,
    plain_model,
    set_mean_gradients,
    whole,
)
from support.ranks import StartRanks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import libfsdp
from libfsdp.megatron import fully_shard_model, fully_shard_optimizer


def quick_start(folder: str, strategy: int, steps_before: int, resume: bool) -> list[float]:
    libfsdp.install_megatron()
    try:
        package = importlib.import_module("megatron_fsdp")
    finally:
        libfsdp.uninstall_megatron()
    torch.manual_seed(5 if resume else 0)
    model = torch.nn.Transformer(
        d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=17, dropout=0.0
    )
    fsdp_model = package.fully_shard_model(
        module=model,
        fsdp_unit_modules=[torch.nn.TransformerEncoder, torch.nn.TransformerDecoder],
        zero_dp_strategy=strategy,
    )
    optimizer = package.fully_shard_optimizer(optimizer=torch.optim.AdamW(params=fsdp_model.parameters(), lr=0.01))
    if resume:
        ckpt = {"model": fsdp_model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.distributed.checkpoint.load(state_dict=ckpt, checkpoint_id=folder)
        fsdp_model.load_state_dict(ckpt["model"], strict=False)
        optimizer.load_state_dict(ckpt["optimizer"])
    losses = []
    for step in range(steps_before if resume else 0, 4):
        if step == steps_before and not resume:
            torch.distributed.checkpoint.save(
                {"model": fsdp_model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder
            )
        inp = batch(step, dist.get_rank(), width=16).unsqueeze(0)
        tgt = batch(step + 100, dist.get_rank(), width=16).unsqueeze(0)
        output = fsdp_model(inp, inp)
        loss = torch.nn.functional.mse_loss(output, tgt)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_quick_start_saves_loads_and_resumes(ranks: StartRanks, strategy: int, tmp_path: Path) -> None:
    for before in (0, 2):
        folder = str(tmp_path / str(before))
        straight = ranks(2).run(quick_start, folder, strategy, before, False)
        resumed = ranks(2).run(quick_start, folder, strategy, before, True)
        assert resumed == [losses[before:] for losses in straight]


class Experts(nn.Module):
    """A mixture of experts, of which each rank of an expert-parallel pair has half; all tokens go to all of them."""

    def __init__(self, group: Any = None, mine: slice = slice(None)) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gate = nn.Linear(8, 4)
        weights = [(torch.randn(8, 8) / 3).to(device.TYPE) for _ in range(4)]
        self.experts = nn.ModuleList([Expert(weight) for weight in weights[mine]])
        self.group, self.mine = group, mine
        if group is not None:
            for p in self.experts.parameters():
                p.allreduce = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        if self.group is None:
            return x + sum(gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        # Tokens of both ranks go to each expert, and come back.
        tokens, weights = AllGather.apply(x, self.group), AllGather.apply(gates, self.group)
        mine = sum(weights[:, self.mine][:, i : i + 1] * expert(tokens) for i, expert in enumerate(self.experts))
        first, second = AllGather.apply(mine, self.group).chunk(2)
        return x + (first + second).chunk(2)[dist.get_rank(self.group)]


class Expert(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_experts_have_ranks_and_a_divisor_of_their_own(strategy: str) -> None:
    rank = dist.get_rank()
    mesh = mesh_of(4, 1)
    experts = init_device_mesh(device.TYPE, (2, 2), mesh_dim_names=("dp", "ep"))
    mine = slice(0, 2) if experts.get_local_rank("ep") == 0 else slice(2, 4)
    module = nn.Sequential(nn.Linear(8, 8), Experts(experts.get_group("ep"), mine), nn.Linear(8, 3))
    single = nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 3))
    single.load_state_dict(
        {**single.state_dict(), **{k: v for k, v in module.state_dict().items() if "experts" not in k}}
    )
    for one in (module, single):
        torch.manual_seed(7)
        for i in (0, 2):
            one[i].reset_parameters()
        one.to(device.TYPE)
    model = fully_shard_model(
        module,
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        expt_device_mesh=experts,
        fsdp_unit_modules=[Expert],
        zero_dp_strategy=strategy,
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    alone = torch.optim.AdamW(single.parameters(), lr=0.05)
    weight = model.module[1].experts[0].weight
    assert weight.device_mesh.size() == 2
    assert model.module[0].weight.device_mesh.size(0) == 4
    for step in range(3):
        loss = model(batch(step, rank)).square().mean()
        torch.testing.assert_close(
            loss.detach(), single(batch(step, rank)).square().mean().detach(), rtol=1e-5, atol=1e-6
        )
        loss.backward()
        expected = mean_gradients(single, [step])
        names = dict(zip((name for name, _ in single.named_parameters()), expected, strict=True))
        for i, expert in enumerate(model.module[1].experts):
            gradient = expert.weight.grad
            assert gradient is not None
            torch.testing.assert_close(
                whole(gradient), names[f"1.experts.{mine.start + i}.weight"], rtol=1e-4, atol=1e-6
            )
        set_mean_gradients(single, [step])
        alone.step()
        optimizer.step()
        optimizer.zero_grad()


def mesh_of_two_dims() -> Any:
    return init_device_mesh(device.TYPE, (2, 2), mesh_dim_names=("data", "tp"))


def mesh_of_three_dims() -> Any:
    mesh = init_device_mesh(device.TYPE, (2, 2, 2), mesh_dim_names=("outer", "data", "tp"))
    mesh["outer", "data"]._flatten("both")
    return mesh


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@on_ranks(4)
def test_tensor_parallel_layers(strategy: str) -> None:
    mesh = mesh_of_two_dims()
    rank = mesh.get_local_rank("data")
    single, module = plain_model(), plain_model()
    for block in module:
        if isinstance(block, Block):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan, src_data_rank=None)
    model = fully_shard_model(
        module, device_mesh=mesh, dp_shard_dim="data", tp_dim="tp", fsdp_unit_modules=[Block], zero_dp_strategy=strategy
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))
    alone = torch.optim.AdamW(single.parameters(), lr=0.01)
    weight = model.module[1].up.weight
    assert weight.device_mesh.mesh_dim_names == ("data", "tp")
    if strategy != "no_shard":
        assert weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    for step in range(3):
        model(batch(step, rank)).square().mean().backward()
        single.zero_grad()
        for other in range(2):
            (single(batch(step, other)).square().mean() / 2).backward()
        assert all(p.grad is None or isinstance(p.grad, DTensor) for p in model.parameters())
        alone.step()
        optimizer.step()
        optimizer.zero_grad()
        assert_same_parameters(model, single)


class ColumnLinear(nn.Module):
    """A layer as Megatron's: an ordinary tensor of this rank's rows, with attributes that say so."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        full, rank = torch.randn(8, 6), mesh.get_local_rank("tp")
        self.weight = nn.Parameter(full[4 * rank : 4 * rank + 4].clone().to(device.TYPE))
        self.weight._tensor_parallel_mode = "column"
        self.weight.partition_dim = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


@pytest.mark.parametrize(
    ("size", "strategy", "with_outer"), [*((4, strategy, False) for strategy in STRATEGIES), (8, STRATEGIES[-1], True)]
)
@on_ranks("size")
def test_pieces_of_megatrons_layers(strategy: str, with_outer: bool) -> None:
    """Outer ranks may cut the shards, too."""
    mesh = mesh_of_three_dims() if with_outer else mesh_of_two_dims()
    outer: dict[str, Any] = {}
    if with_outer:
        outer = {
            "dp_outer_dim": "outer",
            "hybrid_fsdp_group": mesh["both"].get_group(),
            "outer_dp_sharding_strategy": "optim",
        }
    module = nn.Sequential(ColumnLinear(mesh))
    model = fully_shard_model(
        module,
        device_mesh=mesh,
        dp_shard_dim="data",
        tp_dim="tp",
        fsdp_unit_modules=[ColumnLinear],
        zero_dp_strategy=strategy,
        **outer,
    )
    weight = model.module[0].weight
    torch.manual_seed(2)
    full = torch.randn(8, 6).to(device.TYPE)
    assert weight.shape == (8, 6)
    assert weight.partition_dim == 0
    assert torch.equal(whole(weight.detach()), full)
    x = torch.ones(2, 6, device=device.TYPE)
    out = model(x)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, x @ full[4 * mesh.get_local_rank("tp") :][:4].t())
    out.sum().backward()
    torch.testing.assert_close(whole(model.module[0].weight.grad), torch.full_like(full, 2.0))
