"""The view of a model's memory that Megatron-FSDP's users know as param_and_grad_buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from libfsdp._comm.registered_memory import RegisteredMemory, can_register
from libfsdp.megatron._config import tell_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from libfsdp._core.model import MemberState
    from libfsdp.megatron._config import DistributedDataParallelConfig


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

    def __init__(
        self,
        states: list[MemberState],
        named_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
        scale_gradients: Callable[[float], None],
        zero_gradients: Callable[[], None],
    ) -> None:
        """Makes the view.

        Args:
            states: the states of the model, the root's first.
            named_parameters: the parameters that the module shows now.
            scale_gradients: the model's method.
            zero_gradients: the model's zero_grad_buffer.
        """
        self._states = states
        self._named_parameters = named_parameters
        self._scale_gradients = scale_gradients
        self._zero_gradients = zero_gradients

    @property
    def parameter_groups(self) -> list[ParameterGroup]:
        """All units that have parameters."""
        return [ParameterGroup(state) for state in self._states if state.parameters]

    @property
    def optimizer_named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The distributed parameters."""
        return [(name, p) for name, p in self._named_parameters() if p.requires_grad]

    def manual_buffer_registration(self) -> None:
        """Registers the buffers of collectives with NCCL, where that was asked for and they have not been. Collective."""
        buffers = self._states[0].engine_options.buffers
        if buffers is None:
            tell_once("manual_buffer_registration", "no buffers are registered: it needs nccl_ub, and NCCL")
        else:
            buffers.register()

    def use_registered_memory(self, config: DistributedDataParallelConfig) -> None:
        """Buffers of collectives come from NCCL's allocator, as nccl_ub and the options beside it say; nothing without NCCL."""
        mesh = self._states[0].mesh
        if config.nccl_ub and any(can_register(backend) for state in self._states for backend in state.mesh.backends):
            self._states[0].engine_options.buffers = RegisteredMemory(
                mesh.device,
                symmetric=not config.disable_symmetric_registration,
                manually=config.fsdp_manual_registration,
            )

    def scale_gradients(self, scaling_factor: float) -> None:
        """Does the same as the model's method."""
        self._scale_gradients(scaling_factor)

    def zero_grad(self) -> None:
        """Does the same as the model's zero_grad_buffer."""
        self._zero_gradients()
