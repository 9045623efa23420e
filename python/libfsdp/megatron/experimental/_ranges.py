"""Tracks which modules compute, forward or backward, and shows this to profilers as ranges."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch

from libfsdp import _C
from libfsdp._outputs import tensors_with_gradient
from libfsdp._weak_method import weak_method

if TYPE_CHECKING:
    from torch import nn

    from libfsdp.megatron.experimental.module import FsdpModule


class Phase(enum.Enum):
    """The phase of a module.

    Its forward changes RESTING to FORWARD, and back. Backward changes RESTING to BACKWARD when it reaches the outputs, and back when it
    reaches a module that is not within this one, or ends. A forward that backward repeats does not change BACKWARD.
    """

    RESTING = enum.auto()
    FORWARD = enum.auto()
    BACKWARD = enum.auto()


class Ranges:
    """The modules of one context that compute now.

    NVTX shows a range for each, by name: "MFSDP layers.0 forward", "MFSDP <root> backward". Without CUDA there is no NVTX, and
    only `phase` shows the ranges.
    """

    def __init__(self) -> None:
        self._open: list[tuple[FsdpModule, int]] = []  # in backward, outermost first, with autograd's task
        self._shows = True  # until NVTX turns out to be missing

    def begin_forward(self, module: FsdpModule) -> None:
        """Called before the module's forward."""
        if self._open and not _C.inside_backward():  # an exception has ended a backward
            self._close_to(0)
        if module.phase is not Phase.BACKWARD:
            module._phase = Phase.FORWARD
        self._push(module, "forward")

    def end_forward(self, module: FsdpModule, output: Any) -> None:
        """Called after the module's forward. Watches the outputs, through which backward will reach the module."""
        if module.phase is Phase.FORWARD:
            module._phase = Phase.RESTING
        self._pop()
        if not torch.is_grad_enabled():
            return
        begin = weak_method(module._begin_backward)
        for tensor in tensors_with_gradient(output):
            tensor.register_hook(begin)

    def begin_backward(self, module: FsdpModule) -> None:
        """Called when backward has reached one of the module's outputs."""
        if module.phase is Phase.BACKWARD:
            return
        enclosing = module._enclosing
        keep = len(self._open)
        while keep > 0 and id(self._open[keep - 1][0]) not in enclosing:
            keep -= 1
        self._close_to(keep)
        task = torch._C._current_graph_task_id()
        if all(other != task for _, other in self._open):
            end = weak_method(self._end_task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: end(task))
        module._phase = Phase.BACKWARD
        self._push(module, "backward")
        self._open.append((module, task))

    def _end_task(self, task: int) -> None:
        """Called when a backward has ended. Backwards around it, to whose activation checkpoints it belongs, have not."""
        keep = next((i for i, (_, of) in enumerate(self._open) if of == task), len(self._open))
        self._close_to(keep)

    def _close_to(self, keep: int) -> None:
        while len(self._open) > keep:
            module, _ = self._open.pop()
            module._phase = Phase.RESTING
            self._pop()

    def _push(self, module: FsdpModule, phase: str) -> None:
        if self._shows:
            try:
                torch.cuda.nvtx.range_push(f"MFSDP {module.name or '<root>'} {phase}")
            except RuntimeError:  # torch without CUDA
                self._shows = False

    def _pop(self) -> None:
        if self._shows:
            torch.cuda.nvtx.range_pop()


def enclosing_of(module: nn.Module, root: nn.Module, kind: type[Any]) -> frozenset[int]:
    """Returns the ids of the modules of a kind that contain a module, from a root on."""
    found: set[int] = set()

    def visit(inner: nn.Module, path: tuple[int, ...]) -> None:
        if inner is module:
            found.update(path)
            return
        for child in inner.children():
            visit(child, (*path, id(inner)) if isinstance(inner, kind) else path)

    visit(root, ())
    return frozenset(found)
