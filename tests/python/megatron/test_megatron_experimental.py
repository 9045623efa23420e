"""Megatron-FSDP's sharding of single modules by placements: against the model unsharded, FSDP2, and by what each option changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import at_night, on_ranks
from support.placements import NESTED, ZERO, batch, mesh_of, plain, shard, whole, wire
from support.ranks import StartRanks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp.megatron import MixedPrecisionPolicy
from libfsdp.megatron.experimental import (
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)
from libfsdp.megatron.experimental.module import FsdpContext

STEPS = 3


def train(model: Any, microbatches: int, backward: Callable[[int], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Losses, gradients and parameters of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen = []
    for step in range(STEPS):
        seen.extend(backward(microbatches * step))
        seen.extend(whole(p.grad).clone() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # A validation pass.
            seen.append(model(batch(50, 0)).detach())
    return seen + [whole(p).detach().clone() for p in model.parameters()]


def trained_whole(microbatches: int) -> list[torch.Tensor]:
    model, ranks = plain(outputs=3), dist.get_world_size()

    def backward(first: int) -> list[torch.Tensor]:
        losses = []
        for step in range(first, first + microbatches):
            for rank in range(ranks):
                loss = model(batch(step, rank)).square().mean()
                (loss / ranks).backward()
                if rank == dist.get_rank():
                    losses.append(loss.detach())
        return losses

    return train(model, microbatches, backward)


def trained_sharded(model: Any, microbatches: int, context: FsdpContext | None) -> list[torch.Tensor]:
    def backward(first: int) -> list[torch.Tensor]:
        losses = []
        for i in range(microbatches):
            if context is None:
                model.set_requires_gradient_sync(i == microbatches - 1)
                losses.append(one(first + i))
            else:
                with microbatch(context, is_last=i == microbatches - 1):
                    losses.append(one(first + i))
        return losses

    def one(step: int) -> torch.Tensor:
        loss = model(batch(step, dist.get_rank())).square().mean()
        loss.backward()
        return loss.detach()

    return train(model, microbatches, backward)


@pytest.mark.parametrize("microbatches", [at_night(1), 3])
@pytest.mark.parametrize(
    ("kind", "size", "inner"),
    [(kind, size, None) for kind in ZERO for size in (2, 4)]
    + [(kind, 4, 2) for kind in NESTED]
    + [("hfsdp", 2, 1), ("hsdp3", 2, 2)],
)
@on_ranks("size")
def test_placements_train_as_unsharded_and_as_fsdp2(kind: str, inner: int | None, microbatches: int) -> None:
    mesh = mesh_of(kind, inner)
    model, context = shard(plain(outputs=3), kind, mesh)
    got = trained_sharded(model, microbatches, context)
    other = plain(outputs=3)  # Of three rows, some ranks have none.
    for module in (*other.blocks, other):
        fsdp2(module, mesh=mesh)
    for expected in (trained_whole(microbatches), trained_sharded(other, microbatches, None)):
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def bits_of(kind: str) -> list[torch.Tensor]:
    """Gradients and parameters of three steps in fp32."""
    model, _ = shard(plain(torch.float32, outputs=3), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[torch.Tensor] = []
    for step in range(STEPS):
        model(batch(step, dist.get_rank(), torch.float32)).square().mean().backward()
        seen.extend(whole(p.grad).clone() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return seen + [whole(p).detach().clone() for p in model.parameters()]


@on_ranks(2, 4)
def test_strategies_give_the_same_bits() -> None:
    expected, *others = (bits_of(kind) for kind in ZERO)
    for got in others:
        assert all(map(torch.equal, got, expected))


def wire_of_microbatches(kind: str) -> list[tuple[int, int, int]]:
    """Reductions, all bytes that were sent, and gathers, of a microbatch that is not the last one, and of the last."""
    model, context = shard(plain(), kind)
    x = batch(0, dist.get_rank())
    model(x).sum().backward()
    model.zero_grad()

    def run(last: bool) -> None:
        with microbatch(context, is_last=last):
            model(x).sum().backward()

    run(last=False)
    told = []
    for last in (False, True):
        seen = wire(model, functools.partial(run, last))
        # An all-reduce is a reduce-scatter and an all-gather.
        sent = seen["reduce_scatter_bytes"] + seen["all_gather_bytes"]
        told.append((seen["reduce_scatters"], sent, seen["all_gathers"]))
    return told


@pytest.mark.parametrize("kind", [*ZERO, "hsdp3", "hfsdp"])
def test_partial_gradients_wait_for_the_last_microbatch(ranks: StartRanks, kind: str) -> None:
    size = 4 if kind in NESTED else 2
    (reductions, sent, gathers), (last_reductions, last_sent, _) = ranks(size).run(wire_of_microbatches, kind)[0]
    if kind in ("zero0", "zero1"):
        assert reductions == 0
        assert sent == 0
    elif kind in ZERO:
        assert (reductions, sent) == (last_reductions, last_sent)
    else:
        assert reductions > 0
        assert sent < last_sent
    assert last_reductions >= 3
    # Three units, before forward and before backward, but for the root, which both begin with.
    assert gathers == (0 if kind in ("zero0", "zero1", "zero2") else gathers)
    assert (gathers > 0) == (kind in ("zero3", "hsdp3", "hfsdp"))


def bytes_of(kind: str) -> tuple[int, int, int]:
    """Of shards, of optimizer state, and of all that the engine has between steps."""
    model, _ = shard(plain(width=64), kind)
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard_optimizer(optimizer)
    model(torch.ones(1, 64, dtype=torch.float64)).sum().backward()
    optimizer.step()
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    states = [s["exp_avg"] for s in optimizer.state.values()]
    state_bytes = sum((s.to_local() if isinstance(s, DTensor) else s).nbytes for s in states)
    return sum(p.nbytes for p in locals_), state_bytes, libfsdp.memory_stats(model)["total.live"]


def test_placements_say_what_each_rank_holds(ranks: StartRanks) -> None:
    total = sum(p.nbytes for p in plain(width=64).parameters())
    held = {kind: ranks(2).run(bytes_of, kind)[0] for kind in ZERO}
    held |= {kind: ranks(4).run(bytes_of, kind)[0] for kind in ("hsdp3", "hfsdp")}
    # Into how many pieces shards are cut, and what modules compute with between forward and backward.
    cut = {"zero0": (1, 1), "zero1": (2, 1), "zero2": (2, 1), "zero3": (2, 2), "hsdp3": (2, 2), "hfsdp": (4, 2)}
    for kind, (pieces, parameter_pieces) in cut.items():
        shards, state, between_steps = held[kind]
        assert (shards, state) == (total // pieces, total // pieces)
        # Shards lie in what is there for the computation; the engine pads.
        assert total // parameter_pieces <= between_steps < 1.1 * total // parameter_pieces


@pytest.mark.parametrize("precision_aware", [False, True])
@on_ranks(2)
def test_optimizer_steps_on_gradients_of_another_dtype(precision_aware: bool) -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=None)
    model, _ = shard(plain(torch.bfloat16), mixed_precision_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    seen: list[torch.dtype] = []
    x = batch(0, dist.get_rank(), torch.bfloat16)
    out = model(x)
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad for p in model.parameters()]

    def step(*_: Any) -> None:
        seen.extend(p.grad.dtype for p in model.parameters())

    fully_shard_optimizer(optimizer, precision_aware=precision_aware)
    optimizer.register_step_pre_hook(step)
    if precision_aware:
        with pytest.raises(RuntimeError, match="dtype"):  # SGD is not.
            torch.optim.AdamW(model.parameters(), foreach=False).step()
        return
    optimizer.step()
    assert set(seen) == {torch.float32}
    for p, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        assert p.grad is gradient
        expected = old.to_local() - 0.5 * gradient.to_local().float()
        torch.testing.assert_close(p.to_local(), expected, rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="closures"):
        optimizer.step(lambda: 0.0)


@on_ranks(2)
def test_gradients_travel_in_the_policys_dtype() -> None:
    sent = []
    fp32 = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    bf16 = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)
    for policy, sends_as_computed in ((fp32, "0"), (fp32, "1"), (bf16, "1")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FSDP_SEND_AS_COMPUTED", sends_as_computed)
            model, _ = shard(plain(torch.bfloat16), mixed_precision_policy=policy)
            x = batch(0, 0, torch.bfloat16)
            model(x).sum().backward()
        before = libfsdp.wire_stats(model)["reduce_scatter_bytes"]
        model(x).sum().backward()
        sent.append(libfsdp.wire_stats(model)["reduce_scatter_bytes"] - before)
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    in_fp32, as_computed, in_bf16 = sent
    assert in_fp32 == 2 * in_bf16
    assert as_computed == in_bf16


@on_ranks(2)
def test_grad_divisor() -> None:
    gradients = []
    for divisor in (1, 4):
        model, _ = shard(plain(), grad_divisor=divisor)
        for _ in range(2):
            model(batch(0, dist.get_rank())).sum().backward()
        gradients.append([whole(p.grad) for p in model.parameters()])
    for one, quarter in zip(*gradients, strict=True):
        torch.testing.assert_close(one, 4 * quarter, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("size", "kind", "other_kind"),
    [(2, "zero3", "zero3"), (2, "zero3", "zero0"), (2, "zero0", "zero1"), (4, "hfsdp", "hsdp3"), (4, "hsdp3", "zero2")],
)
@on_ranks("size")
def test_checkpoints_go_from_any_placements_to_any(tmp_path: Path, kind: str, other_kind: str) -> None:
    folder = str(tmp_path / "checkpoint")

    def steps(model: Any, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, first + 2):
            model(batch(step, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, _ = shard(plain(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    fully_shard_optimizer(optimizer)
    steps(model, optimizer, 0)
    save_checkpoint(model, optimizer, folder)
    other = plain()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other, _ = shard(other, other_kind)
    second = torch.optim.AdamW(other.parameters(), lr=0.05)
    load_checkpoint(other, second, folder)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(whole(other.state_dict()[name]), whole(value), rtol=0, atol=0)
    steps(model, optimizer, 2)
    steps(other, second, 2)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(whole(q), whole(p), rtol=1e-12, atol=1e-14)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(whole(second.state[q][key]), whole(optimizer.state[p][key]), rtol=1e-12, atol=0)


@on_ranks(2)
def test_a_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    folder = str(tmp_path / "nothing")
    model, _ = shard(plain())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    model(batch(0, 0)).sum().backward()
    before = [(whole(p).clone(), whole(p.grad).clone()) for p in model.parameters()]
    with pytest.raises(CheckpointException):
        load_checkpoint(model, optimizer, folder)
    assert not optimizer.state
    for p, (value, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(p), value)
        assert torch.equal(whole(p.grad), gradient)


@on_ranks(2)
def test_repeated_forwards_gather_nothing_more() -> None:
    model, _ = shard(plain())
    gathers, gradients = [], []
    for repeats in (False, True):
        model.repeats = repeats
        model(batch(0, 0)).sum().backward()
        model.zero_grad()
        gathers.append(wire(model, lambda: model(batch(0, 0)).sum().backward())["all_gathers"])
        gradients.append([whole(p.grad) for p in model.parameters()])
        model.zero_grad()
        assert all(isinstance(p, DTensor) for p in model.parameters())
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
    assert gathers[0] == gathers[1] > 0


@on_ranks(2)
def test_validation_passes_leave_the_plan_of_memory() -> None:
    model, context = shard(plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(validate: bool) -> int:
        for step in range(4):
            for i in range(2):
                with microbatch(context, is_last=i == 1):
                    model(batch(step, dist.get_rank())).square().mean().backward()
                if validate:
                    with torch.no_grad():
                        model(batch(step, 9))
                    for block in model.blocks:  # In another order, and in part.
                        block.eval()(batch(step, 9))
            optimizer.step()
            optimizer.zero_grad()
        return libfsdp.memory_stats(model)["slots.peak"]

    before = steps(False)
    assert steps(True) == before > 0


@on_ranks(4)
def test_other_dimensions_are_tensor_parallel() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with fully_shard_context():
        fully_shard(model, mesh, Placements(["dp"], *([one] for one in ZERO["zero3"])))
    own = mesh.get_local_rank("dp")
    model(batch(0, own)).square().mean().backward()
    for rank in range(2):
        (reference(batch(0, rank)).square().mean() / 2).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-12)
