"""What optimizers tell: that sharded parameters have other values now."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from libfsdp import _C
from libfsdp._sharded_parameter import is_sharded


def _note_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Models may keep whole parameters across forwards, of a teacher of another optimizer's student, too.

    An optimizer without sharded parameters may be one rank's alone: it tells nothing.
    """
    if any(is_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        _C.note_update()


register_optimizer_step_post_hook(_note_update)
