"""Megatron-FSDP's sharding of single modules by a strategy's name: against the model unsharded, FSDP2, and by what options change."""

from __future__ import annotations

import gc
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.megatron import STRATEGIES
from support.placements import WIDTH, Model, batch, plain, whole, wire
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp.megatron.v2 import FSDPModule, MixedPrecisionPolicy, fully_shard

STEPS = 3
AS_IS = MixedPrecisionPolicy(main_params_dtype=None)


def shard(model: Model, **options: Any) -> Any:
    options.setdefault("mp_policy", AS_IS)
    for module in (*model.blocks, model):
        assert fully_shard(module, **options) is module
    return model


def train(model: Any, backward: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen = []
    for step in range(STEPS):
        for microbatch in (2 * step, 2 * step + 1):
            seen.append(backward(microbatch))
        seen.extend(whole(p.grad).clone() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return seen + [whole(p).detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("size", "dims", "repeats"), [(2, (2,), False), (2, (2,), True), (4, (4,), False), (4, (2, 2), False)]
)
@on_ranks("size")
def test_strategies_train_as_unsharded_and_as_fsdp2(strategy: str, dims: tuple[int, ...], repeats: bool) -> None:
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("outer", "inner")[: len(dims)])
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # Of the head's three rows, some ranks have none.
    reference, other, model = plain(outputs=3), plain(outputs=3), plain(outputs=3)
    for module in (*other.blocks, other):
        fsdp2(module, mesh=mesh)
    shard(model, mesh=mesh, sharding_strategy=strategy)
    other.repeats = model.repeats = repeats

    def of_all(microbatch: int) -> torch.Tensor:
        losses = [reference(batch(microbatch, other)).square().mean() for other in range(ranks)]
        (torch.stack(losses).sum() / ranks).backward()
        return losses[rank].detach()

    def of_one(one: Any) -> Callable[[int], torch.Tensor]:
        def backward(microbatch: int) -> torch.Tensor:
            loss = one(batch(microbatch, rank)).square().mean()
            loss.backward()
            return loss.detach()

        return backward

    got = train(model, of_one(model))
    for expected in (train(reference, of_all), train(other, of_one(other))):
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_repeated_forwards_gather_nothing_twice() -> None:
    gathers = []
    for repeats in (False, True):
        model = shard(plain())
        model.repeats = repeats
        model(batch(0, 0)).sum().backward()
        before = libfsdp.wire_stats(model)["all_gathers"]
        model(batch(0, 0)).sum().backward()
        gathers.append(libfsdp.wire_stats(model)["all_gathers"] - before)
    assert gathers[0] == gathers[1] > 0


def gathered_at_most(prefetch: bool) -> int:
    model = shard(plain(width=64), enable_unshard_prefetch=prefetch)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 64, dtype=torch.float64))
    return libfsdp.memory_stats(model)["gathered_parameters.peak"]


@on_ranks(2)
def test_prefetch_gathers_one_more_unit() -> None:
    block = 64 * 65 * 8
    assert gathered_at_most(prefetch=True) - gathered_at_most(prefetch=False) >= block


def reductions_under_way(overlaps: bool) -> list[int]:
    """Bytes of gradients that are not reduced yet, when backward has computed the first block's."""
    model = shard(plain(width=64), enable_async_reduce_grad=overlaps)
    seen = []

    def look(_: torch.Tensor) -> None:
        stats = libfsdp.memory_stats(model)
        seen.append(stats["unreduced_gradients.live"] + stats["communication.live"])

    def watch(module: nn.Module, args: Any) -> None:
        args[0].register_hook(look)

    model.blocks[0].register_forward_pre_hook(watch)
    for _ in range(2):
        model(torch.ones(2, 64, dtype=torch.float64)).sum().backward()
    return seen


@on_ranks(2)
def test_reductions_end_before_backward_goes_on() -> None:
    overlapping, waiting = (reductions_under_way(overlaps) for overlaps in (True, False))
    assert len(overlapping) == len(waiting) == 2
    assert waiting[1] < overlapping[1]


@on_ranks(2)
def test_gradient_scaling_factor() -> None:
    gradients = []
    for factor in (None, 1.0, 3.0):
        model = shard(plain(), gradient_scaling_factor=factor)
        for _ in range(2):
            model(batch(0, dist.get_rank())).sum().backward()
        gradients.append([whole(p.grad) for p in model.parameters()])
    for mean, total, thrice in zip(*gradients, strict=True):
        torch.testing.assert_close(total, mean * dist.get_world_size(), rtol=1e-12, atol=0)
        torch.testing.assert_close(thrice, total * 3, rtol=1e-12, atol=0)


def bytes_reduced(policy: MixedPrecisionPolicy, sends_as_computed: str) -> int:
    """Returns the bytes that the second backward of a model in bf16 sends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SEND_AS_COMPUTED", sends_as_computed)
        model: Any = shard(plain(torch.bfloat16), mp_policy=policy)
        out = model(batch(0, 0, torch.bfloat16))
        assert out.dtype == torch.bfloat16
        out.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    return wire(model, lambda: model(batch(0, 0, torch.bfloat16)).sum().backward())["reduce_scatter_bytes"]


@on_ranks(2)
def test_dtypes_of_the_policy() -> None:
    fp32 = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    as_bf16 = bytes_reduced(
        MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16), sends_as_computed="1"
    )
    assert bytes_reduced(fp32, sends_as_computed="0") == 2 * as_bf16
    assert bytes_reduced(fp32, sends_as_computed="1") == as_bf16


@on_ranks(2)
def test_validation_passes_leave_the_plan_of_memory() -> None:
    model = shard(plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(validates: bool) -> tuple[int, int]:
        for step in range(4):
            loss = model(batch(step, dist.get_rank())).square().mean()
            if validates:
                with torch.no_grad():
                    model(batch(step, 9))
                    model.blocks[1](batch(step, 9))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if validates:
                with torch.no_grad():
                    model(batch(step, 9))
        stats = libfsdp.memory_stats(model)
        return stats["slots.peak"], stats["slot_allocations"]

    before, allocations = steps(False)
    after, more = steps(True)
    assert after == before > 0
    assert more == allocations


class Tracker:
    """Random numbers as of Megatron-Core's tracker."""

    def __init__(self) -> None:
        self.state = torch.Generator().manual_seed(5).get_state()
        self.forks = 0

    def is_initialized(self) -> bool:
        return True

    @contextmanager
    def fork(self) -> Iterator[None]:
        self.forks += 1
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_meta_models_get_the_first_ranks_values(strategy: str) -> None:
    class Resettable(Model):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.scale)

    torch.manual_seed(dist.get_rank())  # Each rank draws others; the first one's count.
    with torch.device("meta"):
        model: Any = Resettable()
    shard(model, sharding_strategy=strategy)
    values = [whole(p).detach() for p in model.parameters()]
    firsts = [value.clone() for value in values]
    for value, first in zip(values, firsts, strict=True):
        dist.broadcast(first, src=0)
        assert torch.equal(value, first)
        assert torch.isfinite(value).all()
    assert model.blocks[0].weight.shape == (WIDTH, WIDTH)
    model(batch(0, 0, torch.float32)).sum().backward()

    tracker = Tracker()
    name = "megatron.core.tensor_parallel.random"
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].get_cuda_rng_tracker = lambda: tracker  # type: ignore[attr-defined]
    try:
        with torch.device("meta"):
            forked: Any = nn.Linear(8, 8)
        outside = torch.get_rng_state()
        fully_shard(forked, mp_policy=AS_IS, sharding_strategy=strategy)
        assert torch.equal(torch.get_rng_state(), outside)
        assert tracker.forks == 1
        torch.manual_seed(5)
        assert torch.equal(whole(forked.weight), nn.Linear(8, 8).weight)
    finally:
        del sys.modules[name]
    with torch.device("meta"):
        unknown = Model()
    with pytest.raises(ValueError, match=r"module 'Model' .* no reset_parameters"):
        fully_shard(unknown)


@on_ranks(2)
def test_a_root_may_come_later_when_its_modules_are_quiet() -> None:
    model = plain()
    inner: Any = fully_shard(model.blocks[0], mp_policy=AS_IS)
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard(inner)
    inner(batch(0, 0)).sum().backward()  # It runs as a root of its own.
    inner.zero_grad()
    assert FSDPModule in type(inner).__mro__
    inner.unshard()
    with pytest.raises(RuntimeError, match=r"'blocks.0', whose parameters are gathered"):
        fully_shard(model, mp_policy=AS_IS)
    inner.reshard()
    inner.set_requires_gradient_sync(False)
    inner(batch(0, 0)).sum().backward()
    with pytest.raises(RuntimeError, match="left gradients that are not reduced"):
        fully_shard(model, mp_policy=AS_IS)
    inner.set_requires_gradient_sync(True)
    inner(batch(0, 0)).sum().backward()
    inner.zero_grad()
    assert not isinstance(model, FSDPModule)
    fully_shard(model, mp_policy=AS_IS)
    loss = model(batch(0, 0)).square().mean()
    loss.backward()
    reference = plain()
    reference(batch(0, 0)).square().mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_refusals() -> None:
    with pytest.raises(ValueError, match="sharding_strategy is 'all'"):
        fully_shard(plain(), sharding_strategy="all")
    with pytest.raises(ValueError, match="gradient_scaling_factor is 0"):
        fully_shard(plain(), gradient_scaling_factor=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_norms_by_name(strategy: str) -> None:
    reference, model = plain(), shard(plain(), sharding_strategy=strategy)
    model.head.weight.requires_grad_(False)
    for one in (reference, model):
        one(batch(0, 0)).square().mean().backward()
    found = model.compute_per_param_norms()
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, p in reference.named_parameters():
        assert found[name].parameter == pytest.approx(p.norm().item(), rel=1e-12)
        if name != "head.weight":
            assert found[name].gradient == pytest.approx(p.grad.norm().item(), rel=1e-12)
    model.zero_grad()
    assert all(one.gradient is None for one in model.compute_per_param_norms().values())


@on_ranks(2)
def test_diagnostics() -> None:
    model = shard(plain())
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("libfsdp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        table = model.log_parameter_groups()
        model.log_per_param_norms()
    finally:
        logger.removeHandler(handler)
    rows = table.splitlines()
    assert len(rows) == 4
    assert rows[2].startswith("blocks.0 | float64 | yes | 2 | 72 | 0.0%")
    assert lines[0] == table
    assert len(lines) == (1 + 7 if dist.get_rank() == 0 else 1)
    model.check_all_fsdp_buffers()
    model.stop_communication()
    model(batch(0, 0)).sum().backward()
    model.stop_communication()
    assert all(p.grad is not None for p in model.parameters())
    one, other = model.blocks[0].weight, model.blocks[1].weight
    assert isinstance(one, DTensor)
    one._local_tensor = other._local_tensor
    with pytest.raises(RuntimeError, match=r"'blocks\..\.weight' and 'blocks\..\.weight' share memory"):
        model.check_all_fsdp_buffers()
    del model
    gc.collect()


@on_ranks(2)
def test_stop_communication_delivers_what_is_under_way() -> None:
    model = shard(plain())
    model.set_manual_backward_finalization(True)
    model(batch(0, 0)).sum().backward()
    handle = model.finalize_backward(async_op=True)
    assert all(p.grad is None for p in model.parameters())
    model.stop_communication()
    handle.wait()  # there is nothing left
    reference = plain()
    reference(batch(0, 0)).sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-12, atol=1e-14)
