"""The Megatron-FSDP interface: every strategy trains as the model without sharding does, and as FSDP2."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.megatron import STRATEGIES, Block, batch, gathered_gradients, mean_gradients, plain_model, shard, whole
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


def train_like_others(cases: list[tuple[str, str]], steps: int) -> None:
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
        for p, gradient in zip(single.parameters(), mean_gradients(single, [step]), strict=True):
            p.grad = gradient
        alone.step()
    torch.testing.assert_close(torch.stack(mine), expected, rtol=1e-5, atol=1e-6)
    for strategy, kind in cases:
        model = shard(plain_model(), strategy, kind)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        got = losses_of(model, optimizer, steps)
        torch.testing.assert_close(
            got, expected, rtol=1e-6, atol=1e-7, msg=lambda text, case=(strategy, kind): f"{case}: {text}"
        )
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            assert isinstance(p, DTensor)
            torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-4, atol=1e-5)


def test_every_strategy_trains_as_without_sharding_on_two_ranks(ranks: StartRanks) -> None:
    ranks(2).run(train_like_others, [case for case in CASES if case[1] == "fsdp"], 20)


def test_every_strategy_trains_as_without_sharding_on_four_ranks(ranks: StartRanks) -> None:
    ranks(4).run(train_like_others, CASES, 8)


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


def no_units() -> list[int]:
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
    return gathers


def test_without_units_parameters_stay_gathered(ranks: StartRanks) -> None:
    # One gather of all, or of the rest; and of each of three blocks, for each forward and backward but where they follow each other.
    for all_in_one, with_blocks in ranks(2).run(no_units):
        assert all_in_one == 1
        assert with_blocks >= 1 + 3 * 3


def restore_states() -> None:
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


def test_contexts_restore_the_state_they_found(ranks: StartRanks) -> None:
    ranks(2).run(restore_states)


def accumulate(strategy: str, kind: str, auto: bool) -> None:
    model = shard(plain_model(), strategy, kind, sync_model_each_microbatch=auto)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    expected = mean_gradients(plain_model(), [0, 1, 2])
    for last in ("never", "third", "by count"):
        for microbatch in range(3):
            if last == "third":
                model.is_last_microbatch = microbatch == 2
            model(batch(microbatch, dist.get_rank())).square().mean().backward()
            if auto:
                some = mean_gradients(plain_model(), list(range(microbatch + 1)))
                for got, wanted in zip(gathered_gradients(model), some, strict=True):
                    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
                assert model.microbatch_count == 0
            else:
                assert model.microbatch_count == microbatch + 1
                assert all(p.grad is None for p in model.parameters())
        if not auto:
            model.finish_grad_sync()
        assert model.microbatch_count == 0
        for got, wanted in zip(gathered_gradients(model), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        model.is_last_microbatch = False
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("auto", [True, False], ids=["auto", "manual"])
def test_microbatches_add_up_exactly(ranks: StartRanks, auto: bool) -> None:
    for strategy, kind in CASES:
        size = 2 if kind == "fsdp" else 4
        ranks(size).run(accumulate, strategy, kind, auto)


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
        every, once = (
            ranks(2).run(reductions, strategy, "fsdp", "auto")[0],
            ranks(2).run(reductions, strategy, "fsdp", "last")[0],
        )
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


def keep_gradients_apart() -> None:
    model = shard(plain_model(), "optim", sync_model_each_microbatch=False)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(batch(0, dist.get_rank())).square().mean()
    optimizer.zero_grad()  # Between forward and backward.
    loss.backward()
    optimizer.zero_grad()  # Drops what was not reduced yet.
    model(batch(1, dist.get_rank())).square().mean().backward()
    model.finish_grad_sync()
    for got, wanted in zip(gathered_gradients(model), mean_gradients(plain_model(), [1]), strict=True):
        torch.testing.assert_close(got, wanted)
    model.scale_gradients(0.5)
    for got, wanted in zip(gathered_gradients(model), mean_gradients(plain_model(), [1]), strict=True):
        torch.testing.assert_close(got, 0.5 * wanted)
    optimizer.zero_grad(zero_grad_buffer=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.zero_grad_buffer()


def test_zero_grad_drops_what_was_not_reduced(ranks: StartRanks) -> None:
    ranks(2).run(keep_gradients_apart)
