"""Makes the state of optimizers before their first step, so that a checkpoint can be loaded into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_state(optimizer: torch.optim.Optimizer, missing: Sequence[Sequence[nn.Parameter]]) -> list[nn.Parameter]:
    """Gives parameters the state that the optimizer's first step would make, with counts of 0, and changes nothing else.

    Optimizers make their state in the first step, so this runs a step on temporary parameters of the same shapes, with gradients of zero.

    Args:
        missing: the parameters without state, for each of its groups.

    Returns:
        The parameters that have state now. An optimizer may keep none.
    """
    kept = [dict(group) for group in optimizer.param_groups]
    strangers = []
    for group, without in zip(optimizer.param_groups, missing, strict=True):
        pairs = [(p, _zeros_like(p)) for p in without]
        strangers.extend(pairs)
        group["params"] = [stranger for _, stranger in pairs]
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    kept_hooks = [hook.copy() for hook in hooks]
    for hook in hooks:  # Users' hooks must run for real steps only.
        hook.clear()
    try:
        type(optimizer).step(optimizer)
    finally:
        for hook, before in zip(hooks, kept_hooks, strict=True):
            hook.update(before)
        for group, settings in zip(optimizer.param_groups, kept, strict=True):
            group.clear()
            group.update(settings)
    made = []
    for p, stranger in strangers:
        state = optimizer.state.pop(stranger, None)
        if not state:
            continue
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = torch.zeros_like(state["step"])
        elif "step" in state:
            state["step"] = 0
        optimizer.state[p] = state
        made.append(p)
    return made


def make_missing_state(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Does this for all parameters that are trained and have no state."""
    missing = [
        [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
        for group in optimizer.param_groups
    ]
    return make_state(optimizer, missing) if any(missing) else []


def _zeros_like(p: nn.Parameter) -> nn.Parameter:
    stranger = nn.Parameter(torch.zeros_like(p).detach())
    stranger.grad = torch.zeros_like(stranger)
    if getattr(p, "_megatron_fsdp_model", None) is not None and hasattr(p, "decoupled_grad"):
        stranger.decoupled_grad = stranger.grad
    return stranger
