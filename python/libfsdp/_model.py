"""The units of one model and its engine, known since the first forward."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from libfsdp import _C
from libfsdp._weak_method import weak_method

if TYPE_CHECKING:
    from libfsdp._state import ShardState

_model_numbers = itertools.count(1)


class Model:
    """The units of one model, known since its first forward, and what they share: the engine."""

    def __init__(self, root: ShardState, *, provisional: bool) -> None:
        """Forms the engine of all units below a root.

        Args:
            root: the state of the outermost module.
            provisional: formed before a forward has told which module is the root: may be given up for a larger one.
        """
        self.provisional = provisional
        self.states = [state for _, state in root.states_below()]
        self.forward_root: ShardState | None = None
        self.is_last_backward = True
        self.engine = _C.Model(
            root.mesh.engine_mesh, next(_model_numbers), prefetch_depth=1, keep_gathered_bytes=0, report_nan=False
        )
        self.engine.on_backward_end(weak_method(self._end_backward))
        position_of: dict[ShardState, int] = {}
        for name, state in root.states_below():
            state.model = self
            state.name = name
            if state.unit is not None:
                parent = self._enclosing(root, name, position_of)
                position_of[state] = len(position_of)
                self.engine.add(state.unit, parent)
                state.connect(self.engine)
        for state in self.states:
            state.apply_prefetch_lists()

    @staticmethod
    def _enclosing(root: ShardState, name: str, position_of: dict[ShardState, int]) -> int | None:
        """The position of the closest unit around the module of that name."""
        while name:
            name = name.rpartition(".")[0]
            state = root.state_of_submodule(name)
            if state is not None and state in position_of:
                return position_of[state]
        return None

    def dissolve(self) -> None:
        """Gives the units back, for another engine to take. Their shards stay as they are."""
        self.engine.dissolve()
        for state in self.states:
            state.model = None
            if state.unit is not None:
                state.unit.hide()

    def begin_forward(self, root: ShardState) -> None:
        """The first of a model's modules begins its forward: in most programs the root."""
        self.forward_root = root
        for state in self.states:
            state.modules_to_run.clear()
            if state.unit is not None and not state.unit.has_its_parameters():
                state.adopt_registered()
        self.engine.begin_forward()

    def end_forward(self) -> None:
        """What no backward will use is freed now; otherwise memory goes as the computation moves on."""
        self.forward_root = None
        for state in self.states:
            if state.modules_to_run:  # a group of which only some modules ran
                state.modules_to_run.clear()
                state.leave_forward()
            if not torch.is_grad_enabled() and state.unit is not None and state.reshards_after_forward:
                self.engine.reshard(state.unit)

    def _end_backward(self) -> None:
        self.forward_root = None
        for state in self.states:
            state.modules_to_run.clear()
            if state.unit is None:
                continue
            if self.is_last_backward:
                state.deliver_gradients()
            if state.unit.reshard_after_backward:
                state.unit.hide()

    def reset(self) -> None:
        """After an exception: frees what was gathered, drops gradients that are not reduced."""
        self.engine.reset()
        self.forward_root = None
        for state in self.states:
            state.modules_to_run.clear()
            if state.unit is not None:
                state.unit.hide()
