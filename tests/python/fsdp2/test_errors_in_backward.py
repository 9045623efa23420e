"""The types of errors that come in backward: autograd, through which they pass, knows exceptions of torch and of Python only."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.errors import raises
from support.marks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import libfsdp
from libfsdp import fully_shard


class Halves(nn.Module):
    """Two layers side by side: a loss of one of them has a backward without the other."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.reentrant: bool | None = None
        self.order = [0, 1]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        halves = [self.halves[i] for i in self.order]
        if self.reentrant is None:
            return [half(x) for half in halves]
        return [checkpoint(half, x, use_reentrant=self.reentrant) for half in halves]


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Halves()
    group = dist.new_group(timeout=timedelta(seconds=20))  # what fails leaves nothing behind for other tests
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cpu")
    for half in model.halves:
        fully_shard(half, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch() -> torch.Tensor:
    return torch.ones(2, 4, requires_grad=True)


def through_backward(loss: torch.Tensor, x: torch.Tensor) -> None:
    loss.backward()


def through_grad(loss: torch.Tensor, x: torch.Tensor) -> None:
    torch.autograd.grad(loss, x)


def through_hooks_of_python(loss: torch.Tensor, x: torch.Tensor) -> None:
    """A backward within a backward, as reentrant checkpointing's."""
    outer = torch.ones((), requires_grad=True)
    result = outer * 2
    result.register_hook(lambda _: loss.backward())
    result.backward()


WAYS = {"backward": through_backward, "grad": through_grad, "nested": through_hooks_of_python}


@pytest.mark.parametrize(
    ("way", "reentrant"), [*((way, None) for way in WAYS), ("backward", True), ("backward", False)]
)
@on_ranks(2)
def test_gathers_that_fail(way: str, reentrant: bool | None) -> None:
    """The ranks come to different units: an error in the hook of an output, before its unit's backward."""
    model = make(reshard_after_forward=True)
    model.reentrant = reentrant
    x = batch()
    loss = model(x)[dist.get_rank()].sum()
    with pytest.raises(libfsdp.CommError, match="different calls") as raised:
        WAYS[way](loss, x)
    assert type(raised.value) is libfsdp.CommError
    assert isinstance(raised.value, libfsdp.Error)


@on_ranks(2, fresh=True)
def test_reductions_that_fail() -> None:
    """The same, where a gradient has come: each collective is compared before it starts."""
    os.environ["FSDP_DEBUG"] = "1"  # It is read when connections are made.
    model = make(reshard_after_forward=False)
    for half in model.halves:
        half.unshard()
    model.order = [dist.get_rank(), 1 - dist.get_rank()]  # Backward comes to the last one first.
    outputs = model(batch())
    with raises(libfsdp.CommError, "different calls", "reduce"):
        torch.cat(outputs).sum().backward()


@pytest.mark.parametrize(
    ("way", "reentrant"), [("backward", None), ("backward", True), ("backward", False), ("nested", None)]
)
@on_ranks(2)
def test_reports_at_the_end(way: str, reentrant: bool | None) -> None:
    """The report comes at the end of a backward, also of one within another."""
    model = make(report_nan_in_param_grad=True)
    model.reentrant = reentrant
    x = batch()
    loss = (torch.cat(model(x)) * float("nan")).sum()
    with pytest.raises(libfsdp.Error, match=r"parameter 'halves\.0\.weight' of unit") as raised:
        WAYS[way](loss, x)
    assert type(raised.value) is libfsdp.Error
    text = str(raised.value)
    model.zero_grad()
    model.set_manual_backward_finalization(True)  # The same text as outside of autograd.
    (torch.cat(model(x)) * float("nan")).sum().backward()
    with pytest.raises(libfsdp.Error) as outside:
        model.finalize_backward()
    assert str(outside.value) == text
