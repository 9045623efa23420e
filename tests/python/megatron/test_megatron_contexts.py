"""Contexts, refusals, parameter groups, ranges and lifetimes of modules that are sharded by placements."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.placements import WIDTH, Model, batch, mesh_of, placements_of, plain, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from libfsdp.megatron import MixedPrecisionPolicy
from libfsdp.megatron.experimental import (
    Placements,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from libfsdp.megatron.experimental.module import FsdpModule


@on_ranks(2)
def test_what_is_no_strategy_is_one_error() -> None:
    mesh = mesh_of("zero3")
    named = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("a", "b"))
    rows, whole = [Shard(0)], [Replicate()]
    zero3 = placements_of("zero3")
    refused: list[tuple[str, Callable[[Model], Any]]] = [
        ("no strategy has placements", lambda m: fully_shard(m, mesh, Placements([0], rows, rows, whole))),
        ("no strategy has placements", lambda m: fully_shard(m, mesh, Placements([0], whole, [Partial("sum")], whole))),
        ("no strategy has placements", lambda m: fully_shard(m, mesh, Placements([0], *[[Shard(1)]] * 3))),
        ("no strategy has placements", lambda m: fully_shard(m, named, Placements(["a", "b"], *[rows * 2] * 3))),
        ("Expected 1 gradient placements", lambda m: Placements([0], rows, rows * 2, rows)),
        ("mesh-axis order", lambda m: fully_shard(m, named, Placements(["b", "a"], *[rows * 2] * 3))),
        ("not present in mesh dim names", lambda m: fully_shard(m, mesh, Placements(["c"], rows, rows, rows))),
        ("out of bounds", lambda m: fully_shard(m, mesh, Placements([1], rows, rows, rows))),
        ("grad_divisor must be positive", lambda m: fully_shard(m, mesh, zero3, grad_divisor=0)),
    ]
    for text, call in refused:
        model = plain()
        with fully_shard_context():
            with pytest.raises((ValueError, NotImplementedError), match=text):
                call(model)
            assert type(model) is Model
            assert not any(isinstance(p, DTensor) for p in model.parameters())
            fully_shard(model, mesh, zero3)  # The module is as it was.


@on_ranks(2)
def test_contexts() -> None:
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
    with fully_shard_context(use_symmetric_memory=True):
        with pytest.raises(
            RuntimeError, match="use_symmetric_memory: symmetric memory needs torch's own groups of NCCL"
        ):
            fully_shard(other := nn.Linear(4, 4), mesh, placements)
        assert type(other) is nn.Linear
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


@on_ranks(2)
def test_parameter_groups() -> None:
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


@on_ranks(2)
def test_writes_that_nothing_else_notices() -> None:
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


@on_ranks(2)
def test_ranges_and_phases() -> None:
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
    model.repeats = True
    seen: list[str] = []

    def look(_: torch.Tensor) -> None:
        seen.extend(module.phase.name for module in modules)

    handle = model.blocks[0].register_forward_pre_hook(lambda module, args: args[0].register_hook(look) and None)
    with _Recorder() as nvtx:
        model(batch(0, 0)).sum().backward()
    handle.remove()
    model.repeats = False
    assert seen[-3:] == ["BACKWARD", "BACKWARD", "RESTING"]
    assert nvtx.open == []
    repeated = ["blocks.1 backward", "blocks.1 forward", "/blocks.1 forward", "/blocks.1 backward"]
    at = nvtx.events.index(repeated[0])
    assert nvtx.events[at : at + 4] == repeated
    with torch.no_grad(), _Recorder() as nvtx:
        model(batch(0, 0))
    assert nvtx.events == expected[:6]


@pytest.mark.parametrize("kind", ["zero0", "zero1", "zero3"])
@on_ranks(2)
def test_models_on_meta_get_memory(kind: str) -> None:
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


@on_ranks(2)
def test_a_model_that_nobody_has_is_freed() -> None:
    model, context = shard(plain())
    model(batch(0, 0)).sum().backward()
    gone = weakref.ref(model.blocks[0])
    del model
    gc.collect()
    assert gone() is None
    assert context.forward_order == ()
    model, _ = shard(plain())  # Another one, on the same ranks.
    model(batch(0, 0)).sum().backward()


@on_ranks(2)
def test_assigning_loads_are_refused() -> None:
    model, _ = shard(plain())
    with pytest.raises(RuntimeError, match=r"load_state_dict\(assign=True\)"):
        model.load_state_dict(plain().state_dict(), assign=True)
    model.load_state_dict(model.state_dict())
