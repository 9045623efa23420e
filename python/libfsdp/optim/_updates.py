"""Tells models when optimizers have changed sharded parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from libfsdp import _C
from libfsdp._core.sharded_parameter import is_sharded


def _note_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Outdates whole parameters that models keep across forwards, even models that this optimizer does not update.

    An optimizer without sharded parameters is ignored, because it may exist on one rank only.
    """
    if any(is_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        _C.note_update()


register_optimizer_step_post_hook(_note_update)
