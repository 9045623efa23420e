"""Checkpoints of sharded modules and their optimizer, by torch.distributed.checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from libfsdp.megatron._parameter_groups import sync_model_weights_from_main_weights
from libfsdp.optim._optimizer_state import make_missing_state

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Writes a model and its optimizer, as "model" and "optimizer". Collective.

    Peer: ``megatron_fsdp.experimental.save_checkpoint``.

    Args:
        model: a model of sharded modules.
    """
    dcp.save(_state_dicts(model, optimizer), checkpoint_id=checkpoint_dir)


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint_dir: str | os.PathLike[str],
    *,
    sync_model_weights: bool = True,
) -> None:
    """Reads a checkpoint of save_checkpoint, on any number of ranks and with any placements. Collective.

    Peer: ``megatron_fsdp.experimental.load_checkpoint``.

    Args:
        model: a model of sharded modules.
        optimizer: an optimizer of their parameters, before or after its first step.
        checkpoint_dir: the folder.
        sync_model_weights: make the next forward take the loaded values, which is needed only if they were written through ``.data``.
    """
    made = make_missing_state(optimizer) if not optimizer.state else []
    try:
        state_dicts = _state_dicts(model, optimizer)
        dcp.load(state_dicts, checkpoint_id=checkpoint_dir)
    except BaseException:  # as CheckpointException is one
        for parameter in made:
            optimizer.state.pop(parameter, None)
        raise
    set_model_state_dict(model, state_dicts["model"])
    set_optimizer_state_dict(model, optimizer, state_dicts["optimizer"])
    if sync_model_weights:
        sync_model_weights_from_main_weights(model.parameters())


def _state_dicts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
