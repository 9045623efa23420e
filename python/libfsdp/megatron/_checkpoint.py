"""Checkpoints with the names of Megatron-FSDP's programs, for models that were sharded by FSDP2 or libfsdp.

Such a program saves ``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}``, where the model is a wrapper: parameters are
``model.module.<name>``, and the optimizer's state is ``optimizer.state.<number>.<kind>``, by the parameters' positions in its groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict

from libfsdp.megatron.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

if TYPE_CHECKING:
    import torch
    from torch import nn

_WRAPPER = "module."


def get_checkpoint_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Returns the state that ``torch.distributed.checkpoint`` saves for Megatron-FSDP's programs, and loads their checkpoints into.

    Collective. An optimizer that has not stepped yet gets state of zeros, as in ``get_optimizer_state_dict``.

    Args:
        model: the model, sharded by FSDP2 or by libfsdp, not wrapped.
        optimizer: an optimizer of its parameters; None for the model alone.

    Returns:
        ``{"model": ..., "optimizer": ...}``. Hand it to :func:`set_checkpoint_state` after it was loaded into.
    """
    state: dict[str, Any] = {"model": {_WRAPPER + name: value for name, value in get_model_state_dict(model).items()}}
    if optimizer is not None:
        get_optimizer_state_dict(model, optimizer)
        state["optimizer"] = optimizer.state_dict()
    return preprocess_state_dict_for_uneven_dtensor(state)


def set_checkpoint_state(model: nn.Module, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    """Gives a model and an optimizer the values that were loaded into the result of :func:`get_checkpoint_state`.

    Args:
        model: the same as there.
        optimizer: the same as there.
        state: the result of that function, with the checkpoint's values.

    Raises:
        ValueError: if a name of the model does not begin with ``module.``, or there is no state for the optimizer.
    """
    strange = [name for name in state["model"] if not name.startswith(_WRAPPER)]
    if strange:
        raise ValueError(
            f"the names {strange} are none of a Megatron-FSDP checkpoint's: they do not begin with {_WRAPPER!r}"
        )
    if optimizer is not None and "optimizer" not in state:
        raise ValueError(
            "the state has no 'optimizer': get_checkpoint_state(model, optimizer) has one, before it is loaded into"
        )
    set_model_state_dict(model, {name.removeprefix(_WRAPPER): value for name, value in state["model"].items()})
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
