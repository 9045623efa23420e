"""FSDP2's private names that programs use of a state, above all torch.distributed.pipelining."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from libfsdp._sharded_parameter import local_gradient

if TYPE_CHECKING:
    from libfsdp import _C
    from libfsdp._model import Model
    from libfsdp._sharded_parameter import ShardedParameter
    from libfsdp._spmd import SpmdMesh


class AsFSDP2State:
    """Gives a state the names that FSDP2's states have."""

    model: Model | None
    unit: _C.Unit | None
    parameters: list[ShardedParameter]
    spmd: SpmdMesh | None

    def model_of_forward(self) -> Model:
        """Returns the model. If it is not known yet, it is formed with this state as its root."""
        raise NotImplementedError

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

    def collect_left_gradients(self) -> None:
        """Gives the engine gradients that a program itself has put into the whole parameters, as pipelining's backward for weights does."""
        for i, parameter in enumerate(self.parameters):
            if parameter.whole is None or parameter.whole.grad is None:
                continue
            gradient, parameter.whole.grad = parameter.whole.grad, None
            assert self.model is not None
            assert self.unit is not None
            if parameter.whole_spec is not None:
                data_parallel = frozenset() if self.spmd is None else self.spmd.data_parallel
                gradient = local_gradient(gradient, parameter.whole_spec, data_parallel)
            self.model.engine.gradient(self.unit, i, gradient)
