"""What is registered in modules after fully_shard: ties are taken in, and what would never be reduced is an error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import StartRanks
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from libfsdp import fully_shard


class Tied(nn.Module):
    """Embeddings and a head, of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.block(self.embedding(tokens))))


def plain() -> Tied:
    torch.manual_seed(0)
    return Tied()


def shard(model: nn.Module, **options: Any) -> Any:
    fully_shard(model.block, **options)
    return fully_shard(model, **options)


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(8, (5,), generator=torch.Generator().manual_seed(10 * step + rank))


def tie(model: Any) -> None:
    model.head.weight = model.embedding.weight


def tie_backwards(model: Any) -> None:
    model.embedding.weight = model.head.weight


Tie = Callable[[Any], None]
TIES: dict[str, Tie] = {"tie": tie, "backwards": tie_backwards}


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def compare_backward(model: nn.Module, reference: nn.Module, step: int) -> None:
    """Runs a forward and a backward on two ranks, and compares loss and gradients with those of the same model unsharded."""
    expected = [nn.functional.cross_entropy(reference(tokens(step, r)), tokens(step, r)) for r in range(2)]
    torch.stack(expected).mean().backward()
    mine = tokens(step, dist.get_rank())
    loss = nn.functional.cross_entropy(model(mine), mine)
    loss.backward()
    torch.testing.assert_close(loss, expected[dist.get_rank()])
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, msg=name)


def train_tied(how: str, when: str, options: dict[str, Any]) -> None:
    """Ties at some moment, and compares with the same model unsharded, on every rank's batch."""
    reference = plain()
    model = shard(plain(), **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, reference)]
    for step in range(4):
        if (when, step) in (("before the first forward", 0), ("after a step", 1)):
            TIES[how](model)
            TIES[how](reference)
        if (when, step) == ("after an evaluation", 1):
            with torch.no_grad():
                model(tokens(0, 0))  # which leaves the root whole
            TIES[how](model)
            TIES[how](reference)
        for optimizer in optimizers:
            optimizer.zero_grad()
        compare_backward(model, reference, step)
        for optimizer in optimizers:
            optimizer.step()
        TIES[how](model) if step > 1 else None  # as often as one likes
    assert model.head.weight is model.embedding.weight
    for (name, value), expected_value in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(whole(value), expected_value, msg=name)


@pytest.mark.parametrize("when", ["before the first forward", "after a step", "after an evaluation"])
@pytest.mark.parametrize("how", TIES)
def test_ties_are_taken_in(ranks: StartRanks, how: str, when: str) -> None:
    for options in ({}, {"placements": "optim"}, {"reshard_after_forward": False}, {"placements": "no_shard"}):
        ranks(2).run(train_tied, how, when, options)


class Pair(nn.Module):
    """Two models that are a unit each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = plain(), plain()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.first(tokens) + self.second(tokens)


def train_two_tied() -> None:
    """Ties within two units at once, while both are whole, and compares with the same model unsharded."""
    reference, model = Pair(), Pair()
    for unit in (model.first, model.second, model):
        fully_shard(unit, reshard_after_forward=False)
    with torch.no_grad():
        model(tokens(0, 0))  # which leaves both units whole
    for pair in (model, reference):
        tie(pair.first)
        tie(pair.second)
    for step in range(2):
        compare_backward(model, reference, step)
    assert model.second.head.weight is model.second.embedding.weight


def test_ties_of_several_units_are_taken_in_at_once(ranks: StartRanks) -> None:
    ranks(2).run(train_two_tied)


def tie_across(early: bool) -> None:
    model = plain()
    fully_shard(model.head)
    shard(model)
    if not early:
        model(tokens(0, 0)).sum().backward()
    tie(model)
    with pytest.raises(
        ValueError, match=r"'.*weight' is shared with a parameter already managed .*\[module_a, module_b\]"
    ):
        model(tokens(0, 0))


@pytest.mark.parametrize("early", [True, False])
def test_ties_across_units_are_refused(ranks: StartRanks, early: bool) -> None:
    ranks(2).run(tie_across, early)


def add_parameter(model: Any) -> None:
    model.block.scale = nn.Parameter(torch.ones(6))


def add_module(model: Any) -> None:
    model.block.adapter = nn.Linear(6, 6)


def replace_module(model: Any) -> None:
    model.head = nn.Linear(6, 8)


def insert(model: Any) -> None:
    model.more = nn.ModuleList([nn.Tanh()])
    model.more.insert(0, nn.Linear(6, 6))


def fill_in(model: Any) -> None:
    model.head.bias = nn.Parameter(torch.zeros(8))


def old_weight_norm(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Programs call it all the same.
        weight_norm(model.block)


def new_weight_norm(model: Any) -> None:
    parametrizations.weight_norm(model.block)


def parametrize(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.head, "weight", nn.Softplus())


def delete(model: Any) -> None:
    del model.block.bias
    model.block.bias = None


def delete_directly(model: Any) -> None:
    del model.head._parameters["weight"]


LATE: dict[Callable[[Any], None], str] = {
    add_parameter: r"parameters \['block\.scale'\] were registered after fully_shard",
    add_module: r"parameters \['block\.adapter\.weight', 'block\.adapter\.bias'\] were registered",
    replace_module: r"parameters \['head\.weight', 'head\.bias'\] were registered",
    insert: r"parameters \['more\.0\.weight', 'more\.0\.bias'\] were registered",
    fill_in: r"parameters \['head\.bias'\] were registered",
    old_weight_norm: r"parameters \['.*weight'\] are no longer where fully_shard found them",
    new_weight_norm: r"parameters \['.*weight'\] are no longer where",
    parametrize: r"parameters \['.*weight'\] are no longer where",
    delete: r"parameters \['.*bias'\] are no longer where",
    delete_directly: r"parameters \['.*weight'\] are no longer where",
}


def register_late(change: Callable[[Any], None], early: bool) -> None:
    model = shard(plain())
    if not early:
        model(tokens(0, 0)).sum().backward()
    change(model)
    for _ in range(2):  # and again, until it is mended
        with pytest.raises(RuntimeError, match=LATE[change]):
            model(tokens(0, 0))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("change", LATE)
def test_late_registrations_are_refused(ranks: StartRanks, change: Callable[[Any], None], early: bool) -> None:
    ranks(2).run(register_late, change, early)


def register_what_may_be() -> None:
    model = plain()
    ignored = model.head.weight
    fully_shard(model.block)
    fully_shard(model, ignored_params={ignored})
    model(tokens(0, 0)).sum().backward()
    model.teacher = nn.Linear(6, 6).requires_grad_(False)
    model.register_buffer("table", torch.ones(3))
    model.norm = fully_shard(nn.LayerNorm(6))
    model.head.weight = nn.Parameter(torch.zeros(8, 6))  # ignored as before
    model(tokens(0, 0)).sum().backward()
    model.teacher.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"\['teacher\.weight', 'teacher\.bias'\] were registered"):
        model(tokens(0, 0))
    model.teacher.requires_grad_(False)
    model(tokens(0, 0)).sum().backward()


def test_frozen_sharded_and_ignored_ones_may_come_late(ranks: StartRanks) -> None:
    ranks(2).run(register_what_may_be)


def shard_what_comes() -> None:
    """A module that is sharded and then put in place is trained as an unsharded one."""
    reference, model = plain(), shard(plain())
    model(tokens(0, 0)).sum().backward()
    model.zero_grad()
    torch.manual_seed(5)
    reference.head = nn.Linear(6, 8)
    model.head = fully_shard(copy.deepcopy(reference.head))
    for step in range(2):
        torch.stack([reference(tokens(step, rank)).square().sum() for rank in range(2)]).mean().backward()
        model(tokens(step, dist.get_rank())).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, msg=name)


def test_sharded_modules_may_come_late(ranks: StartRanks) -> None:
    ranks(2).run(shard_what_comes)
