"""Ranges for profilers: the modules that compute, in forward or backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from libfsdp import _C
from libfsdp._core.function_calls import weak_method

if TYPE_CHECKING:
    from collections.abc import Callable


class _Open(NamedTuple):
    """A module whose backward is under way.

    Attributes:
        key: identifies the module.
        end: notifies the module that its backward has ended.
        task: the backward as autograd counts them.
    """

    key: int
    end: Callable[[], None]
    task: int


class Ranges:
    """The ranges of the modules of one context that compute now.

    NVTX shows a range for each, by name: "MFSDP layers.0 forward", "MFSDP <root> backward". Without CUDA there is no NVTX, and
    only the modules' phases show the ranges.
    """

    def __init__(self) -> None:
        self._open: list[_Open] = []  # in backward, outermost first
        self._shows = True  # until NVTX turns out to be missing

    def begin_forward(self, name: str) -> None:
        """Called before a module's forward."""
        if self._open and not _C.inside_backward():  # an exception has ended a backward
            self._close_to(0)
        self._push(name, "forward")

    def end_forward(self) -> None:
        """Called after a module's forward."""
        self._pop()

    def begin_backward(self, name: str, key: int, enclosing: frozenset[int], end: Callable[[], None]) -> None:
        """Called when backward has reached a module. It ends the backwards of modules that are not around this one.

        Args:
            enclosing: the keys of the modules around it.
            end: called once, when the module's backward has ended.
        """
        keep = len(self._open)
        while keep > 0 and self._open[keep - 1].key not in enclosing:
            keep -= 1
        self._close_to(keep)
        task = torch._C._current_graph_task_id()
        if all(other.task != task for other in self._open):
            end_task = weak_method(self._end_task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: end_task(task))
        self._push(name, "backward")
        self._open.append(_Open(key, end, task))

    def _end_task(self, task: int) -> None:
        """Called when a backward has ended. Backwards around it, to whose activation checkpoints it belongs, have not."""
        keep = next((i for i, one in enumerate(self._open) if one.task == task), len(self._open))
        self._close_to(keep)

    def _close_to(self, keep: int) -> None:
        while len(self._open) > keep:
            self._open.pop().end()
            self._pop()

    def _push(self, name: str, phase: str) -> None:
        if self._shows:
            try:
                torch.cuda.nvtx.range_push(f"MFSDP {name or '<root>'} {phase}")
            except RuntimeError:  # torch without CUDA
                self._shows = False

    def _pop(self) -> None:
        if self._shows:
            torch.cuda.nvtx.range_pop()
