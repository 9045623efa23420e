"""Errors that tests expect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist


class FailsInBackward(torch.autograd.Function):
    """Passes its input on, and raises in backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("told to fail")


@contextmanager
def raises(error: type[Exception], *parts: str) -> Iterator[list[str]]:
    """As pytest.raises, for an error whose text has all of these parts. The list gets the text."""
    text: list[str] = []
    with pytest.raises(error) as raised:
        yield text
    text.append(str(raised.value))
    assert [part for part in parts if part not in text[0]] == [], text[0]


@contextmanager
def raises_everywhere(error: type[Exception], *parts: str) -> Iterator[None]:
    """As raises, for an error that is the same on all ranks."""
    with raises(error, *parts) as text:
        yield
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, text[0])
    assert len(set(every)) == 1, every
