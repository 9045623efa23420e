"""Comparisons of training runs: to the last bit, or within the error that the arithmetic may have."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from support.training import CASES, Options, Replica, Run, Step

# MKL rounds a matrix product by where its operands lie in memory, and sharded parameters lie elsewhere than a replica's.
# Set before the first product, and passed on to ranks; a value that the user gave stays.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

Bounds = Mapping[str, Tensor]


def differences(
    what: str, got: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], bounds: Bounds
) -> str:
    """The first few tensors that differ by more than their bound (0 where none is given), in words."""
    if got.keys() != expected.keys():
        return f"{what}: names {sorted(got)}, expected {sorted(expected)}"
    lines = []
    for name, value in expected.items():
        other = got[name]
        if value is None or other is None:
            if value is not other:
                lines.append(f"{what} of {name}: {'none' if other is None else 'some'} where there should be otherwise")
            continue
        value, other = value.cpu(), other.cpu()
        if (other.shape, other.dtype) != (value.shape, value.dtype):
            lines.append(f"{what} of {name}: {other.dtype} {list(other.shape)}, not {value.dtype} {list(value.shape)}")
            continue
        wrong = ~((other - value).abs() <= bounds.get(name, torch.zeros(())).cpu())
        if name not in bounds:
            wrong = ~((other == value) | (other.isnan() & value.isnan()))
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            lines.append(
                f"{what} of {name}: {int(wrong.sum())} of {wrong.numel()} elements, the first at {at}: "
                f"{other[at].item()!r}, not {value[at].item()!r}"
                + (f" within {bounds[name].expand_as(value)[at].item():.3g}" if name in bounds else "")
            )
    return "\n".join(lines[:5])


def one_order(case: str, options: Options, world: int) -> bool:
    """Whether gradients can be added up in one order only.

    FSDP2 reduces a unit that is called twice twice in a backward: what earlier microbatches left, then this one's.
    """
    return world == 2 and not (CASES[case].called_twice and options.sync == "last")


def assert_same_runs(got: list[Run], expected: list[Run]) -> None:
    """Two runs of the same options, by rank: equal in all that was recorded."""
    for rank, (mine, other) in enumerate(zip(got, expected, strict=True)):
        for number, (a, b) in enumerate(zip(mine.steps, other.steps, strict=True)):
            where = f"rank {rank}, step {number}: "
            assert a.losses == b.losses, f"{where}losses {a.losses}, not {b.losses}"
            assert not (text := differences(where + "gradient", a.gradients, b.gradients, {})), text
            assert a.norm == b.norm, f"{where}norm {a.norm}, not {b.norm}"
            assert not (text := differences(where + "clipped gradient", a.clipped, b.clipped, {})), text
        where = f"rank {rank}, at the end: "
        assert not (text := differences(where + "value", mine.parameters, other.parameters, {})), text
        assert not (text := differences(where + "buffer", mine.buffers, other.buffers, {})), text


def assert_follows_replica(case: str, options: Options, runs: list[Run]) -> None:
    """Each step of a run is what plain arithmetic makes of the parameters that the run had there.

    So each step is compared by itself, and errors do not add up over steps. Where sums have one order, gradients must
    be equal to the last bit. Elsewhere implementations add in orders of their own: of n terms, each of two sums is
    wrong by at most n u times the terms' magnitudes, u being half of eps.
    """
    world = len(runs)
    replica = Replica(case, options, world)
    eps = torch.finfo(options.wire).eps
    run = runs[0]
    for number, step in enumerate(run.steps):
        where = f"step {number}: "
        parameters = {name: p.detach() for name, p in replica.parameters().items()}
        assert not (text := differences(where + "value", step.parameters, parameters, {})), text
        expected = replica.backward(number)
        for rank, of_rank in enumerate(runs):
            losses = [ranks[rank] for ranks in expected.losses]
            assert of_rank.steps[number].losses == losses, f"{where}losses {of_rank.steps[number].losses}, not {losses}"
        terms = world * options.microbatches
        bounds: Bounds = {}
        if not one_order(case, options, world):
            bounds = {name: terms * eps * m for name, m in expected.magnitudes.items()}
        assert not (text := differences(where + "gradient", step.gradients, expected.gradients, bounds)), text
        if options.clip is not None:
            assert step.norm is not None
            check_clipping(where, options.clip, step, world)
        replica.update(step.clipped or step.gradients)
    parameters = {name: p.detach() for name, p in replica.parameters().items()}
    assert not (text := differences("final value", run.parameters, parameters, {})), text
    for rank, of_rank in enumerate(runs):
        buffers = dict(replica.models[rank].named_buffers())
        assert not (text := differences(f"rank {rank}: buffer", of_rank.buffers, buffers, {})), text


def check_clipping(where: str, limit: float, step: Step, world: int) -> None:
    """The norm is that of the gradients, and they are scaled as clip_grad_norm_ promises."""
    eps = torch.finfo(torch.float32).eps
    whole = [g.double() for g in step.gradients.values() if g is not None]
    exact = math.sqrt(sum(g.square().sum().item() for g in whole))
    additions = sum(g.numel() for g in whole)
    assert step.norm is not None
    assert abs(step.norm - exact) <= additions * eps * exact, f"{where}norm {step.norm}, not {exact}"
    assert exact > limit, f"{where}nothing is clipped at a norm of {exact}: the test shows nothing"
    factor = (torch.tensor(limit) / (torch.tensor(step.norm) + 1e-6)).clamp(max=1.0)
    expected = {name: None if g is None else g * factor for name, g in step.gradients.items()}
    # The factor is made before the norm is gathered: a sum over the ranks, an addition, a division, then the product.
    bounds = {name: (world + 3) * eps * g.abs() for name, g in expected.items() if g is not None}
    assert not (text := differences(where + "clipped gradient", step.clipped, expected, bounds)), text
