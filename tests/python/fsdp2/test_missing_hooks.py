"""Backwards that do not come by a module's outputs: gradients are reduced once, at the end, with one warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import libfsdp
from libfsdp import fully_shard


class Hidden:
    """An output that is no collection of tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return Hidden(self.linear(x))


class Model(nn.Module):
    """A block whose output is hidden, and one that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.hides = Hides()
        self.sometimes = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            x = self.hides(x).tensor
        if times == 1:
            x = x + self.sometimes(x)
        return self.head(x)


def make(*, mark: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Model()
    sharded = Model()
    sharded.load_state_dict(plain.state_dict())
    if mark:
        assert libfsdp.may_miss_backward_hooks(sharded.hides) is sharded.hides
    fully_shard(sharded.hides, reshard_after_forward=False)
    fully_shard(sharded.sometimes)
    return plain, fully_shard(sharded)


def compare(plain: nn.Module, sharded: nn.Module, times: int) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for model in (plain, sharded):
        model.zero_grad()
        model(x, times).sum().backward()
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
            continue
        dist.all_reduce(theirs.grad)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad / 2)


@on_ranks(2)
def test_gradients_are_reduced_once_with_one_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain, sharded = make(mark=False)
        for times in (1, 2, 1):
            if sharded._get_fsdp_state().model is not None:
                before = libfsdp.wire_stats(sharded)["reduce_scatters"]
            compare(plain, sharded, times)
        # Three units, each once.
        assert libfsdp.wire_stats(sharded)["reduce_scatters"] - before == 3
    texts = [str(w.message) for w in caught if "may_miss_backward_hooks" in str(w.message)]
    assert len(texts) == 1
    assert "['hides']" in texts[0]


@on_ranks(2)
def test_a_mark_exempts_a_module() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain, sharded = make(mark=True)
        compare(plain, sharded, 2)
        _, outer = make(mark=False)
        libfsdp.may_miss_backward_hooks(outer)  # for all below, and at any time
        compare(plain, outer, 1)


class Tail(nn.Module):
    """The head's weight is used without its forward: inside of the root's, or where its result is used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 6, bias=False), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, inside: bool) -> torch.Tensor:
        x = self.norm(self.body(x))
        return self.last(x @ self.head.weight.T) if inside else x


@pytest.mark.parametrize(
    ("keep", "inside", "frozen"), [(True, True, False), (False, True, False), (True, False, False), (True, True, True)]
)
@on_ranks(2)
def test_a_weight_of_a_group_is_used_without_its_forward(keep: bool, inside: bool, frozen: bool) -> None:
    """Losses in chunks do this. The gradient comes before backward reaches the outputs of the group's other module."""
    torch.manual_seed(0)
    plain, sharded = Tail(), Tail()
    sharded.load_state_dict(plain.state_dict())
    for model in (plain, sharded):
        model.body.requires_grad_(not frozen)
        model.norm.requires_grad_(not frozen)
    fully_shard(sharded.body)
    fully_shard([sharded.norm, sharded.head], reshard_after_forward=not keep)
    fully_shard(sharded.last)
    fully_shard(sharded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            for model in (plain, sharded):
                model.zero_grad()
                result = model(x, inside)
                (result if inside else result @ model.head.weight.T).square().sum().backward()
            for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
                if theirs.grad is not None:
                    dist.all_reduce(theirs.grad)
                    assert torch.equal(ours.grad.full_tensor(), theirs.grad / 2)


class Ordinary(nn.Module):
    """Everything that comes by outputs: nested ones, recomputation, several forwards before one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = checkpoint(self.a, x, use_reentrant=False)
        x = checkpoint(self.b, x, use_reentrant=True)
        return {"out": [self.c(x)], "detached": x.detach()}


@on_ranks(2)
def test_what_comes_by_outputs_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Ordinary()
        for layer in (model.a, model.b, model.c):
            fully_shard(layer)
        fully_shard(model)
        for _ in range(2):
            outputs = [model(torch.randn(2, 4, requires_grad=True))["out"][0] for _ in range(2)]
            sum(outputs).sum().backward()
        model.c.set_unshard_in_backward(False)
        model(torch.randn(2, 4))["out"][0].sum().backward()
