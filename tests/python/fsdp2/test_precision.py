"""Dtypes of single parameters: param_dtype_override_fn, and reductions that follow grad_dtype, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from support import device
from support.marks import on_ranks
from support.training import full
from torch import nn

import libfsdp
from libfsdp import MixedPrecisionPolicy, fully_shard
from libfsdp._core import precision

bf16, fp32 = torch.bfloat16, torch.float32


class Mixed(nn.Module):
    """A matrix, and a scale that is to be computed with in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6, bias=False)
        self.scale = nn.Parameter(torch.linspace(1, 2, 6))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [x.dtype, self.linear.weight.dtype, self.scale.dtype]
        return self.linear(x).float() * self.scale


def override(parameter: nn.Parameter) -> torch.dtype | None:
    return fp32 if parameter.ndim == 1 else None


@on_ranks(2)
def test_one_parameter_keeps_its_dtype() -> None:
    torch.manual_seed(0)
    made = Mixed()
    plain = Mixed()
    plain.load_state_dict(made.state_dict())
    plain.to(device.TYPE)
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32, param_dtype_override_fn=override)
    assert isinstance(policy, torch.distributed.fsdp.MixedPrecisionPolicy)
    fully_shard(made, mp_policy=policy)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank())).to(device.TYPE)
    made(x).sum().backward()
    assert made.seen == [bf16, bf16, fp32]
    # What plain arithmetic makes of it: the matrix in bfloat16, the scale in full.
    plain.linear.to(bf16)
    plain(x.to(bf16)).sum().backward()
    for ours, theirs in zip(made.parameters(), plain.parameters(), strict=True):
        expected = theirs.grad.float()
        dist.all_reduce(expected)
        assert torch.equal(full(ours.grad), full(expected / 2))
    assert libfsdp.unit_info(made)[0].param_dtypes == (bf16, fp32)


def always(answer: Any) -> Callable[[nn.Parameter], Any]:
    return lambda parameter: answer


@on_ranks(2)
def test_other_dtypes_are_refused() -> None:
    for given, text in ((torch.float16, "original dtype"), ("bfloat16", "torch.dtype or None")):
        policy = MixedPrecisionPolicy(param_dtype=bf16, param_dtype_override_fn=always(given))
        with pytest.raises(ValueError, match=text):
            fully_shard(nn.Linear(4, 4), mp_policy=policy)


@on_ranks(2)
def test_gradients_are_reduced_in_the_dtype_of_their_parameter() -> None:
    def gradient_of(**options: Any) -> torch.Tensor:
        made = nn.Linear(2, 4, bias=False)
        fully_shard(made, mp_policy=MixedPrecisionPolicy(param_dtype=bf16), **options)
        value = 256.0 if torch.distributed.get_rank() == 0 else 1.0
        made(torch.full((1, 2), value)).sum().backward()
        return full(made.weight.grad).float()

    # 257 is 256 in bfloat16, which has eight digits.
    exact, rounded = torch.full((4, 2), 128.5), torch.full((4, 2), 128.0)
    assert torch.equal(gradient_of(follow_grad_dtype=True), exact)
    assert torch.equal(gradient_of(follow_grad_dtype=False), rounded)
    # Main parameters may be wider than is worth sending.
    assert torch.equal(gradient_of(follow_grad_dtype=True, main_params_dtype=torch.float64), rounded)
    assert torch.equal(gradient_of(), exact if precision.torch_has_override else rounded)


@on_ranks(2)
def test_gradients_follow_grad_dtype() -> None:
    def gradient_of(*, follows: bool | None, policy: MixedPrecisionPolicy, microbatches: list[float]) -> torch.Tensor:
        made = nn.Linear(2, 4, bias=False, dtype=bf16)
        made.weight.grad_dtype = fp32
        fully_shard(made, mp_policy=policy, follow_grad_dtype=follows)
        for value in microbatches:
            made(torch.full((1, 2), value, dtype=bf16)).sum().backward()
        return full(made.weight.grad)

    # 256 + 1 - 256 is 0 in bfloat16, which has eight digits.
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=fp32)):
        exact = gradient_of(follows=True, policy=policy, microbatches=[256.0, 1.0, -256.0])
        assert exact.dtype == fp32
        assert torch.equal(exact, torch.ones(4, 2))
    # A reduction in bfloat16 rounds what travels, and not what is added up.
    rounded = gradient_of(follows=True, policy=MixedPrecisionPolicy(reduce_dtype=bf16), microbatches=[256.0, 1.0])
    assert rounded.dtype == fp32
    assert torch.equal(rounded, torch.full((4, 2), 257.0))
    unfollowed = gradient_of(follows=False, policy=MixedPrecisionPolicy(), microbatches=[256.0, 1.0, -256.0])
    assert unfollowed.dtype == bf16
    assert torch.equal(unfollowed, torch.zeros(4, 2, dtype=bf16))
    follows_anyway = precision.torch_has_override
    by_default = gradient_of(follows=None, policy=MixedPrecisionPolicy(), microbatches=[1.0])
    assert by_default.dtype == (fp32 if follows_anyway else bf16)


def install() -> None:
    theirs = torch.distributed.fsdp.MixedPrecisionPolicy
    with libfsdp.installed():
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=bf16, param_dtype_override_fn=override)
        assert isinstance(policy, theirs)
    assert torch.distributed.fsdp.MixedPrecisionPolicy is theirs


def test_installed_policy_takes_the_function() -> None:
    install()
