"""The methods of a MegatronFSDP that synchronize parameters and gradients, by what each changes; and memory of models on meta."""

from __future__ import annotations

import gc
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.megatron import STRATEGIES, batch, gathered_gradients, plain_model, shard, whole
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import libfsdp
from libfsdp.megatron import MegatronFSDP


def gathers(model: MegatronFSDP) -> int:
    return libfsdp.wire_stats(model.module)["all_gathers"]


def reductions(model: MegatronFSDP) -> int:
    return libfsdp.wire_stats(model.module)["reduce_scatters"]


def live(model: MegatronFSDP, kind: str) -> int:
    return libfsdp.memory_stats(model.module)[f"{kind}.live"]


def backward(model: MegatronFSDP, step: int) -> None:
    model(batch(step, dist.get_rank())).square().mean().backward()


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_parameters(overlap: bool) -> None:
    model = shard(plain_model(), overlap_param_gather=overlap)
    backward(model, 0)
    model.synchronize_param_gather()
    assert live(model, "gathered_parameters") == 0
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for forced in (False, True):
        model.install_optimized_model_weights()
        before = gathers(model)
        model.start_param_sync(force_sync=forced)
        begun = gathers(model) - before
        # The first unit alone, which is the root's; the others follow in forward. Else all four of them.
        assert begun == (1 if overlap and not forced else 4)
        assert live(model, "gathered_parameters") > 0
        with torch.no_grad():
            model(batch(0, 0))
        # Blocks that have been gathered are not gathered again.
        assert gathers(model) - before == 4
        model.synchronize_param_gather()
        assert live(model, "gathered_parameters") == 0


@on_ranks(2)
def test_without_sharding_there_is_nothing_to_gather() -> None:
    model = shard(plain_model(), "no_shard")
    backward(model, 0)
    before = gathers(model)
    model.start_param_sync(force_sync=True)
    assert gathers(model) == before


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_waiting_for_reductions(strategy: str) -> None:
    """What is on its way arrives; what is not to be reduced yet stays on this rank."""
    sharded = strategy in ("optim_grads", "optim_grads_params")
    model = shard(plain_model(), strategy, sync_model_each_microbatch=False)
    backward(model, 0)
    before = reductions(model)
    for _ in range(2):
        model.synchronize_gradient_reduce()
        assert live(model, "unreduced_gradients") == live(model, "communication") == 0
        assert live(model, "main_gradients") > 0
        assert model.microbatch_count > 0
        if model.microbatch_count == 1:
            backward(model, 1)
            assert (live(model, "unreduced_gradients") > 0) == sharded  # on its way
    assert reductions(model) - before == (4 if sharded else 0)
    model.finish_grad_sync()
    assert model.microbatch_count == 0
    assert reductions(model) - before == 4
    found = gathered_gradients(model)
    straight = shard(plain_model(), strategy, sync_model_each_microbatch=False)
    backward(straight, 0)
    backward(straight, 1)
    straight.finish_grad_sync()
    assert all(map(torch.equal, found, gathered_gradients(straight)))


@pytest.mark.parametrize(
    ("size", "strategy", "kind"),
    [(2, "no_shard", "fsdp"), (2, "optim_grads_params", "fsdp"), (4, "optim_grads_params", "hsdp")],
)
@on_ranks("size")
def test_broadcasting_parameters(strategy: str, kind: str) -> None:
    rank = dist.get_rank()
    module = plain_model()
    module.temperature = nn.Parameter(torch.tensor(1.0))
    model = shard(module, strategy, kind)
    before = [whole(p.detach()).clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            (p._local_tensor if isinstance(p, DTensor) else p).add_(rank)
    model.broadcast_params()
    # The first of all ranks that have the same piece counts: with HSDP ranks 0 and 1.
    replicas = 1 if strategy == "no_shard" else 2 if kind == "hsdp" else dist.get_world_size()
    for p, old in zip(model.parameters(), before, strict=True):
        local, wanted = (p._local_tensor, old) if isinstance(p, DTensor) else (p.data, old)
        if isinstance(p, DTensor):
            rows = -(-p.size(0) // replicas)
            piece = rank % replicas
            wanted = old[piece * rows : (piece + 1) * rows] + piece
        assert torch.equal(local, wanted)
    if strategy == "no_shard":  # What modules compute with is broadcast, too.
        assert torch.equal(model(batch(0, 0)), plain_model()(batch(0, 0)))


@pytest.mark.parametrize(
    ("strategy", "auto", "decoupled"),
    [*((*one, False) for one in product(STRATEGIES, (True, False))), ("optim_grads_params", False, True)],
)
@on_ranks(2)
def test_scaling_gradients(strategy: str, auto: bool, decoupled: bool) -> None:
    model = shard(plain_model(), strategy, sync_model_each_microbatch=auto, use_decoupled_grad=decoupled)
    reference = shard(plain_model(), strategy, sync_model_each_microbatch=auto)
    for one in (model, reference):
        backward(one, 0)
        backward(one, 1)
    reference.finish_grad_sync()
    model.scale_gradients(0.25)  # reduces first what is not reduced
    assert model.microbatch_count == 0
    scaled = [locals_of(p, q, decoupled) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
    scaled = [(mine.clone(), theirs.clone()) for mine, theirs in scaled]
    for mine, theirs in scaled:
        assert torch.equal(mine, theirs / 4)
    # Later backwards are added as they are.
    for one in (model, reference):
        backward(one, 2)
        one.finish_grad_sync()
    for p, q, (_, before) in zip(model.parameters(), reference.parameters(), scaled, strict=True):
        mine, theirs = locals_of(p, q, decoupled)
        torch.testing.assert_close(mine, theirs - 0.75 * before, rtol=1e-5, atol=1e-6)
    assert not decoupled or all(p.grad is None for p in model.parameters())


def locals_of(p: Any, q: Any, decoupled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's gradients of two models; nothing where it has none of the parameter."""
    gradient = getattr(p, "decoupled_grad", None) if decoupled else p.grad
    assert (gradient is None) == (q.grad is None)
    if gradient is None:
        return torch.empty(0), torch.empty(0)
    return (gradient._local_tensor, q.grad._local_tensor) if isinstance(gradient, DTensor) else (gradient, q.grad)


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_dropping_gradients(strategy: str, auto: bool) -> None:
    model = shard(plain_model(), strategy, sync_model_each_microbatch=auto)
    backward(model, 0)
    kept = [p.grad for p in model.parameters()]
    model.zero_grad_buffer(keep_tensors=True)
    for p, gradient in zip(model.parameters(), kept, strict=True):
        assert p.grad is gradient
        assert gradient is None or not (gradient._local_tensor if isinstance(gradient, DTensor) else gradient).any()
    assert live(model, "unreduced_gradients") == 0 or not auto
    backward(model, 1)
    model.zero_grad_buffer()
    assert all(p.grad is None for p in model.parameters())
    assert model.microbatch_count == 0
    backward(model, 2)
    model.finish_grad_sync()
    other = shard(plain_model(), strategy)
    backward(other, 2)
    assert all(map(torch.equal, gathered_gradients(model), gathered_gradients(other)))


@on_ranks(2)
def test_models_on_meta_take_memory_of_shards_and_a_layer() -> None:
    gc.collect()  # What others have left is not to be freed while this counts.
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model = shard(module, fsdp_unit_modules=[nn.Linear], init_model_with_meta_device=True)
    assert recorded.profiler is not None
    results = recorded.profiler.kineto_results
    assert results is not None
    found = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    now = peak = 0
    for _, size in found:
        now += size
        peak = max(peak, now)
    layer = 4 * (512 * 512 + 512)
    shards = sum(p._local_tensor.nbytes for p in model.parameters() if isinstance(p, DTensor))
    assert shards == 4 * layer  # of two ranks
    assert layer <= peak - shards <= 1.01 * layer
