"""Calls between the backwards of one update, in all orders: every gradient counts once, and none that was dropped."""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import at_night, on_ranks
from support.megatron import (
    STRATEGIES,
    assert_same_parameters,
    batch,
    gathered_gradients,
    mean_gradients,
    plain_model,
    shard,
    whole,
)
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp.megatron import MegatronFSDP, fully_shard_optimizer

# Numbers are backwards of that batch.
PROGRAMS = {
    "dropped after start, by the optimizer": (0, "start", "zero_grad", 1),
    "dropped after start, keeping tensors": (0, "start", "zeros", 1),
    "dropped after start, by the model": (0, "start", "zero_grad_buffer", 1),
    "dropped after finish": (0, "start", "finish", "zero_grad", 1),
    "a backward after start": (0, "start", 1),
    "a backward after start, and finish": (0, "start", 1, "finish"),
    "two starts": (0, "start", 1, "start", 2),
    "two starts, and what lies between is waited for": (0, "start", "wait", 1, "start", 2, "finish"),
    "a backward after finish": (0, "start", "finish", 1),
    "no_sync alone": ("no_sync", 0, 1),
    "no_sync, and one that is synchronized": ("no_sync", 0, 1, "sync", 2),
    "no_sync in the end": (0, "no_sync", 1),
    "no_sync, which start follows": ("no_sync", 0, "start", 1),
    "no_sync is dropped": ("no_sync", 0, "zero_grad", 1),
}


def kept(program: tuple[Any, ...]) -> list[int]:
    """The batches of which the step is."""
    dropped = max((i for i, call in enumerate(program) if str(call).startswith("zero")), default=-1)
    return [call for call in program[dropped + 1 :] if isinstance(call, int)]


def run_calls(model: MegatronFSDP, optimizer: torch.optim.Optimizer, program: tuple[Any, ...]) -> None:
    synchronizes = True
    for call in program:
        if isinstance(call, int) and synchronizes:
            model(batch(call, dist.get_rank())).square().mean().backward()
        elif isinstance(call, int):
            with model.no_sync():
                model(batch(call, dist.get_rank())).square().mean().backward()
        elif call in ("no_sync", "sync"):
            synchronizes = call == "sync"
        else:
            {
                "start": model.start_grad_sync,
                "finish": model.finish_grad_sync,
                "wait": model.synchronize_gradient_reduce,
                "zero_grad": optimizer.zero_grad,
                "zeros": lambda: optimizer.zero_grad(set_to_none=False),
                "zero_grad_buffer": model.zero_grad_buffer,
            }[call]()


# Whether reductions overlap with backward, and whether each backward is one of an update's last.
SWITCHES = list(itertools.product((False, True), repeat=2))
# On four ranks, each of both with either value; in `make nightly`, each with each.
SWITCHES_ON_4 = SWITCHES if "FSDP_NIGHTLY" in os.environ else [(False, True), (True, False)]


@pytest.mark.parametrize(
    ("size", "strategy", "kind", "switches", "programs", "times"),
    [
        *((2, one, "fsdp", SWITCHES, [name], 2) for name in PROGRAMS for one in STRATEGIES),
        *(
            (4, one, "hsdp", SWITCHES_ON_4, list(PROGRAMS), 1)
            if one == "optim_grads_params"
            else at_night(4, one, "hsdp", SWITCHES_ON_4, list(PROGRAMS), 1)
            for one in STRATEGIES
        ),
        (4, "optim_grads_params", "hfsdp", SWITCHES_ON_4, list(PROGRAMS), 1),
    ],
)
@on_ranks("size")
def test_programs(strategy: str, kind: str, switches: list[tuple[bool, bool]], programs: list[str], times: int) -> None:
    """The programs, so many times each in one run: nothing of one is left for the next."""
    for overlap, auto in switches:
        reference = plain_model()
        model = shard(plain_model(), strategy, kind, overlap_grad_reduce=overlap, sync_model_each_microbatch=auto)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        for name, _ in itertools.product(programs, range(times)):
            program = PROGRAMS[name]
            gradients = mean_gradients(reference, kept(program))
            run_calls(model, optimizer, program)
            optimizer.step()
            optimizer.zero_grad()
            for p, q, gradient in zip(model.parameters(), reference.parameters(), gradients, strict=True):
                q.data.sub_(gradient, alpha=0.5)
                torch.testing.assert_close(
                    whole(p.detach()),
                    q.detach(),
                    rtol=1e-4,
                    atol=1e-5,
                    msg=lambda text, case=(name, overlap, auto): f"{case}: {text}",
                )


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_clipping_before_a_step_that_reduces(strategy: str) -> None:
    """Clipping comes before the reduction that a step would make, and must clip what the step applies."""
    for auto, program, decoupled in itertools.product((False, True), ((0, 1), (0, "no_sync", 1)), (False, True)):
        reference = plain_model()
        model = shard(
            plain_model(), strategy, "fsdp", sync_model_each_microbatch=auto, use_decoupled_grad=decoupled
        )
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        for q, gradient in zip(reference.parameters(), mean_gradients(reference, kept(program)), strict=True):
            q.grad = gradient
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        run_calls(model, optimizer, program)
        norm = libfsdp.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norm, expected)
        assert expected > 0.1
        for p in model.parameters() if decoupled else ():
            p.grad = getattr(p, "decoupled_grad", None)  # A rank without rows has none.
        for got, q in zip(gathered_gradients(model), reference.parameters(), strict=True):
            torch.testing.assert_close(got, q.grad, rtol=1e-4, atol=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()


@pytest.mark.parametrize(("name", "expected"), [("no_sync in the end", 1), ("no_sync, and one that is synchronized", 0)])
@on_ranks(2)
def test_a_step_after_no_sync_warns_once(name: str, expected: int) -> None:
    """torch's clip_grad_norm_ has found no gradient then."""
    model = shard(plain_model(), "optim_grads_params", sync_model_each_microbatch=False)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run_calls(model, optimizer, PROGRAMS[name])
            optimizer.step()
            optimizer.zero_grad()
    assert len([one for one in caught if "ran within no_sync()" in str(one.message)]) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("installs", [True, False])
@on_ranks(2)
def test_parameters_after_a_step_are_the_new_ones(strategy: str, installs: bool) -> None:
    """start_param_sync gathers for a forward. After a step that comes before one, parameters() are the new values."""
    reference = plain_model()
    model = shard(plain_model(), strategy)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(2):
        gradients = mean_gradients(reference, [step])
        model(batch(step, dist.get_rank())).square().mean().backward()
        model.start_param_sync(force_sync=True)
        optimizer.step(install_optimized_model_weights=installs)
        for p, q, gradient in zip(model.parameters(), reference.parameters(), gradients, strict=True):
            q.data.sub_(gradient, alpha=0.5)
            assert isinstance(p, DTensor)
            torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-4, atol=1e-5)
        model.install_optimized_model_weights()
        model.start_param_sync(force_sync=True)
        assert_same_parameters(model, reference)
        optimizer.zero_grad()
