"""Views of what a unit holds, under the peer's name of this module."""

from libfsdp.megatron._parameter_groups import (
    FsdpParameter,
    Layout,
    ParameterGroup,
    groups_of,
    sync_model_weights_from_main_weights,
)

__all__ = ["FsdpParameter", "Layout", "ParameterGroup", "groups_of", "sync_model_weights_from_main_weights"]
