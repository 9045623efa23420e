"""What modules may return: backward finds their tensors in whatever holds them, and nothing of it is made anew."""

from __future__ import annotations

import collections
import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import device
from support.marks import on_ranks
from support.training import full
from torch import Tensor, nn

from libfsdp import fully_shard

Pair = collections.namedtuple("Pair", "value name")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Can't be written to."""

    value: Tensor
    inner: Any = None


@dataclasses.dataclass
class Derived:
    """Counts how often it is made; one field is not of its constructor, another one is not there."""

    made = 0
    value: Tensor
    doubled: Tensor = dataclasses.field(init=False)
    missing: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        Derived.made += 1
        self.doubled = 2 * self.value


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "frozen dataclass": (lambda x: Frozen(x.detach(), inner=[Frozen(x)]), lambda out: out.inner[0].value),
    "dataclass with derived fields": (Derived, lambda out: out.value + out.doubled),
    "class of dataclasses": (lambda x: (Frozen, x), lambda out: out[1]),
    "named tuple": (lambda x: Pair(x, "hidden"), lambda out: out.value),
    "nested": (lambda x: {"a": [(x, None)], "b": 3}, lambda out: out["a"][0][0]),
    "set": (lambda x: {x, 1}, lambda out: next(t for t in out if isinstance(t, Tensor))),
    "mapping": (lambda x: collections.UserDict(hidden=x), lambda out: out["hidden"]),
    "packed sequence": (
        lambda x: nn.utils.rnn.pack_padded_sequence(x.unsqueeze(0), [x.size(0)], batch_first=True),
        lambda out: out.data,
    ),
}


class Returning(nn.Module):
    """Layers that hand on their values in something."""

    class Layer(nn.Linear):
        wrap: Callable[[Tensor], Any]

        def forward(self, x: Tensor) -> Any:
            return self.wrap(super().forward(x).sigmoid())

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Returning.Layer(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        wrap, unwrap = KINDS[self.kind]
        for layer in self.layers:
            layer.wrap = wrap
            x = unwrap(layer(x))
        return x


def train_returning(kind: str) -> None:
    torch.manual_seed(0)
    plain = Returning(kind).to(device.TYPE)
    sharded = copy.deepcopy(plain)
    for layer in sharded.layers:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(sharded)
    made = []
    for model in (sharded, plain):
        before = Derived.made
        for _ in range(2):
            model(torch.arange(12.0, device=device.TYPE).view(3, 4)).square().sum().backward()
        made.append(Derived.made - before)
    assert made[0] == made[1]
    for (name, ours), theirs in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(full(ours.grad), full(theirs.grad)), name


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_backward_finds_tensors_in_outputs(kind: str) -> None:
    """Backward comes by the outputs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="backward reached")
        train_returning(kind)


class Positions(nn.Module):
    """Returns a part of its weight."""

    def __init__(self, clones: bool) -> None:
        super().__init__()
        self.weight, self.clones = nn.Parameter(torch.ones(6, 4)), clones

    def forward(self, count: int) -> Tensor:
        part = self.weight[:count]
        return part.clone() if self.clones else part


class Embeds(nn.Module):
    def __init__(self, clones: bool) -> None:
        super().__init__()
        self.positions, self.layers = Positions(clones), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(x.size(0))
        for layer in self.layers:
            x = layer(x)
        return x + positions


@pytest.mark.parametrize(("clones", "keeps"), [(False, False), (True, False), (False, True)])
@on_ranks(2)
def test_a_view_of_a_weight_is_returned(clones: bool, keeps: bool) -> None:
    """The error names both ways out, which work."""
    torch.manual_seed(0)
    plain = Embeds(clones)
    sharded = copy.deepcopy(plain)
    fully_shard(sharded.positions, reshard_after_forward=not keeps)
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    x = torch.ones(3, 4)
    if not clones and not keeps:
        with pytest.raises(RuntimeError, match=r"memory is freed .* keep clone\(\) .*reshard_after_forward=False"):
            sharded(x)
        return
    for model in (plain, sharded):
        model(x).square().sum().backward()
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(full(ours.grad), theirs.grad)
