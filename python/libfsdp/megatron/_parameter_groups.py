"""Views of what a unit holds, for diagnostics: parameters of one dtype, trained or frozen."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from libfsdp._core.sharded_parameter import local_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from libfsdp._core.sharded_parameter import ShardedParameter
    from libfsdp._core.state import ShardState
    from libfsdp._fsdp2.fsdp_module import FSDPModule

_GROUP = "_libfsdp_parameter_group"


@dataclass(frozen=True, eq=False)
class FsdpParameter:
    """One parameter.

    Attributes:
        fqns: its names in the module that was sharded; tied ones have several.
    """

    fqns: tuple[str, ...]
    _parameter: ShardedParameter

    @property
    def sharded(self) -> nn.Parameter:
        """The parameter that modules and optimizers have between steps."""
        return self._parameter.sharded

    @property
    def unsharded(self) -> nn.Parameter | None:
        """The parameter with which modules compute; None before the first forward."""
        return self._parameter.whole


@dataclass(frozen=True)
class Layout:
    """The layout of a group's parameters.

    Attributes:
        size: the number of elements on all ranks with different ones together, with padding.
        tensor_shapes: the shapes of the parameters.
    """

    size: int
    tensor_shapes: tuple[torch.Size, ...]


@dataclass(frozen=True)
class Buffer:
    """One kind of a group's tensors on this rank.

    Attributes:
        layout: the layout of the group.
        dtype: the dtype of the elements.
        local_tensors: a tensor for each parameter; for gradients, for each parameter that has one now.
    """

    layout: Layout
    dtype: torch.dtype
    local_tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """The size in bytes on this rank, without padding."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.local_tensors)


class ParameterGroup:
    """A unit's parameters of one dtype that are trained, or those that are not."""

    def __init__(self, state: ShardState, parameters: list[ShardedParameter], fqns: dict[int, tuple[str, ...]]) -> None:
        """Makes a group of some of a unit's parameters.

        Args:
            fqns: the names of each, by identity.
        """
        self._state = weakref.ref(state)
        self._parameters = parameters
        self.fsdp_parameters = tuple(FsdpParameter(fqns[p.identity], p) for p in parameters)
        for parameter in parameters:
            parameter.attributes[_GROUP] = weakref.ref(self)
            setattr(parameter.sharded, _GROUP, parameter.attributes[_GROUP])

    @property
    def _of(self) -> ShardState:
        state = self._state()
        if state is None:
            raise RuntimeError("the module of this parameter group is gone")
        return state

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks."""
        return self._of.mesh.mesh

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which modules compute."""
        return self._parameters[0].compute_dtype(self._of.mp_policy)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameters are trained."""
        return self._parameters[0].sharded.requires_grad

    @property
    def layout(self) -> Layout:
        """The layout over all ranks."""
        options = self._of.options
        pieces, _ = self._of.mesh.piece(replicated=options.is_replicated, outer_sharded=options.outer_sharded)
        size = 0
        for p in self._parameters:
            rows = p.shape[p.shard_dim]
            size += -(-rows // pieces) * pieces * (p.shape.numel() // max(rows, 1))
        return Layout(size, tuple(p.shape for p in self._parameters))

    @property
    def main_weight(self) -> Buffer:
        """The shards, which the optimizer updates."""
        return Buffer(self.layout, self._parameters[0].dtype, tuple(p.local for p in self._parameters))

    @property
    def main_grad(self) -> Buffer | None:
        """Their gradients; None: they are not trained."""
        if not self.requires_grad:
            return None
        first = self._parameters[0]
        gradients = [p.sharded.grad for p in self._parameters if p.sharded.grad is not None]
        return Buffer(self.layout, first.grad_dtype or first.dtype, tuple(local_of(gradient) for gradient in gradients))

    @property
    def unsharded_bytes(self) -> int:
        """The bytes that the parameters take on this rank while they are gathered; 0 when they are freed."""
        wholes = [p.whole for p in self._parameters if p.whole is not None]
        return sum({s._cdata: s.nbytes() for s in (local_of(w).untyped_storage() for w in wholes)}.values())

    def sync_model_weight_from_main_weight(self) -> None:
        """Makes the next forward take the shards' values, however these were written."""
        unit = self._of.unit
        if unit is not None and unit.model is not None:
            unit.model.main_parameters_changed()


def groups_of(module: FSDPModule, names: dict[str, int]) -> tuple[ParameterGroup, ...]:
    """The groups of one sharded module.

    Args:
        names: the names of its parameters, with the identity of each.
    """
    fqns: dict[int, tuple[str, ...]] = {}
    for name, identity in names.items():
        fqns[identity] = (*fqns.get(identity, ()), name)
    groups: list[ParameterGroup] = []
    for state in module._states(recurse=False):
        members: dict[tuple[torch.dtype, bool], list[ShardedParameter]] = {}
        order = list(fqns)
        for parameter in sorted(state.parameters, key=lambda one: order.index(one.identity)):
            key = (parameter.compute_dtype(state.mp_policy), parameter.sharded.requires_grad)
            members.setdefault(key, []).append(parameter)
        groups.extend(ParameterGroup(state, parameters, fqns) for parameters in members.values())
    return tuple(groups)


def group_of(parameter: torch.Tensor) -> ParameterGroup | None:
    """Returns the group to which a sharded parameter belongs."""
    reference = getattr(parameter, _GROUP, None)
    return None if reference is None else cast("ParameterGroup | None", reference())


def sync_model_weights_from_main_weights(parameters: Iterable[torch.Tensor]) -> None:
    """Makes the next forward take the values of these shards, however they were written."""
    done: set[int] = set()
    for parameter in parameters:
        group = group_of(parameter)
        if group is not None and id(group) not in done:
            done.add(id(group))
            group.sync_model_weight_from_main_weight()
