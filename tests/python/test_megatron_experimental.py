"""Megatron-FSDP's sharding of single modules by placements: against the model unsharded, FSDP2, and by what each option changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

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
from libfsdp.megatron.experimental.module import FsdpContext, FsdpModule
from libfsdp.megatron.experimental.placement import Flat

StartRanks = Callable[[int], Ranks]

# Of parameter, gradient and optimizer state along one dimension.
ZERO = {
    "zero0": (Replicate(), Partial("avg"), Replicate()),
    "zero1": (Replicate(), Partial("avg"), Shard(0)),
    "zero2": (Replicate(), Shard(0), Shard(0)),
    "zero3": (Shard(0), Flat(), Shard(0)),
}
# And of two.
NESTED = {
    "hsdp0": ("zero0", "zero0"),
    "hsdp1": ("zero0", "zero1"),
    "hsdp2": ("zero0", "zero2"),
    "hsdp3": ("zero0", "zero3"),
    "hfsdp": ("zero1", "zero3"),
}
STEPS, WIDTH = 3, 8


class Model(nn.Module):
    """Two blocks that are units, and parameters of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        self.repeats = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            run = block if not self.repeats else lambda y, block=block: checkpoint(block, y, use_reentrant=False)
            x = torch.tanh(run(x))
        return self.head(x)


def plain(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def placements_of(kind: str) -> Placements:
    axes = [ZERO[name] for name in NESTED.get(kind, (kind,))]
    parameter, gradient, optimizer = zip(*axes, strict=True)
    return Placements(tuple(range(len(axes))), parameter, gradient, optimizer)


def mesh_of(kind: str, inner: int | None = None) -> DeviceMesh:
    world = dist.get_world_size()
    if kind in ZERO:
        return init_device_mesh("cpu", (world,))
    inner = world // 2 if inner is None else inner
    return init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("outer", "inner"))


def shard(model: Model, kind: str = "zero3", mesh: DeviceMesh | None = None, **options: Any) -> tuple[Any, FsdpContext]:
    mesh = mesh or mesh_of(kind)
    options.setdefault("mixed_precision_policy", MixedPrecisionPolicy(main_params_dtype=None))
    with fully_shard_context(torch.device("cpu")) as context:
        for module in (*model.blocks, model):
            fully_shard(module, mesh, placements_of(kind), **options)
    return model, context


def batch(step: int, rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step)).to(dtype)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
    model, ranks = plain(), dist.get_world_size()

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


def equals_unsharded_and_fsdp2(kind: str, microbatches: int, inner: int | None) -> None:
    mesh = mesh_of(kind, inner)
    model, context = shard(plain(), kind, mesh)
    got = trained_sharded(model, microbatches, context)
    other = plain()
    for module in (*other.blocks, other):
        fsdp2(module, mesh=mesh)
    for expected in (trained_whole(microbatches), trained_sharded(other, microbatches, None)):
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    ("kind", "size", "inner"),
    [(kind, size, None) for kind in ZERO for size in (2, 4)]
    + [(kind, 4, 2) for kind in NESTED]
    + [("hfsdp", 2, 1), ("hsdp3", 2, 2)],
)
def test_placements_train_as_unsharded_and_as_fsdp2(
    ranks: StartRanks, kind: str, size: int, inner: int | None, microbatches: int
) -> None:
    ranks(size).run(equals_unsharded_and_fsdp2, kind, microbatches, inner)


def wire(model: Any, run: Callable[[], None]) -> dict[str, int]:
    before = libfsdp.wire_stats(model)
    run()
    return {key: value - before[key] for key, value in libfsdp.wire_stats(model).items()}


def wire_of_microbatches(kind: str) -> list[tuple[int, int, int]]:
    """Reductions, all bytes that were sent, and gathers, of a microbatch that is not the last one, and of the last."""
    model, context = shard(plain(), kind)
    x = batch(0, dist.get_rank())
    model(x).sum().backward()
    model.zero_grad()

    def run(last: bool) -> None:
        with microbatch(context, is_last=last):
            model(x).sum().backward()

    told = []
    for last in (False, True):
        seen = wire(model, lambda last=last: run(last))
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
    model, _ = shard(plain(), kind)
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard_optimizer(optimizer)
    model(batch(0, 0)).sum().backward()
    optimizer.step()
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    states = [s["exp_avg"] for s in optimizer.state.values()]
    state_bytes = sum((s.to_local() if isinstance(s, DTensor) else s).nbytes for s in states)
    return sum(p.nbytes for p in locals_), state_bytes, libfsdp.memory_stats(model)["total.live"]


def test_placements_say_what_each_rank_holds(ranks: StartRanks) -> None:
    total = sum(p.nbytes for p in plain().parameters())
    held = {kind: ranks(2).run(bytes_of, kind)[0] for kind in ZERO}
    held |= {kind: ranks(4).run(bytes_of, kind)[0] for kind in ("hsdp3", "hfsdp")}
    for kind, pieces in {"zero0": 1, "zero1": 2, "zero2": 2, "zero3": 2, "hsdp3": 2, "hfsdp": 4}.items():
        shards, state, between_steps = held[kind]
        assert (shards, state) == (total // pieces, total // pieces)
        # Whole parameters are one copy, which shards lie in; the engine pads.
        least = total if kind in ("zero0", "zero1", "zero2") else total // pieces
        assert least <= between_steps < 1.5 * least


def refused(kind: str) -> str:
    mesh, model = mesh_of("zero3"), plain()
    named = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("a", "b"))
    bad: dict[str, Callable[[], Any]] = {
        "unknown": lambda: fully_shard(model, mesh, Placements([0], [Shard(0)], [Shard(0)], [Replicate()])),
        "sum": lambda: fully_shard(model, mesh, Placements([0], [Replicate()], [Partial("sum")], [Replicate()])),
        "columns": lambda: fully_shard(model, mesh, Placements([0], [Shard(1)], [Shard(1)], [Shard(1)])),
        "lengths": lambda: Placements([0], [Shard(0)], [Shard(0), Shard(0)], [Shard(0)]),
        "order": lambda: fully_shard(
            model, named, Placements(["b", "a"], [Shard(0)] * 2, [Shard(0)] * 2, [Shard(0)] * 2)
        ),
        "all": lambda: fully_shard(
            model, named, Placements(["a", "b"], [Shard(0)] * 2, [Shard(0)] * 2, [Shard(0)] * 2)
        ),
        "name": lambda: fully_shard(model, mesh, Placements(["c"], [Shard(0)], [Shard(0)], [Shard(0)])),
        "bounds": lambda: fully_shard(model, mesh, Placements([1], [Shard(0)], [Shard(0)], [Shard(0)])),
        "divisor": lambda: fully_shard(model, mesh, placements_of("zero3"), grad_divisor=0),
    }
    with fully_shard_context():
        try:
            bad[kind]()
        except (ValueError, NotImplementedError) as error:
            assert type(model) is Model
            assert not any(isinstance(p, DTensor) for p in model.parameters())
            fully_shard(model, mesh, placements_of("zero3"))  # The module is as it was.
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("unknown", "no strategy has placements"),
        ("sum", "no strategy has placements"),
        ("columns", "no strategy has placements"),
        ("all", "no strategy has placements"),
        ("lengths", "Expected 1 gradient placements"),
        ("order", "mesh-axis order"),
        ("name", "not present in mesh dim names"),
        ("bounds", "out of bounds"),
        ("divisor", "grad_divisor must be positive"),
    ],
)
def test_what_is_no_strategy_is_one_error(ranks: StartRanks, kind: str, text: str) -> None:
    assert all(text in told for told in ranks(2).run(refused, kind))


def contexts() -> None:
    mesh, placements = mesh_of("zero3"), placements_of("zero3")
    model = plain()
    with pytest.raises(RuntimeError, match="inside fully_shard_context"):
        fully_shard(model, mesh, placements)
    with fully_shard_context() as context:
        fully_shard(model.blocks[0], mesh, placements)
        with pytest.raises(ValueError, match="already managed by FSDP"):
            fully_shard(model.blocks[0], mesh, placements)
        with pytest.raises(RuntimeError, match="nesting"), fully_shard_context():
            pass
        with pytest.raises(RuntimeError, match="Exit fully_shard_context"):
            model.blocks[0](batch(0, 0))
        with pytest.raises(RuntimeError, match="not complete"), microbatch(context, is_last=True):
            pass
        assert model.blocks[0].phase is FsdpModule.Phase.RESTING
    model.blocks[0](batch(0, 0))
    with fully_shard_context(), pytest.raises(ValueError, match="another fully_shard_context"):
        fully_shard(model, mesh, placements)
    with pytest.raises(NotImplementedError, match="symmetric"), fully_shard_context(use_symmetric_memory=True):
        pass
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with fully_shard_context():
        fully_shard(tied[0], mesh, placements)
        with pytest.raises(ValueError, match="already owned by another module"):
            fully_shard(tied[1], mesh, placements)
    with pytest.raises(KeyError), fully_shard_context():
        raise KeyError
    with fully_shard_context():  # That one has ended, too.
        pass


def test_contexts(ranks: StartRanks) -> None:
    ranks(2).run(contexts)


def mixed_precision(precision_aware: bool) -> None:
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


@pytest.mark.parametrize("precision_aware", [False, True])
def test_optimizer_steps_on_gradients_of_another_dtype(ranks: StartRanks, precision_aware: bool) -> None:
    ranks(2).run(mixed_precision, precision_aware)


def wire_dtypes() -> list[int]:
    sent = []
    for policy in (
        MixedPrecisionPolicy(main_grads_dtype=torch.float32),
        MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16),
    ):
        model, _ = shard(plain(torch.bfloat16), mixed_precision_policy=policy)
        model(batch(0, 0, torch.bfloat16)).sum().backward()
        sent.append(
            wire(model, lambda model=model: model(batch(0, 0, torch.bfloat16)).sum().backward())["reduce_scatter_bytes"]
        )
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return sent


def test_gradients_travel_in_the_policys_dtype(ranks: StartRanks) -> None:
    in_fp32, in_bf16 = ranks(2).run(wire_dtypes)[0]
    assert in_fp32 == 2 * in_bf16


def divided() -> None:
    gradients = []
    for divisor in (1, 4):
        model, _ = shard(plain(), grad_divisor=divisor)
        for _ in range(2):
            model(batch(0, dist.get_rank())).sum().backward()
        gradients.append([whole(p.grad) for p in model.parameters()])
    for one, quarter in zip(*gradients, strict=True):
        torch.testing.assert_close(one, 4 * quarter, rtol=1e-12, atol=0)


def test_grad_divisor(ranks: StartRanks) -> None:
    ranks(2).run(divided)


def saved_and_loaded(kind: str, other_kind: str, folder: str) -> None:
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


@pytest.mark.parametrize(
    ("kind", "other"),
    [("zero3", "zero3"), ("zero3", "zero0"), ("zero0", "zero1"), ("hfsdp", "hsdp3"), ("hsdp3", "zero2")],
)
def test_checkpoints_go_from_any_placements_to_any(ranks: StartRanks, tmp_path: Path, kind: str, other: str) -> None:
    ranks(4 if "h" in kind else 2).run(saved_and_loaded, kind, other, str(tmp_path / "checkpoint"))


def groups() -> None:
    model = plain()
    model.blocks[1].requires_grad_(False)
    model.head.to(torch.float32)
    mesh = mesh_of("zero3")
    with fully_shard_context() as context:
        for module in (*model.blocks, model):
            fully_shard(module, mesh, placements_of("zero3"), MixedPrecisionPolicy(main_params_dtype=None))
    (block,), (frozen,) = (one.parameter_groups for one in model.blocks)
    own, head = model.parameter_groups
    assert [p.fqns for p in block.fsdp_parameters] == [("weight",), ("bias",)]
    assert [p.fqns for p in head.fsdp_parameters] == [("head.weight",), ("head.bias",)]
    assert (own.dtype, head.dtype) == (torch.float64, torch.float32)
    assert frozen.main_grad is None
    assert not frozen.requires_grad
    assert block.main_weight.nbytes == (WIDTH + 1) * WIDTH * 8 // mesh.size()
    assert block.layout.size == (WIDTH + 1) * WIDTH
    assert block.fsdp_parameters[0].sharded is model.blocks[0].weight
    assert context.forward_order == (model, *model.blocks)
    assert context.backward_order == (model, *reversed(model.blocks))
    assert [one.name for one in context.forward_order] == ["", "blocks.0", "blocks.1"]
    assert [one.is_root() for one in context.forward_order] == [True, False, False]
    x = model.blocks[0](batch(0, 0))
    assert x.shape == (4, WIDTH)
    assert block.fsdp_parameters[0].unsharded is not None
    x.sum().backward()
    assert block.unsharded_bytes == 0
    assert block.main_grad is not None
    assert block.main_grad.nbytes == block.main_weight.nbytes


def test_parameter_groups(ranks: StartRanks) -> None:
    ranks(2).run(groups)


def synchronized_writes() -> None:
    model, _ = shard(plain(), "zero2")
    x = batch(0, 0)
    before = model(x)
    for p in model.parameters():
        p.to_local().data.zero_()
    for module in (*model.blocks, model):
        for group in module.parameter_groups:
            group.sync_model_weight_from_main_weight()
    assert before.abs().sum() > 0
    assert model(x).abs().sum() == 0


def test_writes_that_nothing_else_notices(ranks: StartRanks) -> None:
    ranks(2).run(synchronized_writes)


class _Recorder:
    """NVTX's push and pop."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.open: list[str] = []
        self._before = (torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)

    def __enter__(self) -> _Recorder:
        torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = self._push, self._pop
        return self

    def __exit__(self, *_: Any) -> None:
        torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = self._before

    def _push(self, label: str) -> None:
        self.open.append(label.removeprefix("MFSDP "))
        self.events.append(self.open[-1])

    def _pop(self) -> None:
        self.events.append("/" + self.open.pop())


def ranges() -> None:
    model, _ = shard(plain())
    modules = (model, *model.blocks)
    expected = [
        "<root> forward", "blocks.0 forward", "/blocks.0 forward", "blocks.1 forward", "/blocks.1 forward", "/<root> forward",
        "<root> backward", "blocks.1 backward", "/blocks.1 backward", "blocks.0 backward", "/blocks.0 backward", "/<root> backward",
    ]  # fmt: skip
    for _ in range(2):
        with _Recorder() as nvtx:
            model(batch(0, 0)).sum().backward()
        assert nvtx.events == expected
        assert all(module.phase is FsdpModule.Phase.RESTING for module in modules)

    def fail(*_: Any) -> None:
        phases = [module.phase.name for module in modules]
        raise KeyError(str(phases))

    for way, phases in (
        ("register_forward_pre_hook", "['FORWARD', 'FORWARD', 'RESTING']"),
        ("backward", "['BACKWARD', 'BACKWARD', 'RESTING']"),
    ):
        with _Recorder() as nvtx:
            if way == "backward":
                handle = model.blocks[0].register_forward_hook(lambda m, a, out: out.register_hook(fail) and None)
            else:
                handle = getattr(model.blocks[0], way)(fail)
            with pytest.raises(KeyError) as caught:
                model(batch(0, 0)).sum().backward()
            assert caught.value.args[0] == phases
            handle.remove()
            model.reset_iter_state()
            model(batch(0, 0)).sum().backward()
        assert nvtx.open == []
        assert nvtx.events[-len(expected) :] == expected
        assert all(module.phase is FsdpModule.Phase.RESTING for module in modules)
    with torch.no_grad(), _Recorder() as nvtx:
        model(batch(0, 0))
    assert nvtx.events == expected[:6]


def test_ranges_and_phases(ranks: StartRanks) -> None:
    ranks(2).run(ranges)


def repeated_forwards() -> tuple[int, int]:
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
    return gathers[0], gathers[1]


def test_repeated_forwards_gather_nothing_more(ranks: StartRanks) -> None:
    once, repeated = ranks(2).run(repeated_forwards)[0]
    assert repeated == once > 0


def validation_between_steps() -> tuple[int, int]:
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

    return steps(False), steps(True)


def test_validation_passes_leave_the_plan_of_memory(ranks: StartRanks) -> None:
    before, with_validation = ranks(2).run(validation_between_steps)[0]
    assert with_validation == before > 0


def meta_model(kind: str) -> None:
    with torch.device("meta"):
        model = Model()
    model, _ = shard(model, kind)
    assert not any(p.is_meta for p in model.parameters())
    reference = plain(torch.float32)
    with torch.no_grad():
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            nn.init.constant_(p, 0.25)
            q.fill_(0.25)
    x = batch(0, 0, torch.float32)
    assert torch.equal(model(x), reference(x))


@pytest.mark.parametrize("kind", ["zero0", "zero1", "zero3"])
def test_models_on_meta_get_memory(ranks: StartRanks, kind: str) -> None:
    ranks(2).run(meta_model, kind)


def freed() -> None:
    model, context = shard(plain())
    model(batch(0, 0)).sum().backward()
    gone = weakref.ref(model.blocks[0])
    del model
    gc.collect()
    assert gone() is None
    assert context.forward_order == ()
    model, _ = shard(plain())  # Another one, on the same ranks.
    model(batch(0, 0)).sum().backward()


def test_a_model_that_nobody_has_is_freed(ranks: StartRanks) -> None:
    ranks(2).run(freed)


def on_some_dimensions() -> None:
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


def test_other_dimensions_are_tensor_parallel(ranks: StartRanks) -> None:
    ranks(4).run(on_some_dimensions)


def load_by_assignment() -> None:
    model, _ = shard(plain())
    with pytest.raises(RuntimeError, match=r"load_state_dict\(assign=True\)"):
        model.load_state_dict(plain().state_dict(), assign=True)
    model.load_state_dict(model.state_dict())


def test_assigning_loads_are_refused(ranks: StartRanks) -> None:
    ranks(2).run(load_by_assignment)
