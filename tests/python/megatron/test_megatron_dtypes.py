"""The Megatron-FSDP interface: each combination of dtypes with each strategy, against sums in double precision."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.megatron import STRATEGIES, batch, gathered_gradients, plain_model, shard
from torch import nn

import libfsdp
from libfsdp.megatron import MixedPrecisionPolicy, fully_shard_optimizer
from libfsdp.megatron import _policy as policies

VALUES = ("fp32", "bf16", "auto", None)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolved(names: tuple[str | None, ...], own: torch.dtype) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """What the page says: None, and "auto", are the model's own dtype, and for what travels that of main gradients."""
    main, grads, wire = names
    of_grads = DTYPES.get(grads or "", own)
    return DTYPES.get(main or "", own), of_grads, DTYPES.get(wire or "", of_grads)


def rounded_to(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def reference(own: torch.dtype, microbatches: int) -> list[list[list[torch.Tensor]]]:
    """By microbatch, rank and parameter: the gradients that the model computes, in its own dtype."""
    model = plain_model(blocks=1, dtype=own)
    found = []
    for step in range(microbatches):
        of_step = []
        for rank in range(dist.get_world_size()):
            model.zero_grad()
            model(batch(step, rank, dtype=own)).square().mean().backward()
            of_step.append([p.grad.clone() for p in model.parameters()])
        found.append(of_step)
    return found


def cell(
    strategy: str, names: tuple[str | None, ...], own: torch.dtype, computed: list[list[list[torch.Tensor]]]
) -> None:
    main, grads, wire = resolved(names, own)
    policy = MixedPrecisionPolicy(*names)
    model = shard(plain_model(blocks=1, dtype=own), strategy, mixed_precision_policy=policy, use_decoupled_grad=True)
    parameters = list(model.parameters())
    assert {p.dtype for p in parameters} == {main}
    case = f"{strategy} {names}"
    ranks = dist.get_world_size()
    for microbatches in (1, 3):
        for step in range(microbatches):
            loss = model(batch(step, dist.get_rank(), dtype=own)).square().mean()
            before = libfsdp.wire_stats(model.module)["reduce_scatter_bytes"]
            loss.backward()
            sent = libfsdp.wire_stats(model.module)["reduce_scatter_bytes"] - before
            # As it was computed, unless autograd converts it, as it does for a grad_dtype of its own.
            as_computed = (own, wire) == (torch.bfloat16, torch.float32) and grads == main
            travels = own if as_computed else wire
            assert sent == travels.itemsize * sum(-(-p.size(0) // ranks) * (p.numel() // p.size(0)) for p in parameters), (
                case
            )
        for p in parameters:
            given: Any = getattr(p, "decoupled_grad", None)
            if given is None:
                assert p.to_local().numel() == 0
                continue
            assert p.grad is None
            assert given.dtype == grads, case
            assert given.to_local().nbytes == grads.itemsize * p.to_local().numel()
        for p in parameters:
            p.grad, p.decoupled_grad = getattr(p, "decoupled_grad", None), None
        # Each rank's gradient is rounded to what travels; sums of ranks, in fp32, and of microbatches to the main gradient's dtype.
        for i, got in enumerate(gathered_gradients(model, grads)):
            of_steps = [torch.stack([one[i].double() for one in computed[step]]) for step in range(microbatches)]
            exact = torch.stack([ranks_.sum(0) / ranks for ranks_ in of_steps]).sum(0)
            magnitude = torch.stack([ranks_.abs().sum(0) / ranks for ranks_ in of_steps]).sum(0)
            bound = magnitude * (
                rounded_to(wire) + microbatches * (rounded_to(grads) + 2 * ranks * rounded_to(torch.float32))
            )
            error = (got.double() - exact).abs()
            assert bool((error <= bound + 1e-30).all()), f"{case}, {microbatches}: {(error / (bound + 1e-30)).max()}"
        model.zero_grad_buffer()


HALVES = [("fp32", "fp16", "fp16"), ("fp16", "fp32", "fp16"), (None, None, None), ("fp32", "fp32", "fp16")]


@pytest.mark.parametrize(
    ("names", "own"),
    [(list(itertools.product(VALUES, VALUES, VALUES)), torch.bfloat16), (HALVES, torch.float16)],
    ids=["each cell of the table", "half precision"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_dtypes(strategy: str, names: list[tuple[str | None, ...]], own: torch.dtype) -> None:
    warnings.simplefilter("ignore")
    computed = reference(own, 3)
    for one in names:
        cell(strategy, one, own, computed)


@pytest.mark.parametrize("names", [("fp32", None, None), ("fp32", "bf16", "fp32"), (None, "fp32", "bf16")])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_optimizers_find_gradients_in_their_dtype(strategy: str, names: tuple[str | None, ...]) -> None:
    warnings.simplefilter("ignore")
    own = torch.bfloat16
    main = resolved(names, own)[0]
    model = shard(plain_model(dtype=own), strategy, mixed_precision_policy=MixedPrecisionPolicy(*names))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    seen = []
    model.module[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    losses = []
    for _ in range(8):
        loss = model(batch(0, dist.get_rank(), dtype=own)).square().mean()
        loss.backward()
        for p in model.parameters():
            assert p.grad is None or p.grad.dtype == main
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert set(seen) == {own}
    assert all(state["exp_avg"].dtype == main for state in optimizer.state.values())
    total = torch.tensor(losses)
    dist.all_reduce(total)
    assert total[-1] < 0.5 * total[0]


@on_ranks(2)
def test_copies_of_main_gradients() -> None:
    """Where grad is a copy of the main gradient, later backwards add to the main one, and what users change counts."""
    warnings.simplefilter("ignore")
    policy = MixedPrecisionPolicy("fp32", "bf16", None)
    model = shard(plain_model(dtype=torch.bfloat16), mixed_precision_policy=policy)

    def backward() -> None:
        model(batch(0, dist.get_rank(), dtype=torch.bfloat16)).square().mean().backward()

    backward()
    one = gathered_gradients(model)
    backward()
    assert all(torch.equal(2 * a, b) for a, b in zip(one, gathered_gradients(model), strict=True))
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(2.0)
    backward()
    for a, b in zip(one, gathered_gradients(model), strict=True):
        torch.testing.assert_close(5 * a, b, rtol=0.01, atol=1e-3)


def test_policies() -> None:
    assert MixedPrecisionPolicy() == MixedPrecisionPolicy(torch.float32, None, None)
    with pytest.warns(DeprecationWarning, match="preserve_fp32_weights is deprecated"):
        assert MixedPrecisionPolicy(preserve_fp32_weights=False).main_params_dtype is None
    with pytest.warns(DeprecationWarning, match="grad_reduce_in_fp32 is deprecated"):
        policy = MixedPrecisionPolicy(grad_reduce_in_fp32=True)
    assert policy.main_grads_dtype == policy.grad_comm_dtype == torch.float32
    with pytest.raises(ValueError, match=r"main_grads_dtype is torch\.int8"):
        MixedPrecisionPolicy(main_grads_dtype=torch.int8)
    with pytest.raises(ValueError, match="grad_comm_dtype is 'fp8'"):
        MixedPrecisionPolicy(grad_comm_dtype="fp8")
    with pytest.warns(DeprecationWarning, match="is deprecated"), pytest.raises(ValueError, match="leave it out"):
        MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16, grad_reduce_in_fp32=True)


def test_low_main_gradients_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_told_of_low_gradients", False)
    policy = MixedPrecisionPolicy()
    low = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    frozen = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16), requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.warn_of_low_gradients([nn.Parameter(torch.zeros(1)), frozen])
    with pytest.warns(UserWarning, match=r"main gradients add up in torch\.bfloat16"):
        policy.warn_of_low_gradients([low])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.warn_of_low_gradients([low])
