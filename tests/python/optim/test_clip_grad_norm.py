"""libfsdp.clip_grad_norm_ against torch's over DTensors, and against exact sums."""

from __future__ import annotations

import math

import pytest
import torch
from support.marks import on_ranks
from support.optimizers import ALIGNED, ODD, give_gradients, sharded
from support.training import full
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import libfsdp

INF = float("inf")


@pytest.mark.parametrize(
    ("size", "p", "replicas", "limit"),
    [
        *((2, p, 1, 0.1) for p in (2.0, 1.0, 3.0, INF)),
        (4, 2.0, 1, 0.1),
        (4, 2.0, 2, 0.1),  # With replicas, each element counts once.
        (2, 2.0, 1, 1e6),  # Small gradients stay.
    ],
)
@on_ranks("size")
def test_clips_as_torch(p: float, replicas: int, limit: float) -> None:
    """Ours and torch's on the same gradients; the plain tensor counts once."""
    eps = torch.finfo(torch.float32).eps
    plain = nn.Parameter(torch.ones(3))
    shapes = ALIGNED if p == INF else ODD  # torch fails where a rank has nothing of a parameter
    lists = [[*sharded(name, shapes, replicas), plain] for name in ("libfsdp", "fsdp2")]
    results = []
    for parameters, function in zip(lists, (libfsdp.clip_grad_norm_, nn.utils.clip_grad_norm_), strict=True):
        give_gradients(parameters, 0, without=(1,))
        before = [None if q.grad is None else full(q.grad) for q in parameters]
        # torch's refuses to add up norms of plain tensors and DTensors.
        chosen = parameters if function is libfsdp.clip_grad_norm_ else parameters[:-1]
        norm = full(function(chosen, limit, p))
        results.append((before, norm, [None if q.grad is None else full(q.grad) for q in parameters]))
    (before, norm, clipped), (_, torchs, _) = results
    numbers = torch.cat([g.double().flatten() for g in before if g is not None])
    exact = numbers.abs().max().item() if p == INF else (numbers.abs() ** p).sum().item() ** (1 / p)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert abs(norm.item() - exact) <= eps / 2 * exact, "sums are made in double precision, and rounded once"
    without_plain = numbers[:-3]
    of_those = without_plain.abs().max().item() if p == INF else (without_plain.abs() ** p).sum().item() ** (1 / p)
    assert abs(torchs.item() - of_those) <= len(numbers) * eps * of_those
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for mine, its in zip(clipped, before, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None and its is not None:
            assert torch.equal(mine, its * factor)


@on_ranks(4)
def test_one_number_travels_and_not_finite_is_an_error_where_asked() -> None:
    parameters = sharded("libfsdp", ODD, replicas=2)
    give_gradients(parameters, 0)
    with CommDebugMode() as seen:
        libfsdp.clip_grad_norm_(iter(parameters), 0.1)
    assert seen.get_total_counts() == 1, "one number from each rank of the sharding dimension"
    rank = torch.distributed.get_rank()
    if rank == 3:
        parameters[-1].grad.to_local()[0] = float("nan")
    kept = [full(p.grad) for p in parameters if p.grad is not None]
    # Rank 2 is the other one of rank 3's shards; ranks 0 and 1 are their replicas.
    if rank < 2:
        return
    for p in (2.0, INF):
        with pytest.raises(RuntimeError, match="non-finite"):
            libfsdp.clip_grad_norm_(parameters, 0.1, p, error_if_nonfinite=True)
    now = [full(p.grad) for p in parameters if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(now[:-1], kept[:-1], strict=True))
    assert torch.equal(now[-1].isnan(), kept[-1].isnan())


def test_without_ranks() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
    assert libfsdp.clip_grad_norm_(weight, 1.0).item() == 0
    weight.grad = torch.full((4,), 3.0, dtype=torch.float64)
    norm = libfsdp.clip_grad_norm_([weight], 3.0)
    assert norm.dtype == torch.float64
    assert math.isclose(norm.item(), 6)
    torch.testing.assert_close(weight.grad, torch.full((4,), 1.5, dtype=torch.float64), rtol=1e-6, atol=0)
    with pytest.raises(libfsdp.Error, match="clip_grad_norm_: norm_type must be positive or infinity, got 0"):
        libfsdp.clip_grad_norm_([weight], 3.0, 0)
