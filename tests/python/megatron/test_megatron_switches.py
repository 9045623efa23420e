"""What the peer's main branch has beside its release: other dtypes of communication for some steps, and groups of gathers."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.megatron import STRATEGIES, batch, mesh_of, plain_model, shard, whole

import libfsdp
from libfsdp.megatron import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from libfsdp.megatron import _config as config

FP32 = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32)
BF16 = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)


def train(
    strategy: str, policies: list[MixedPrecisionPolicy], own: MixedPrecisionPolicy
) -> tuple[list[torch.Tensor], list[int]]:
    """Parameters, and bytes of reductions, of one step with each policy."""
    model = shard(plain_model(), strategy, mixed_precision_policy=own)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    parameters = list(model.parameters())
    sizes: list[int] = []
    results: list[torch.Tensor] = []
    for step, policy in enumerate(policies):
        with nullcontext() if policy is own else model.mixed_precision_context(policy):
            assert model.mp_policy.grad_comm_dtype == policy.grad_comm_dtype
            model(batch(step, dist.get_rank())).square().mean().backward()
            stats = libfsdp.wire_stats(model.module)
            before = stats["reduce_scatter_bytes"]
            optimizer.step()
            optimizer.zero_grad()
            model(batch(step, dist.get_rank())).square().mean().backward()
            sizes.append(libfsdp.wire_stats(model.module)["reduce_scatter_bytes"] - before)
            optimizer.zero_grad()
        assert model.mp_policy == own
        results.extend(whole(p.detach()).clone() for p in model.parameters())
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    return results, sizes


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_dtypes_of_communication_for_some_steps(strategy: str) -> None:
    straight, narrow = train(strategy, [BF16] * 3, BF16)
    switched, same = train(strategy, [BF16] * 3, FP32)
    assert all(map(torch.equal, straight, switched))
    wide = train(strategy, [FP32] * 3, FP32)[1]
    assert same == narrow
    assert all(2 * n == w > 0 for n, w in zip(narrow, wide, strict=True))
    mixed = train(strategy, [FP32, BF16, FP32], FP32)[1]
    assert mixed == [wide[0], narrow[1], wide[2]]


@on_ranks(2)
def test_when_dtypes_cannot_change() -> None:
    model = shard(plain_model(), sync_model_each_microbatch=False)
    model(batch(0, 0)).sum().backward()
    with (
        pytest.raises(RuntimeError, match="gradients of 1 microbatches are not reduced"),
        model.mixed_precision_context(BF16),
    ):
        pass
    model.finish_grad_sync()
    before = [(p.grad, p.to_local().clone()) for p in model.parameters()]
    with model.mixed_precision_context(BF16):
        pass
    for p, (gradient, local) in zip(model.parameters(), before, strict=True):
        assert p.grad is gradient
        assert torch.equal(p.to_local(), local)
    kept = shard(plain_model(), cuda_graph_mode=True)
    with pytest.raises(ValueError, match="cuda_graph_mode keep"), kept.mixed_precision_context(BF16):
        pass


@on_ranks(2)
def test_groups_of_gathers() -> None:
    mesh = mesh_of(2, 1)
    arguments: dict[str, Any] = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp"}
    every, one = dist.new_group([0, 1]), dist.new_group([0])
    config._told.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fully_shard_model(plain_model(), fsdp_group_ag=every, **arguments)
    assert model.dist_index.get_fsdp_group(independent_all_gather=True) is every
    model(batch(0, 0)).sum().backward()
    with pytest.raises(
        ValueError, match="expt_fsdp_group_ag is a group of experts' ranks, and there is no expt_device_mesh"
    ):
        fully_shard_model(plain_model(), expt_fsdp_group_ag=every, **arguments)
    if dist.get_rank() == 0:  # Others have no such group to give.
        with pytest.raises(ValueError, match=r"fsdp_group_ag has the ranks \[0\], and dp_shard_dim='dp' has \[0, 1\]"):
            fully_shard_model(plain_model(), fsdp_group_ag=one, **arguments)
    model = fully_shard_model(plain_model(), expt_fsdp_group_ag=every, expt_device_mesh=mesh, **arguments)
    assert model.dist_index.get_fsdp_group(True, independent_all_gather=True) is every
    said = [str(w.message) for w in caught if "changes nothing" in str(w.message)]
    assert [text.split(" changes")[0] for text in said] == ["fsdp_group_ag"]


@on_ranks(2)
def test_gradients_of_graphs_keep_their_addresses() -> None:
    """A captured step adds to them where they were: zero_grad() of the optimizer keeps them, though it drops others."""
    model = shard(plain_model(), cuda_graph_mode=True)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    addresses = []
    for step in range(3):
        model(batch(step, dist.get_rank())).square().mean().backward()
        gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        addresses.append([gradient.data_ptr() for gradient in gradients])
        optimizer.step()
        optimizer.zero_grad()
        assert all(gradient.count_nonzero() == 0 for gradient in gradients)
    assert addresses[0] == addresses[1] == addresses[2]
