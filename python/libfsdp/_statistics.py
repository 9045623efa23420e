"""What the engine counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from libfsdp._fully_shard import FSDPModule

if TYPE_CHECKING:
    from torch import nn

    from libfsdp._model import Model


def memory_stats(module: nn.Module) -> dict[str, int]:
    """Bytes that the engine holds for a model on this rank, counted exactly: live, and the peak, of each kind and of all.

    Gradients that were given to the shards' ``.grad`` are the user's, and not counted.

    Args:
        module: the root, or any sharded module of the model.

    Raises:
        ValueError: if the module is not sharded, or no forward of the model has run yet.
    """
    return _model_of(module).engine.memory_stats()


def wire_stats(module: nn.Module) -> dict[str, int]:
    """Bytes that this rank sent over the model's meshes, and collectives that it started, since the meshes were made.

    Args:
        module: the root, or any sharded module of the model.

    Raises:
        ValueError: if the module is not sharded, or no forward of the model has run yet.
    """
    return _model_of(module).engine.wire_stats()


def _model_of(module: nn.Module) -> Model:
    if not isinstance(module, FSDPModule):
        raise ValueError(f"{type(module).__name__} is not sharded; call fully_shard on it first")
    model = module._get_fsdp_state().model
    if model is None:
        raise ValueError("the engine counts from the model's first forward on; run one first")
    return model
