"""FSDP2's private names that programs use of a state, above all torch.distributed.pipelining."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from libfsdp._model import MemberState


class FSDP2State(MemberState):
    """A state that also has the names of FSDP2's states."""

    @property
    def _is_root(self) -> bool | None:
        """Whether this is the root; None until the first forward, which shows it."""
        return None if self.model is None or self.model.provisional else self.model.states[0] is self

    def _lazy_init(self) -> None:
        self.model_of_forward()

    @property
    def _state_ctx(self) -> SimpleNamespace:
        """The object through which pipelining finds all states, to end the backwards of all microbatches."""
        return SimpleNamespace(all_states=[self] if self.model is None else self.model.states)

    @property
    def _fsdp_param_groups(self) -> list[Any]:
        """An empty list, because _root_post_backward_final_callback does the work of parameter groups."""
        return []

    @property
    def _fsdp_param_group(self) -> None:
        """None, for the same reason. torch 2.11 uses this name for the only group."""
        return None

    def _root_post_backward_final_callback(self) -> None:
        if self.model is not None:
            self.model.finalize_backward(async_op=False)
