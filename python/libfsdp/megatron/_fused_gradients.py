"""Support for kernels that add weight gradients to a buffer (gradient accumulation fusion) instead of giving them to autograd."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from libfsdp._core.function_calls import untraced, weak_method

if TYPE_CHECKING:
    from collections.abc import Sequence

    from libfsdp._core.state import ShardState


class FusedGradients:
    """The buffers that ``parameter.get_main_grad()`` of unsharded parameters returns during one backward.

    A buffer is as large as the parameter, and holds zeros. A kernel adds the gradient to it, or overwrites it
    (``overwrite_main_grad``), sets ``parameter.grad_added_to_main_grad``, and returns any tensor of the parameter's shape, or
    None, as the gradient. When autograd reaches the parameter, the buffer is reduced instead of that gradient. Without the flag,
    autograd's gradient is reduced as usual.
    """

    def __init__(self, states: Sequence[ShardState]) -> None:
        """Gives parameters the attributes that such kernels use. Tensor-parallel DTensors, which have no such kernels, get none.

        Args:
            states: the states, before their modules have computed.
        """
        self._given: list[tuple[str, Any]] = []  # parameters with a buffer now, by name
        get = weak_method(self._get)
        for state in states:
            for i, parameter in enumerate(state.parameters):
                if parameter.whole_spec is None and parameter.trainable:
                    parameter.attributes.update(
                        get_main_grad=functools.partial(get, weakref.ref(state), i),
                        main_grad=None,
                        grad_added_to_main_grad=False,
                    )
                    vars(parameter.sharded).update(parameter.attributes)

    @untraced
    def _get(self, state_of: weakref.ref[ShardState], i: int) -> torch.Tensor:
        state = state_of()
        whole: Any = None if state is None else state.parameters[i].whole
        if state is None or whole is None:
            raise RuntimeError("get_main_grad() before a forward: there is a main gradient while modules compute")
        if whole.main_grad is None:
            parameter = state.parameters[i]
            dtype = state.mp_policy.reduce_dtype or parameter.compute_dtype(state.mp_policy)
            whole.main_grad = torch.zeros(parameter.shape, dtype=dtype, device=state.mesh.device)
            self._given.append((parameter.name, whole))
            # This hook replaces the engine's own, because it has to see the flag.
            whole._post_accumulate_grad_hooks = None
            whole.register_post_accumulate_grad_hook(functools.partial(_collect, state_of, i))
        return whole.main_grad

    def end_backward(self) -> None:
        """Called when a backward has ended.

        Raises:
            RuntimeError: if a kernel has added a gradient to its buffer, and autograd has not reached the parameter.
        """
        lost = [name for name, whole in self._given if whole.grad_added_to_main_grad]
        self.forget()
        if lost:
            raise RuntimeError(
                f"backward has added gradients to main_grad of parameters {lost}, and autograd does not know of it, so they are not "
                "reduced: give the parameter itself to the autograd.Function, and return a tensor of its shape as its gradient"
            )

    def forget(self) -> None:
        """Drops the buffers that a backward which raised has left."""
        for _, whole in self._given:
            whole.main_grad, whole.grad_added_to_main_grad = None, False
        self._given.clear()


@untraced
def _collect(state_of: weakref.ref[ShardState], i: int, leaf: Any) -> None:
    gradient, leaf.grad = leaf.grad, None
    main, leaf.main_grad = leaf.main_grad, None
    added, leaf.grad_added_to_main_grad = leaf.grad_added_to_main_grad, False
    state = state_of()
    found = main if added else gradient
    if found is not None and state is not None and state.unit is not None and state.unit.model is not None:
        state.unit.gradient(i, found)
