"""FSDP2's names for what programs ask of a state: torch.distributed.pipelining above all."""

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
    """A state under the names of FSDP2's."""

    model: Model | None
    unit: _C.Unit | None
    parameters: list[ShardedParameter]
    spmd: SpmdMesh | None

    def model_of_forward(self) -> Model:
        """The model, which is formed with this state as its root if it is not known yet."""
        raise NotImplementedError

    @property
    def _is_root(self) -> bool | None:
        """None until a forward has told."""
        return None if self.model is None or self.model.provisional else self.model.states[0] is self

    def _lazy_init(self) -> None:
        self.model_of_forward()

    @property
    def _state_ctx(self) -> SimpleNamespace:
        """Pipelining walks through the states, to end the backwards of all microbatches."""
        return SimpleNamespace(all_states=[self] if self.model is None else self.model.states)

    @property
    def _fsdp_param_groups(self) -> list[Any]:
        """None: what they would do is done in _root_post_backward_final_callback."""
        return []

    @property
    def _fsdp_param_group(self) -> None:
        """The same, by the name that torch 2.11 has for the only one."""
        return None

    def _root_post_backward_final_callback(self) -> None:
        if self.model is not None:
            self.model.finalize_backward(async_op=False)

    def collect_left_gradients(self) -> None:
        """Gradients that a program has left at the whole parameters itself (pipelining's backward of weights alone) go to the engine."""
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
