"""Compares the settings that must be the same on all ranks, when a model is formed and before it communicates."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from libfsdp import _C

if TYPE_CHECKING:
    from collections.abc import Sequence

    from libfsdp._core.state import ShardState


def agree(engine: _C.HookedModel, states: list[ShardState], of_model: dict[str, Any]) -> None:
    """Compares the ranks' descriptions of an engine's units, and warns if initial values differ. Collective.

    Raises:
        Error: on all ranks, if parameters or settings differ.
    """
    initial_values = [state.initial_values.untouched(state.parameters) for state in states]
    warning = engine.agree([_settings_of(state, of_model) for state in states], initial_values)
    for state in states:
        state.initial_values.forget()
    if warning:
        warnings.warn(warning, stacklevel=2)


def require_one_device(root: ShardState, below: Sequence[tuple[str, ShardState, ShardState | None]]) -> None:
    """Raises Error if a unit's mesh is of another device than the root's: they share buffers and process groups."""
    for name, state, _ in below:
        if state.mesh.device.type != root.mesh.device.type:
            raise _C.Error(
                f"unit '{name}' is sharded over a mesh of {state.mesh.device}, and the module around it over one of "
                f"{root.mesh.device}: give fully_shard meshes of the same device"
            )


def _settings_of(state: ShardState, of_model: dict[str, Any]) -> str:
    """Describes how the unit of a state was sharded, and the settings of its model.

    The engine compares settings that setters may change later, in the header of each collective.
    """
    policy, options = state.mp_policy, state.options
    said = {
        "reshard_after_forward": state.reshard_after_forward,
        "placements": options.placements,
        "outer_sharded": options.outer_sharded,
        "offload": options.offloads,
        "param_dtype": policy.param_dtype,
        "reduce_dtype": policy.reduce_dtype,
        "output_dtype": policy.output_dtype,
        "cast_forward_inputs": policy.cast_forward_inputs,
        "main_params_dtype": options.main_params_dtype,
        "main_grads_dtype": options.main_grads_dtype,
        "follow_grad_dtype": options.follow_grad_dtype,
        "tied": [p.name for p in state.parameters if p.owner is not None],
        **of_model,
    }
    return ", ".join(f"{name} {value}" for name, value in said.items())
