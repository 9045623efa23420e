"""Compares the settings that must be the same on all ranks, when a model is formed and before it communicates."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libfsdp import _C
    from libfsdp._state import ShardState


def agree(engine: _C.Model, states: list[ShardState], root: ShardState) -> None:
    """Compares the ranks' descriptions of an engine's units, and warns if first values differ. Collective.

    Raises:
        Error: on all ranks, if parameters or settings differ.
    """
    first_values = [state.first_values.untouched(state.parameters) for state in states]
    warning = engine.agree([_settings_of(state, root) for state in states], first_values)
    for state in states:
        state.first_values.forget()
    if warning:
        warnings.warn(warning, stacklevel=2)


def _settings_of(state: ShardState, root: ShardState) -> str:
    """Describes how the unit of a state was sharded, and the settings of the model whose root is `root`.

    The engine compares settings that setters may change later, in the header of each collective.
    """
    policy, beyond, running = state.mp_policy, state.beyond, root.running
    said = {
        "reshard_after_forward": state.reshard_after_forward,
        "placements": state.placements,
        "outer_sharded": beyond.outer_sharded,
        "offload": state.offloads,
        "param_dtype": policy.param_dtype,
        "reduce_dtype": policy.reduce_dtype,
        "output_dtype": policy.output_dtype,
        "cast_forward_inputs": policy.cast_forward_inputs,
        "main_params_dtype": beyond.main_params_dtype,
        "main_grads_dtype": beyond.main_grads_dtype,
        "follow_grad_dtype": beyond.follow_grad_dtype,
        "keep_gathered_bytes": root.beyond.keep_gathered_bytes,
        "report_nan_in_param_grad": root.beyond.report_nan,
        "prefetch_depth": running.prefetch_depth,
    }
    return ", ".join(f"{name} {value}" for name, value in said.items())
