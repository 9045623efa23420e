"""Sends the settings of optimizers with the collectives of the model that they update, so that ranks compare them."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from libfsdp._core.model import owner_of

_numbers = itertools.count(1)
_TOLD = "_libfsdp_told"


def tell_settings(optimizer: torch.optim.Optimizer, grad_scale: torch.Tensor | None = None) -> None:
    """Called at each step: passes the settings that have changed since the last step to the model of each group's first parameter.

    Args:
        grad_scale: the number by which its gradients are still to be divided.
    """
    groups = optimizer.param_groups
    scale = None if grad_scale is None or grad_scale.device.type != "cpu" else grad_scale.item()
    said = [scale, *(_value(value) for group in groups for name, value in group.items() if name != "params")]
    number, told = optimizer.__dict__.get(_TOLD) or (next(_numbers), None)
    if said == told:
        return
    text = ", ".join(_settings_of(group, f" of group {g}" if len(groups) > 1 else "") for g, group in enumerate(groups))
    if scale is not None:
        text += f", grad_scale {scale}"
    firsts = [group["params"][0] for group in groups if group["params"]]
    states = [owner_of(parameter) for parameter in firsts]
    units = [state.unit for state in states if state is not None and state.unit is not None]
    models = {unit.model for unit in units if unit.model is not None}
    for model in models:
        model.tell_update(number, text)
    optimizer.__dict__[_TOLD] = (number, said if models else None)


def _settings_of(group: dict[str, Any], of_group: str) -> str:
    shown = {name: _value(value) for name, value in group.items() if name != "params"}
    return ", ".join(
        f"{name}{of_group} {value}" for name, value in shown.items() if value is not None and value is not False
    )


def _value(value: Any) -> Any:
    """Returns the value in the form that is compared and printed. Tensors on an accelerator are left out, to avoid waiting for them."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (tuple, list)):
        return " ".join(str(_value(one)) for one in value)
    return value if isinstance(value, (int, float, str)) else None
