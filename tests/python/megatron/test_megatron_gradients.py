"""Main gradients and their copies, parameters without dimensions, and counts of updates, between the calls of a training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import device
from support.marks import on_ranks
from support.megatron import STRATEGIES, Block, batch, mesh_of, plain_model, ranks_of, shard
from support.ranks import StartRanks
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp.megatron import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)

# Optimizers get copies of main gradients, in the parameters' dtype.
COPIES = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float32)
BF16 = torch.bfloat16


def backward(model: MegatronFSDP, step: int) -> None:
    model(batch(step, dist.get_rank(), dtype=BF16)).float().square().mean().backward()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def main_gradients(model: MegatronFSDP) -> list[torch.Tensor]:
    """This rank's parts, fp32."""
    found = [local(p.main_grad).clone() for p in model.parameters() if getattr(p, "main_grad", None) is not None]
    assert found
    assert {gradient.dtype for gradient in found} == {torch.float32}
    return found


def look_between(strategy: str, looks: bool, trained: bool) -> list[torch.Tensor]:
    """Parameters after two steps; with a forward between backward and the optimizer's step."""
    model = shard(plain_model(dtype=BF16), strategy, mixed_precision_policy=COPIES)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(2):
        backward(model, step)
        if looks:
            with torch.set_grad_enabled(trained):
                model(batch(7, 0, dtype=BF16))
        optimizer.step()
        optimizer.zero_grad()
    model.synchronize_param_gather()
    return [local(p.detach()).clone() for p in model.parameters()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_forward_may_come_before_the_step(strategy: str) -> None:
    expected = look_between(strategy, looks=False, trained=False)
    for trained in (False, True):
        assert all(map(torch.equal, look_between(strategy, looks=True, trained=trained), expected))


def add_up(strategy: str, forwards_first: bool) -> list[torch.Tensor]:
    """Main gradients of two microbatches, which are the same after a step that was not followed by zero_grad."""
    model = shard(plain_model(dtype=BF16), strategy, mixed_precision_policy=COPIES)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))

    def loss(step: int) -> torch.Tensor:
        return model(batch(step, dist.get_rank(), dtype=BF16)).float().square().mean()

    for one in [loss(0), loss(1)] if forwards_first else map(loss, range(2)):
        one.backward()
    found = main_gradients(model)
    optimizer.step()
    assert all(map(torch.equal, main_gradients(model), found))
    return found


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_two_forwards_before_their_backwards(strategy: str) -> None:
    assert all(map(torch.equal, add_up(strategy, forwards_first=True), add_up(strategy, forwards_first=False)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_of_zeros_add_up_as_none_do(strategy: str) -> None:
    """Tensors of zeros take up gradients in full precision, as none do."""
    found = []
    for to_none in (True, False):
        model = shard(plain_model(dtype=BF16), strategy, mixed_precision_policy=COPIES)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        for step in range(3):
            if step < 2:
                optimizer.zero_grad(set_to_none=to_none)
            backward(model, step)
        found.append(main_gradients(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("how", ["model", "wrapper", "local"])
@on_ranks(2)
def test_gradients_that_are_scaled_between_backwards(how: str) -> None:
    """Of copies, main gradients keep the digits; what a user has done to a copy is kept, too."""
    model = shard(plain_model(dtype=BF16), mixed_precision_policy=COPIES)
    backward(model, 0)
    before = main_gradients(model)
    if how == "model":
        model.scale_gradients(1 / 3)
    for p in model.parameters():
        if p.grad is not None and how == "wrapper":
            p.grad.mul_(0.5)
        elif p.grad is not None and how == "local":
            p.grad._local_tensor.mul_(0.5)
    backward(model, 0)
    tolerance = 1e-6 if how == "model" else 2**-8
    for first, both in zip(before, main_gradients(model), strict=True):
        torch.testing.assert_close(both, first * (1 + (1 / 3 if how == "model" else 0.5)), rtol=tolerance, atol=0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Block(8, 12)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fixed = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fixed * self.scale * self.body(x)


@on_ranks(2)
def test_parameters_without_dimensions_have_all_methods() -> None:
    module, seeded = Scaled(), Scaled()
    model = shard(module, use_decoupled_grad=True)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(batch(0, 0)).sum().backward()
    scale: Any = module.scale
    assert scale.grad is None
    first = scale.decoupled_grad.clone()
    model.scale_gradients(0.5)
    assert torch.equal(scale.decoupled_grad, first / 2)
    model(batch(0, 0)).sum().backward()
    torch.testing.assert_close(scale.decoupled_grad, first * 1.5)
    optimizer.zero_grad(set_to_none=False)
    assert scale.decoupled_grad == 0
    optimizer.zero_grad()
    assert scale.decoupled_grad is None
    for p in (module.scale, module.fixed):
        p.data.fill_(dist.get_rank() + 5.0)
    model.broadcast_params()
    assert module.scale == module.fixed == 5
    added: Any = Scaled()
    added.load_state_dict(seeded.state_dict())
    averaged: Any = Scaled()
    averaged.load_state_dict(seeded.state_dict())
    shard(added, calculate_per_token_loss=True)(batch(0, dist.get_rank())).sum().backward()
    shard(averaged)(batch(0, dist.get_rank())).sum().backward()
    torch.testing.assert_close(added.scale.grad, dist.get_world_size() * averaged.scale.grad)
    mesh = ranks_of("fsdp")["device_mesh"]
    options = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim", check_for_nan_in_grad=True)
    other = MegatronFSDP(Scaled(), FSDPDistributedIndex(mesh, dp_shard_dim="dp", tp_dim="tp"), options)
    other.module.fixed.fill_(0.0)
    with torch.no_grad():
        other.module.scale.fill_(float("nan") if dist.get_rank() == 1 else 1.0)
    (other(batch(0, 0)).nan_to_num(0.0, 0.0, 0.0).sum() + float("nan") * other.module.scale).backward()
    with pytest.raises(libfsdp.Error, match=r"rank 0: .*scale"):
        other.start_grad_sync()


class Expert(nn.Module):
    """Its values are its number."""

    def __init__(self, mine: int) -> None:
        super().__init__()
        self.mine = mine
        self.scale = nn.Parameter(torch.full((), float(mine)))
        self.weight = nn.Parameter(torch.full((4, 4), float(mine)))
        for p in self.parameters():
            p.allreduce = False

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(float(self.mine))
            self.weight.fill_(float(self.mine))


@pytest.mark.parametrize("on_meta", [False, True])
@on_ranks(4)
def test_experts_keep_their_parameters_without_dimensions(on_meta: bool) -> None:
    """Two experts, each on two of four ranks: what one of them has does not come to the other."""
    mesh = init_device_mesh(device.TYPE, (2, 2), mesh_dim_names=("dp", "ep"))
    mine = mesh.get_local_rank("ep")
    with torch.device("meta" if on_meta else device.TYPE):
        module = nn.Sequential(Expert(mine))
    model = fully_shard_model(
        module,
        device_mesh=mesh_of(4, 1),
        dp_shard_dim="dp",
        tp_dim="tp",
        expt_device_mesh=mesh["dp"],
        init_model_with_meta_device=on_meta,
    )
    scale: Any = model.module[0].scale
    assert scale == mine
    scale.register_hook(lambda gradient: gradient)
    model.module[0].forward = lambda x: x * scale * 10 ** (mine + 1)
    model(torch.ones((), device=device.TYPE)).backward()
    # The sum over the two ranks of an expert, of tokens from all four.
    assert scale.grad == 2 * 10 ** (mine + 1) / 4
    scale.data.fill_(float(dist.get_rank()))
    model.broadcast_params()
    assert scale == mine


def save_twice(folder: str, strategy: str) -> None:
    """The second one by a run that has loaded the first."""
    for begin in (0, 2):
        model = shard(plain_model(), strategy)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        if begin:
            state = {"optimizer": optimizer.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/2")
            optimizer.load_state_dict(state["optimizer"])
        for step in range(begin, begin + 2):
            model(batch(step, dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state_dict = optimizer.state_dict()
        assert list(state_dict["state"]) == list(range(len(list(model.parameters()))))
        assert {float(one["step"]) for one in state_dict["state"].values()} == {begin + 2.0}
        dcp.save({"optimizer": state_dict}, checkpoint_id=f"{folder}/{begin + 2}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_counts_of_updates_where_shards_are_empty(ranks: StartRanks, tmp_path: Path, strategy: str) -> None:
    """On four ranks, three have nothing of a block's scale."""
    ranks(4).run(save_twice, str(tmp_path), strategy)
    for steps in (2, 4):
        path = tmp_path / str(steps)
        items = FileSystemReader(path).read_metadata().state_dict_metadata
        counts: dict[str, Any] = {name: torch.zeros(()) for name in items if name.endswith(".step")}
        dcp.load(counts, checkpoint_id=path, no_dist=True)
        assert {float(count) for count in counts.values()} == {float(steps)}
        assert len(counts) == len(list(plain_model().parameters()))


@on_ranks(2)
def test_a_state_dict_calls_no_hooks_of_steps() -> None:
    model = shard(plain_model())
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    steps: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append("before"))
    optimizer.register_step_post_hook(lambda *_: steps.append("after"))
    optimizer.state_dict()
    assert steps == []
    optimizer.step()
    assert steps == ["before", "after"]
