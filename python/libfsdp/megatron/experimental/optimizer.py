"""Optimizers of sharded modules whose gradients have another dtype than their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libfsdp.megatron._parameter_groups import group_of, sync_model_weights_from_main_weights
from libfsdp.megatron._placed import with_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["fully_shard_optimizer"]


def fully_shard_optimizer(optimizer: torch.optim.Optimizer, *, precision_aware: bool = False) -> None:
    """Makes an optimizer step on sharded parameters whose gradients have another dtype. In place.

    Peer: ``megatron_fsdp.experimental.fully_shard_optimizer``. During a step, copies in the weights' dtype replace such gradients.
    Parameter groups stay as they are.

    Args:
        optimizer: an optimizer that was made with the parameters of sharded modules.
        precision_aware: whether the optimizer takes gradients of any dtype, so that nothing is copied.
    """
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before_step(stepping: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            raise NotImplementedError(
                "fully_shard_optimizer does not support optimizer.step closures, whose gradients come within the step: call "
                "backward before step()"
            )
        replaced.clear()  # left by a step that raised
        if precision_aware:
            return
        for p in (p for group in stepping.param_groups for p in group["params"]):
            if group_of(p) is not None and p.grad is not None and p.grad.dtype != p.dtype:
                replaced.append((p, p.grad))
                _set_gradient(p, with_dtype(p.grad, p.dtype))

    def after_step(stepping: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for p, gradient in replaced:
            _set_gradient(p, gradient)
        replaced.clear()
        sync_model_weights_from_main_weights(p for group in stepping.param_groups for p in group["params"])

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)


def _set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad = None  # It would not fit the other dtype.
    parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient
