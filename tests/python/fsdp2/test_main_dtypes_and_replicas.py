"""Units whose shards have dtypes of their own, and units that nothing is cut of: what modules, optimizers and the wire see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import on_ranks
from support.training import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import libfsdp
from libfsdp import MixedPrecisionPolicy, fully_shard


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(device.TYPE)


def shard(model: nn.Sequential, **options: Any) -> Any:
    for i in (0, 2):
        fully_shard(model[i], **options)
    return fully_shard(model, **options)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 6, generator=generator).to(device.TYPE)


def train(
    model: Any, batches: Callable[[int], list[torch.Tensor]], steps: int = 3, scale: float = 1
) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for step in range(steps):
        for x in batches(step):
            loss = model(x).square().mean() * scale
            loss.backward()
            seen.append(loss.detach())
        seen.extend(full(p.grad) for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return seen + [full(p) for p in model.parameters()]


@pytest.mark.parametrize(("size", "dims", "accumulate"), [(2, (2,), 1), (2, (2,), 3), (4, (4,), 2), (4, (2, 2), 2)])
@on_ranks("size")
def test_nothing_is_cut(dims: tuple[int, ...], accumulate: int) -> None:
    names = ("outer", "inner")[: len(dims)]
    mesh = init_device_mesh(device.TYPE, dims, mesh_dim_names=names)
    replica, model = plain_model().double(), shard(plain_model().double(), mesh=mesh, placements="no_shard")
    assert all(
        type(p) is nn.Parameter and p.shape == q.shape
        for p, q in zip(model.parameters(), replica.parameters(), strict=True)
    )
    ranks = dist.get_world_size()

    def mine(step: int) -> list[torch.Tensor]:
        return [batch(dist.get_rank(), accumulate * step + i).double() for i in range(accumulate)]

    def of_all(step: int) -> list[torch.Tensor]:
        return [batch(rank, accumulate * step + i).double() for rank in range(ranks) for i in range(accumulate)]

    got, expected = train(model, mine), train(replica, of_all, scale=1 / ranks)
    parameters = len(list(replica.parameters()))
    for one, other in zip(got[-parameters:], expected[-parameters:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    before = libfsdp.wire_stats(model)
    model(batch(0, 0).double()).sum().backward()
    after = libfsdp.wire_stats(model)
    reduced, gathered = (after[key] - before[key] for key in ("reduce_scatter_bytes", "all_gather_bytes"))
    assert reduced > 0
    if len(dims) == 1:  # An all-reduce is both, of gradients.
        assert gathered == reduced
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())
    with torch.no_grad():
        before = libfsdp.wire_stats(model)
        model(batch(0, 0).double())
        assert libfsdp.wire_stats(model)["all_gathers"] == before["all_gathers"]


@on_ranks(2)
def test_replicas_accumulate_without_synchronization() -> None:
    sent = []
    for sync in (True, False):
        model = shard(plain_model(), placements="no_shard")
        model(batch(0, 0)).sum().backward()
        before = libfsdp.wire_stats(model)["reduce_scatters"]
        model.set_requires_gradient_sync(sync)
        model(batch(0, 0)).sum().backward()
        model.set_requires_gradient_sync(True)
        model(batch(0, 0)).sum().backward()
        sent.append(libfsdp.wire_stats(model)["reduce_scatters"] - before)
    assert sent == [6, 3]


@on_ranks(2)
def test_state_dicts_are_those_of_the_module() -> None:
    model, other = shard(plain_model(), placements="no_shard"), plain_model()
    train(model, lambda step: [batch(0, step)])
    saved = model.state_dict()
    other.load_state_dict(saved)
    x = batch(0, 9)
    assert torch.equal(model(x), other(x))
    values = {name: torch.ones_like(value) for name, value in saved.items()}
    model.load_state_dict(values)
    other.load_state_dict(values)
    assert torch.equal(model(x), other(x))
    model.load_state_dict(saved, assign=True)
    other.load_state_dict(saved)
    assert torch.equal(model(x), other(x))
    train(model, lambda step: [batch(0, step)])


@on_ranks(2)
def test_what_does_not_fit_is_refused() -> None:
    for options, text in (
        ({"placements": "no_shard", "gather_format": lambda p: None}, "gathers nothing"),
        ({"main_params_dtype": torch.int8}, "main_params_dtype is torch.int8"),
        ({"main_grads_dtype": "bf16"}, "main_grads_dtype is bf16"),
    ):
        with pytest.raises(ValueError, match=text):
            shard(plain_model(), **options)


def master_weights(placements: str, grads: torch.dtype, wire: torch.dtype | None) -> int:
    ranks, exact = dist.get_world_size(), grads == (wire or grads) == torch.float32
    given = plain_model().bfloat16()
    frozen = given[4].bias
    frozen.requires_grad_(False)
    model = shard(
        copy.deepcopy(given),
        placements=placements,
        main_params_dtype=torch.float32,
        main_grads_dtype=grads,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=wire),
    )
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert model[4].bias.dtype == torch.bfloat16
    seen: list[torch.dtype] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    # The same by hand: bfloat16 computes, fp32 is optimized.
    replica = given
    masters = [p.detach().float() for p in replica.parameters() if p.requires_grad]
    reference = torch.optim.AdamW(masters, lr=0.05)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(3):
        sums = [torch.zeros_like(master) for master in masters]
        for micro in range(2):
            model(batch(dist.get_rank(), 2 * step + micro).bfloat16()).square().mean().backward()
            parts = []
            for rank in range(ranks):
                replica.zero_grad()
                replica(batch(rank, 2 * step + micro).bfloat16()).square().mean().backward()
                parts.append([p.grad.float() for p in replica.parameters() if p.requires_grad])
            for i, total in enumerate(sums):
                total += torch.stack([part[i] for part in parts]).sum(0) / ranks
        trained = [p for p in model.parameters() if p.requires_grad]
        for p, total in zip(trained, sums, strict=True):
            assert p.grad is not None
            assert p.grad.dtype == grads
            tolerance = 1e-6 if exact else 0.02
            torch.testing.assert_close(full(p.grad).float(), full(total), rtol=tolerance, atol=tolerance)
        if exact:
            for master, total in zip(masters, sums, strict=True):
                master.grad = total
            optimizer.step()
            reference.step()
            for master, p in zip(masters, (p for p in replica.parameters() if p.requires_grad), strict=True):
                p.data.copy_(master)
            for master, p in zip(masters, trained, strict=True):
                torch.testing.assert_close(full(p), full(master), rtol=1e-5, atol=1e-6)
        optimizer.zero_grad()
    assert set(seen) == {torch.bfloat16}
    before = libfsdp.wire_stats(model)["reduce_scatter_bytes"]
    model(batch(dist.get_rank(), 0).bfloat16()).sum().backward()
    if grads == torch.float32:  # Sums keep their digits, whatever travelled.
        gradients = [full(p.grad) for p in model.parameters() if p.grad is not None]
        assert any(not torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)
    return libfsdp.wire_stats(model)["reduce_scatter_bytes"] - before


@pytest.mark.parametrize("placements", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_shards_have_dtypes_of_their_own(placements: str) -> None:
    full = master_weights(placements, torch.float32, torch.float32)
    short = master_weights(placements, torch.float32, torch.bfloat16)
    assert short == full  # They are computed in bf16, and sent in it, whatever they are reduced in.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SEND_AS_COMPUTED", "0")
        assert master_weights(placements, torch.float32, torch.float32) == 2 * short
    assert master_weights(placements, torch.bfloat16, torch.bfloat16) == short
    # Without a reduce_dtype they are reduced as they are kept.
    assert master_weights(placements, torch.float32, None) == full
    assert master_weights(placements, torch.bfloat16, None) == short


@on_ranks(2)
def test_replicas_may_be_offloaded() -> None:
    model = shard(plain_model(), placements="no_shard", offload_policy=CPUOffloadPolicy(pin_memory=False))
    train(model, lambda step: [batch(dist.get_rank(), step)])
