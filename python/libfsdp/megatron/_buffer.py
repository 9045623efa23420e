"""The view of a model's memory that Megatron-FSDP's users know as param_and_grad_buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from libfsdp.megatron._config import tell_once

if TYPE_CHECKING:
    from torch import nn

    from libfsdp._core.model import MemberState


@dataclass
class BufferView:
    """A view of one kind of memory of a unit.

    Attributes:
        data: an empty tensor of its dtype, on its device.
        numel: the number of elements that this rank has.
    """

    data: torch.Tensor
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype


class ParameterGroup:
    """A unit."""

    def __init__(self, state: MemberState) -> None:
        self._state = state

    @property
    def params(self) -> list[nn.Parameter]:
        """The distributed parameters."""
        return [parameter.sharded for parameter in self._state.parameters]

    @property
    def requires_grad(self) -> bool:
        return any(p.requires_grad for p in self.params)

    @property
    def main_weight_buffer(self) -> BufferView | None:
        """The weights that the optimizer updates, if modules compute with others."""
        parameters = [p for p in self._state.parameters if p.computes_in is not None]
        if not parameters:
            return None
        return self._view(parameters[0].dtype, sum(p.local.numel() for p in parameters))

    @property
    def main_grad_buffer(self) -> BufferView | None:
        """The gradients that backwards add up."""
        parameters = [p for p in self._state.parameters if p.trainable]
        if not parameters:
            return None
        first = parameters[0]
        return self._view(first.grad_dtype or first.dtype, sum(p.local.numel() for p in parameters))

    def _view(self, dtype: torch.dtype, numel: int) -> BufferView:
        return BufferView(torch.empty(0, dtype=dtype, device=self._state.mesh.device), numel)


class ParamAndGradBuffer:
    """The units of a model, as ``model.param_and_grad_buffer``."""

    def __init__(self, model: Any) -> None:
        """Makes the view of a MegatronFSDP."""
        self._model = model
        self._states: list[MemberState] = model._states

    @property
    def parameter_groups(self) -> list[ParameterGroup]:
        """All units that have parameters."""
        return [ParameterGroup(state) for state in self._states if state.parameters]

    @property
    def optimizer_named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The distributed parameters."""
        return [(name, p) for name, p in self._model.module.named_parameters() if p.requires_grad]

    def manual_buffer_registration(self) -> None:
        """Registers the buffers of collectives with NCCL, where that was asked for and they have not been. Collective."""
        buffers = self._states[0].engine_options.buffers
        if buffers is None:
            tell_once("manual_buffer_registration", "no buffers are registered: it needs nccl_ub, and NCCL")
        else:
            buffers.register()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Does the same as the model's method."""
        self._model.scale_gradients(scaling_factor)

    def zero_grad(self) -> None:
        """Does the same as the model's zero_grad_buffer."""
        self._model.zero_grad_buffer()
