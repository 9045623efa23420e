"""Features of torch around sharded modules, with libfsdp behind torch.distributed.fsdp's names: as with FSDP2 itself.

Both run the same program, and must give the same losses, gradients and parameters to the last bit (two ranks, fp32).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparison import assert_same_runs, differences
from support.marks import at_night, on_ranks
from support.models import Case, Transformer, next_token_loss, tokens
from support.ranks import ComparedRanks, run_both
from support.training import (
    Gradients,
    Options,
    Run,
    batch_of,
    full,
    full_gradients,
    installed,
    mesh_of,
    seeded,
    train_sharded,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import libfsdp

BLOCKS = 3
PLAIN = Options()
CASE = Case(lambda: Transformer(blocks=BLOCKS), tokens(2, 8), lambda m: list(m.blocks), next_token_loss)


@dataclass(frozen=True)
class Feature:
    """What a program does around fully_shard."""

    prepare: Callable[[Any], None] = lambda model: None  # Before it.
    finish: Callable[[Any], Callable[..., Any]] = lambda model: model  # After it; gives what is called.
    options: Options = PLAIN


def compiled(backend: str, **arguments: Any) -> Callable[[Any], None]:
    """Each block is compiled in place, before it is sharded."""

    def prepare(model: Any) -> None:
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(backend=backend, **arguments)

    return prepare


def replaced_by_compiled(backend: str) -> Callable[[Any], None]:
    """Each block is replaced by what torch.compile gives."""

    def prepare(model: Any) -> None:
        torch._dynamo.reset()
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend=backend, fullgraph=True)

    return prepare


def compiled_whole(backend: str) -> Callable[[Any], Callable[..., Any]]:
    """The whole model is compiled after it was sharded: graphs break where FSDP's hooks are."""

    def finish(model: Any) -> Callable[..., Any]:
        torch._dynamo.reset()
        call: Callable[..., Any] = torch.compile(model, backend=backend)
        return call

    return finish


def wrapped(implementation: CheckpointImpl) -> Callable[[Any], None]:
    """Each block becomes a module that repeats its forward in backward."""

    def prepare(model: Any) -> None:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=implementation)

    return prepare


def checkpointed(*, use_reentrant: bool, around: bool) -> Callable[[Any], Callable[..., Any]]:
    """The model calls its blocks by checkpoint(): with FSDP's hooks inside (around=True), or their forwards alone."""

    def finish(model: Any) -> Callable[..., Any]:
        for block in model.blocks:
            name = "_call_impl" if around else "forward"
            original = getattr(block, name)

            def call(*args: Any, original: Any = original) -> Any:
                return checkpoint(original, *args, use_reentrant=use_reentrant)

            setattr(block, name, call)
        return model

    return finish


def in_one_region(*, use_reentrant: bool) -> Callable[[Any], Callable[..., Any]]:
    """One checkpoint() around all blocks."""

    def finish(model: Any) -> Callable[..., Any]:
        calls = [block._call_impl for block in model.blocks]

        def in_order(x: Tensor) -> Tensor:
            for call in calls:
                x = call(x)
            return x

        for block in model.blocks:
            block._call_impl = lambda x: x
        model.blocks[0]._call_impl = lambda x: checkpoint(in_order, x, use_reentrant=use_reentrant)
        return model

    return finish


def autocast(model: Any) -> Callable[..., Any]:
    """Calls the model under autocast."""

    def call(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(*args)

    return call


def on_another_thread(model: Any) -> Callable[..., Any]:
    """Runs forward on a thread of its own."""

    def call(*args: Any) -> Any:
        out: list[Any] = []
        thread = threading.Thread(target=lambda: out.append(model(*args)))
        thread.start()
        thread.join()
        return out[0]

    return call


def called_functionally(values: Callable[[Any], dict[str, Tensor]]) -> Callable[[Any], Callable[..., Any]]:
    """Calls the model with its own parameters, given once more."""

    def finish(model: Any) -> Callable[..., Any]:
        return lambda *args: torch.func.functional_call(model, values(model), args)

    return finish


def evaluated_between(context: Callable[[], Any]) -> Callable[[Any], Callable[..., Any]]:
    """Before each step, and so before the first of all, there is a forward without gradients."""

    def finish(model: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with context():
                without = model(*args)
            out = model(*args)
            assert torch.equal(without, out.detach())
            return out

        return call

    return finish


def failing_before(phase: str) -> Callable[[Any], Callable[..., Any]]:
    """Before each step, a forward or a backward raises in the second block."""

    def finish(model: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with told_to_fail(model.blocks[1].up, phase), pytest.raises(ValueError, match="told to fail"):
                model(*args).sum().backward()
            if hasattr(model, "reset_iter_state"):
                model.reset_iter_state()
            model.zero_grad()
            return model(*args)

        return call

    return finish


@contextmanager
def told_to_fail(module: nn.Module, phase: str) -> Iterator[None]:
    """The module's hooks raise."""

    def fail(*_: Any) -> None:
        raise ValueError("told to fail")

    handle = module.register_forward_pre_hook(fail) if phase == "forward" else module.register_full_backward_hook(fail)
    yield
    handle.remove()


def in_deep_backward(model: Any) -> Callable[..., Any]:
    """Blocks run within checkpoints within checkpoints..., so that backward repeats them on a thread of autograd's."""

    def nest(call: Callable[..., Any], depth: int) -> Callable[..., Any]:
        for _ in range(depth):
            call = lambda x, inner=call: checkpoint(inner, x, use_reentrant=True)  # noqa: E731
        return call

    model.blocks[1]._call_impl = nest(model.blocks[1]._call_impl, 65)  # Beyond 60, it goes on on another thread.
    return model


FEATURES = {
    "plain": Feature(),
    "compile_eager": Feature(compiled("eager", fullgraph=True)),
    "compile_aot_eager": Feature(compiled("aot_eager", fullgraph=True)),
    "compile_replaced": Feature(replaced_by_compiled("aot_eager")),
    "compile_bf16": Feature(compiled("aot_eager", fullgraph=True), options=Options(compute=torch.bfloat16)),
    "compile_whole_eager": Feature(finish=compiled_whole("eager")),
    "compile_whole_aot_eager": Feature(finish=compiled_whole("aot_eager")),
    "wrapped_non_reentrant": Feature(wrapped(CheckpointImpl.NO_REENTRANT)),
    "wrapped_reentrant": Feature(wrapped(CheckpointImpl.REENTRANT)),
    "non_reentrant_around": Feature(finish=checkpointed(use_reentrant=False, around=True)),
    "reentrant_around": Feature(finish=checkpointed(use_reentrant=True, around=True)),
    "non_reentrant_inside": Feature(finish=checkpointed(use_reentrant=False, around=False)),
    "reentrant_inside": Feature(finish=checkpointed(use_reentrant=True, around=False)),
    "non_reentrant_region": Feature(finish=in_one_region(use_reentrant=False)),
    "reentrant_region": Feature(finish=in_one_region(use_reentrant=True)),
    "autocast": Feature(finish=autocast),
    "functional_call": Feature(finish=called_functionally(lambda model: dict(model.named_parameters()))),
    "functional_call_with_state": Feature(finish=called_functionally(lambda model: model.state_dict())),
    "no_grad_between": Feature(finish=evaluated_between(torch.no_grad)),
    "inference_between": Feature(finish=evaluated_between(torch.inference_mode)),
    "forward_failed_before": Feature(finish=failing_before("forward")),
    "backward_failed_before": Feature(finish=failing_before("backward")),
    "forward_on_another_thread": Feature(finish=on_another_thread),
    "backward_on_autograds_threads": Feature(finish=in_deep_backward),
}
FEATURES |= {
    f"{name}_no_sync": replace(FEATURES[name], options=Options(microbatches=2, sync="last"))
    for name in ("compile_aot_eager", "wrapped_non_reentrant", "reentrant_around")
}


def train_with(feature_name: str, implementation: str) -> Run:
    """A training run with the feature."""
    feature = FEATURES[feature_name]
    with installed(implementation):
        model: Any = seeded(CASE)
        feature.prepare(model)
        shard_as_programs_do(model, feature.options)
        return train_sharded(model, CASE, feature.options, feature.finish(model))


def shard_as_programs_do(model: Any, options: Options) -> Any:
    """By torch's own names."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=options.compute, reduce_dtype=options.reduce)
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(1), mp_policy=policy)
    return fully_shard(model, mesh=mesh_of(1), mp_policy=policy)


if "FSDP_NIGHTLY" in os.environ:  # It calls the C++ compiler for each graph.
    FEATURES["compile_inductor"] = Feature(compiled("inductor", fullgraph=True))
# FSDP2 can't train after an inference, which made its buffers; keeps gradients of a backward that failed; and takes tensors for its
# parameters that functional_call has put into their places.
FSDP2_FAILS = ("inference_between", "backward_failed_before", "functional_call_with_state")
# What does not change the arithmetic of a step.
OTHER_ARITHMETIC = ("autocast", "compile_inductor")
SAME_AS_PLAIN = [
    name for name, feature in FEATURES.items() if name not in OTHER_ARITHMETIC and feature.options == PLAIN
]
# Of these, what does not gather more than a plain step does. (A region of several units gathers each one for the repeated forward, and
# once more for its backward.)
ONE_FORWARD = [name for name in SAME_AS_PLAIN if not name.endswith(("_between", "_before", "_region"))]


Runs = Callable[[str, str], list[Run]]


@pytest.fixture(scope="module")
def runs(compared_ranks: ComparedRanks) -> Runs:
    """Training runs by rank, each made once."""
    return functools.cache(lambda feature, name: compared_ranks[name](2).run(train_with, feature, name))


# Compiling takes longest. "compile_eager" and "compile_aot_eager" are what the others are variants of.
AT_NIGHT = ("compile_bf16", "compile_replaced", "compile_whole_aot_eager", "compile_aot_eager_no_sync")


def each(names: Iterable[str]) -> list[Any]:
    return [at_night(name) if name in AT_NIGHT else name for name in names]


@pytest.mark.parametrize("feature", each(name for name in FEATURES if name not in FSDP2_FAILS))
def test_equals_fsdp2(runs: Runs, feature: str) -> None:
    assert_same_runs(runs(feature, "libfsdp"), runs(feature, "fsdp2"))


@pytest.mark.parametrize("feature", each(SAME_AS_PLAIN))
def test_changes_nothing(runs: Runs, feature: str) -> None:
    for mine, other in zip(runs(feature, "libfsdp"), runs("plain", "libfsdp"), strict=True):
        for a, b in zip(mine.steps, other.steps, strict=True):
            assert a.losses == b.losses
            assert not (text := differences("gradient", without_wrappers(a.gradients), b.gradients, {})), text
        assert not (text := differences("final value", without_wrappers(mine.parameters), other.parameters, {})), text


def without_wrappers(named: Gradients) -> Gradients:
    """The names that parameters have in the model without torch.compile's and the checkpoint's modules."""
    return {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): tensor
        for name, tensor in named.items()
    }


@pytest.mark.parametrize("name", each(ONE_FORWARD))
@on_ranks(2)
def test_gathers_each_unit_once_in_each_direction(name: str) -> None:
    """Recomputation gathers nothing twice. The root stays, and the last block is there when backward begins."""
    feature = FEATURES[name]
    with libfsdp.installed():
        model: Any = seeded(CASE)
        feature.prepare(model)
        shard_as_programs_do(model, feature.options)
        call = feature.finish(model)
        before: dict[str, int] = {}
        for number in range(3):
            before = libfsdp.wire_stats(model) if number > 0 else {}
            CASE.loss(call, batch_of(CASE, number, 0, dist.get_rank())).backward()
        after = libfsdp.wire_stats(model)
        counts = [after[key] - before[key] for key in ("all_gathers", "reduce_scatters")]
    assert counts == [2 * BLOCKS, BLOCKS + 1]


def graphs_of(implementation: str, whole: bool) -> list[int]:
    """How many operators each graph has that torch.compile has made in three steps."""
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    with installed(implementation):
        model: Any = seeded(CASE)
        if not whole:
            for block in model.blocks:
                block.compile(backend=backend, fullgraph=True)
        shard_as_programs_do(model, Options())
        train_sharded(model, CASE, Options(), torch.compile(model, backend=backend) if whole else model)
    return graphs


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
def test_hooks_stay_out_of_graphs(compared_ranks: ComparedRanks, whole: bool) -> None:
    ours, theirs = run_both(compared_ranks, 2, graphs_of, whole)
    assert ours == theirs
    assert min(ours[0]) > 2


def seen_by_hooks(implementation: str) -> list[tuple[str, bool]]:
    """In which order hooks of a unit's module run in two steps, and whether it shows shards to them."""
    seen: list[tuple[str, bool]] = []
    with installed(implementation):
        from torch.distributed.fsdp import fully_shard

        model: Any = seeded(CASE)
        block = model.blocks[1]

        def note(name: str) -> Callable[..., None]:
            return lambda *_: seen.append((name, isinstance(block.up.weight, DTensor)))

        def register(when: str) -> None:
            block.register_forward_pre_hook(note(f"before forward, {when}"))
            block.register_forward_pre_hook(note(f"before forward, first, {when}"), prepend=True)
            block.register_forward_hook(note(f"after forward, {when}"))
            block.register_forward_hook(note(f"after forward, first, {when}"), prepend=True)
            block.register_full_backward_pre_hook(note(f"before backward, {when}"))
            block.register_full_backward_hook(note(f"after backward, {when}"))

        register("registered before")
        for unit in (*model.blocks, model):
            fully_shard(unit)
        register("registered after")
        block.up.register_forward_hook(note("within forward"))
        train_sharded(model, CASE, Options(steps=2))
    return seen


def test_hooks_of_others_see_what_they_see_with_fsdp2(compared_ranks: ComparedRanks) -> None:
    ours, theirs = run_both(compared_ranks, 2, seen_by_hooks)
    assert ours == theirs
    assert {shards for _, shards in ours[0]} == {False, True}


def other_values(implementation: str) -> str:
    """What becomes of functional_call with other values than the shards', and of the step after it."""
    model = shard_as_programs_do_with(implementation)
    before = {name: full(p) for name, p in model.named_parameters()}
    batch = batch_of(CASE, 0, 0, dist.get_rank())
    CASE.loss(model, batch)
    text = ""
    try:
        torch.func.functional_call(model, {"norm.weight": model.norm.weight.detach() * 2}, batch)
    except RuntimeError as error:
        text = str(error)
    CASE.loss(model, batch).backward()
    assert all(torch.equal(full(p), before[name]) for name, p in model.named_parameters())
    assert all(gradient is not None for gradient in full_gradients(model).values())
    return text


def shard_as_programs_do_with(implementation: str) -> Any:
    """A new model."""
    with installed(implementation):
        return shard_as_programs_do(seeded(CASE), Options())


def test_other_values_in_functional_call_are_an_error(compared_ranks: ComparedRanks) -> None:
    """FSDP2 takes no notice of them, and computes with the parameters."""
    assert compared_ranks["fsdp2"](2).run(other_values, "fsdp2") == ["", ""]
    for text in compared_ranks["libfsdp"](2).run(other_values, "libfsdp"):
        assert "norm.weight" in text
        assert "functional_call" in text


def unsharded_ahead(ahead: bool) -> list[tuple[int, list[float]]]:
    """Gathers and losses of steps, before each of which two units are gathered, or not."""
    model = shard_as_programs_do_with("libfsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[tuple[int, list[float]]] = []
    gathers = libfsdp.wire_stats(model)["all_gathers"] if model._get_fsdp_state().model else 0
    for number in range(3):
        if ahead:
            model.unshard(async_op=True)
            model.blocks[0].unshard()
        loss = CASE.loss(model, batch_of(CASE, number, 0, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now = libfsdp.wire_stats(model)["all_gathers"]
        seen.append((now - gathers, [loss.item()]))
        gathers = now
    return seen


@on_ranks(2)
def test_what_was_gathered_before_forward_is_not_gathered_again() -> None:
    """The first step aside, in which only forward tells what the root is."""
    plain, ahead = unsharded_ahead(False), unsharded_ahead(True)
    assert ahead[1:] == plain[1:]
    assert ahead[0][1] == plain[0][1]
