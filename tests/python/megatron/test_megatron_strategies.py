"""The Megatron-FSDP interface: every strategy trains as the model without sharding does, and as FSDP2."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.megatron import (
    STRATEGIES,
    Block,
    assert_same_parameters,
    batch,
    gathered_gradients,
    mean_gradients,
    plain_model,
    set_mean_gradients,
    shard,
)
from support.ranks import StartRanks
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp.megatron import fully_shard_optimizer

CASES = [*((strategy, kind) for strategy in STRATEGIES for kind in ("fsdp", "hsdp")), ("optim_grads_params", "hfsdp")]


def losses_of(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
    losses = []
    for step in range(steps):
        loss = model(batch(step, dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("size", "cases", "steps"),
    [(2, [case for case in CASES if case[1] == "fsdp"], 20), (4, CASES, 8)],
    ids=["two_ranks", "four_ranks"],
)
@on_ranks("size")
def test_every_strategy_trains_as_without_sharding(cases: list[tuple[str, str]], steps: int) -> None:
    reference = plain_model()
    for module in reference:
        if isinstance(module, Block):
            fsdp2(module)
    fsdp2(reference)
    expected = losses_of(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), steps)
    single = plain_model()
    alone = torch.optim.AdamW(single.parameters(), lr=0.01)
    mine = []
    for step in range(steps):
        mine.append(single(batch(step, dist.get_rank())).detach().square().mean())
        set_mean_gradients(single, [step])
        alone.step()
    torch.testing.assert_close(torch.stack(mine), expected, rtol=1e-5, atol=1e-6)
    for strategy, kind in cases:
        model = shard(plain_model(), strategy, kind)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        got = losses_of(model, optimizer, steps)
        torch.testing.assert_close(
            got, expected, rtol=1e-6, atol=1e-7, msg=lambda text, case=(strategy, kind): f"{case}: {text}"
        )
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert_same_parameters(model, single)


def bytes_of(strategy: str) -> tuple[int, int, int]:
    model = shard(plain_model(), strategy)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    losses_of(model, optimizer, 1)
    before = libfsdp.wire_stats(model.module)
    losses_of(model, optimizer, 1)
    after = libfsdp.wire_stats(model.module)
    held = sum(p.to_local().numel() for p in model.parameters())
    sent = [after[key] - before[key] for key in ("all_gather_bytes", "reduce_scatter_bytes")]
    return sent[0], sent[1], held


def test_strategies_differ_in_bytes(ranks: StartRanks) -> None:
    sent = {strategy: ranks(2).run(bytes_of, strategy)[0] for strategy in STRATEGIES}
    elements = sum(p.numel() for p in plain_model().parameters())
    blocks = sum(p.numel() for module in plain_model() if isinstance(module, Block) for p in module.parameters())
    padded = sum(2 * -(-p.size(0) // 2) * (p.numel() // p.size(0)) for p in plain_model().parameters())
    half = 4 * padded // 2
    # Gradients travel once in all of them, and parameters (or, unsharded, the reduced gradients) once, or again for backward.
    assert all(one[1] == half for one in sent.values())
    assert sent["no_shard"][0] == sent["optim"][0] == sent["optim_grads"][0] == half
    assert half < sent["optim_grads_params"][0] <= half + 4 * (blocks + 3) // 2 + 4 * 3
    assert sent["no_shard"][2] == elements
    assert all(2 * sent[strategy][2] == padded for strategy in STRATEGIES[1:])


@on_ranks(2)
def test_without_units_parameters_stay_gathered() -> None:
    gathers = []
    for units in (None, [Block]):
        model = shard(plain_model(), fsdp_unit_modules=units, sync_model_each_microbatch=False)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for step in range(2):
            before = libfsdp.wire_stats(model.module)["all_gathers"] if step else 0
            for microbatch in range(3):
                model(batch(microbatch, dist.get_rank())).square().mean().backward()
            if step:
                gathers.append(libfsdp.wire_stats(model.module)["all_gathers"] - before)
            optimizer.step()
            optimizer.zero_grad()
            assert all(isinstance(p, DTensor) for p in model.parameters())
    # One gather of all, or of the rest; and of each of three blocks, for each forward and backward but where they follow each other.
    assert gathers[0] == 1
    assert gathers[1] >= 1 + 3 * 3


@on_ranks(2)
def test_contexts_restore_the_state_they_found() -> None:
    model = shard(plain_model(), sync_model_each_microbatch=False)
    for before in (False, True):
        model.set_model_auto_sync(before)
        with model.sync():
            assert model.model_auto_sync
            with model.no_sync():
                assert not model.model_auto_sync
            assert model.model_auto_sync
        assert model.model_auto_sync is before
    model.is_last_microbatch = False
    with model.no_sync():
        pass
    assert model.is_last_microbatch is False


def assert_gradients(model: Any, steps: list[int], factor: float = 1.0) -> None:
    """They are those of these steps' batches."""
    for got, wanted in zip(gathered_gradients(model), mean_gradients(plain_model(), steps), strict=True):
        torch.testing.assert_close(got, factor * wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("auto", [True, False], ids=["auto", "manual"])
@pytest.mark.parametrize(("size", "strategy", "kind"), [(2 if kind == "fsdp" else 4, one, kind) for one, kind in CASES])
@on_ranks("size")
def test_microbatches_add_up_exactly(strategy: str, kind: str, auto: bool) -> None:
    model = shard(plain_model(), strategy, kind, sync_model_each_microbatch=auto)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for last in ("never", "third", "by count"):
        for microbatch in range(3):
            if last == "third":
                model.is_last_microbatch = microbatch == 2
            model(batch(microbatch, dist.get_rank())).square().mean().backward()
            if auto:
                assert_gradients(model, list(range(microbatch + 1)))
                assert model.microbatch_count == 0
            else:
                assert model.microbatch_count == microbatch + 1
                assert all(p.grad is None for p in model.parameters())
        if not auto:
            model.finish_grad_sync()
        assert model.microbatch_count == 0
        assert_gradients(model, [0, 1, 2])
        model.is_last_microbatch = False
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())


def sent(model: Any) -> int:
    """All bytes; where values do not change and parameters stay whole, those of reductions."""
    stats = libfsdp.wire_stats(model.module)
    return stats["reduce_scatter_bytes"] + stats["all_gather_bytes"]


def reductions(strategy: str, kind: str, how: str) -> list[int]:
    model = shard(plain_model(), strategy, kind, sync_model_each_microbatch=how == "auto")
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses_of(model, optimizer, 1)
    counts = []
    for microbatch in range(3):
        model.is_last_microbatch = microbatch == 2
        loss = model(batch(microbatch, dist.get_rank())).square().mean()
        before = sent(model)
        loss.backward()
        counts.append(sent(model) - before)
    before = sent(model)
    optimizer.step()
    counts.append(sent(model) - before)
    return counts


def test_when_gradients_travel(ranks: StartRanks) -> None:
    """Sharded gradients are reduced by each backward, others by the last one; the outer dimension only then."""
    for strategy in STRATEGIES[:3]:
        every, once = (ranks(2).run(reductions, strategy, "fsdp", how)[0] for how in ("auto", "last"))
        assert every[0] == every[1] == every[2] > 0
        assert every[3] == 0
        if strategy in ("no_shard", "optim"):
            assert once[:2] == [0, 0]
            assert once[2] + once[3] == every[2]
        else:
            assert once[0] == every[0]
            assert sum(once) == sum(every)
    every = ranks(4).run(reductions, "optim_grads", "hsdp", "auto")[0]
    partial = ranks(4).run(reductions, "optim_grads", "hsdp", "last")[0]
    assert 0 < partial[0] < every[0]
    assert sum(partial) < sum(every)


@on_ranks(2)
def test_zero_grad_drops_what_was_not_reduced() -> None:
    model = shard(plain_model(), "optim", sync_model_each_microbatch=False)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(batch(0, dist.get_rank())).square().mean()
    optimizer.zero_grad()  # Between forward and backward.
    loss.backward()
    optimizer.zero_grad()  # Drops what was not reduced yet.
    model(batch(1, dist.get_rank())).square().mean().backward()
    model.finish_grad_sync()
    assert_gradients(model, [1])
    model.scale_gradients(0.5)
    assert_gradients(model, [1], factor=0.5)
    optimizer.zero_grad(zero_grad_buffer=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.zero_grad_buffer()
