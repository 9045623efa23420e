"""The state of one call of fully_shard: a unit, its parameters in their forms, and the options that users set."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from libfsdp import _C
from libfsdp._comm.mesh import neighbours_mesh
from libfsdp._core.extensions import ExtendedParameters, copy_of_rows, is_extended
from libfsdp._core.function_calls import outside_transforms
from libfsdp._core.initial_values import InitialValues, compare
from libfsdp._core.late_registrations import owner_to_follow, refuse_lost_owners, registered_in
from libfsdp._core.readers import before_write
from libfsdp._core.sharded_parameter import (
    attributes_of,
    carry_attributes,
    check_values_of_a_call,
    local_gradient,
    local_of,
    rows_of,
    share_memory,
)
from libfsdp._core.unit_factory import make_parameter, make_unit, post_forward_parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from libfsdp._comm.mesh import ShardingMesh
    from libfsdp._core.late_registrations import Registered
    from libfsdp._core.sharded_parameter import ManagedParameter
    from libfsdp._core.sharding_options import ShardingOptions

# The options that users set on a unit. A unit that replaces another one gets them, too.
_OPTIONS = (
    "reshard_after_backward",
    "updated_after_backward",
    "requires_gradient_sync",
    "requires_all_reduce",
    "gradient_divide_factor",
    "gathered_in_backward",
    "has_all_reduce_hook",
    "fixed_addresses",
    "separate_reduce_group",
)


class ShardState:
    """The modules of one call of fully_shard, with the unit of their parameters (None if they have none).

    The unit is one object of C++, which knows whether an engine has it. The model that they are parts of is known to MemberState alone.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        mesh: ShardingMesh,
        parameters: Sequence[ManagedParameter],
        options: ShardingOptions,
    ) -> None:
        """Makes the unit, and puts shards into the modules."""
        self.modules = modules
        self.class_names = [type(module).__name__ for module in modules]  # before fully_shard changes them
        self.mesh = mesh
        self.options = options
        self.mp_policy = options.mp_policy
        self.extension: ExtendedParameters | None = None
        self.post_forward_mesh: DeviceMesh | None = None
        self.prefetch: dict[bool, Sequence[ShardState]] = {False: [], True: []}  # by "in backward"
        given = options.reshard_after_forward
        self.reshard_after_forward_is_automatic = given is None
        self.reshard_after_forward = True if given is None else given
        self.after_forward = options.after_forward
        self.reshards_after_forward = self.after_forward is _C.AfterForward.RESHARD  # Shards are then registered again.
        self.post_forward_size = options.post_forward_size(mesh.shard_size)
        if parameters and self.post_forward_size > 1:
            # Connecting to neighbours is collective, so ranks with another number of them, or none, would be waited for. Therefore the
            # ranks compare first.
            self.mesh.engine_mesh.compare(f"reshard_after_forward={self.post_forward_size}")
            self.post_forward_mesh = neighbours_mesh(self.mesh.mesh, self.post_forward_size)
        self.parameters = [make_parameter(managed, mesh, options) for managed in parameters]
        self.unit: _C.ShownUnit | None = self._make_unit() if parameters else None
        values = [managed.value for managed in parameters]
        if options.check_initial_values:
            compare(mesh, values, self.parameters)
        self._take_values(values)
        self.initial_values = InitialValues(values, self.parameters)

    @property
    def is_trained(self) -> bool:
        """True if gradients of some parameter are collected."""
        return any(parameter.trainable for parameter in self.parameters)

    def _make_unit(self) -> _C.ShownUnit:
        return make_unit(
            ", ".join(self.class_names),
            self.parameters,
            self.mesh,
            self.options,
            after_forward=self.after_forward,
            post_forward_size=self.post_forward_size,
        )

    @torch.no_grad()
    def _take_values(self, values: list[nn.Parameter]) -> None:
        """Fills the shards with this rank's rows of the given parameters, in whose place the shards are registered."""
        if self.unit is None:
            return
        if not all(value.is_meta for value in values):
            self.unit.allocate()
        for i, (parameter, value) in enumerate(zip(self.parameters, values, strict=True)):
            local = local_of(value)
            pieces, piece = self.mesh.piece(
                replicated=self.options.is_replicated, outer_sharded=self.options.outer_sharded
            )
            begin, rows = rows_of(local.size(parameter.shard_dim), pieces, piece)
            if parameter.quantized is not None:
                main = parameter.quantized.high_precision().to(self.mesh.device, parameter.dtype)
                shard = copy_of_rows(main, begin, rows, to_host=self.options.offloads)
            elif parameter.extended:
                shard = copy_of_rows(local.detach(), begin, rows, to_host=self.options.offloads)
            elif value.is_meta:
                shard = torch.empty(self.unit.shard_shape(i), dtype=parameter.dtype, device="meta")
            else:
                shard = self.unit.shard(i)
                shard.copy_(local.detach().narrow(parameter.shard_dim, begin, rows))
            self._set_sharded(i, parameter.over(parameter.place(shard), requires_grad=value.requires_grad))
        self._show_shards()

    def _set_sharded(self, i: int, sharded: nn.Parameter) -> None:
        parameter = self.parameters[i]
        carry_attributes(parameter, sharded)
        parameter.sharded = sharded
        sharded._libfsdp_identity = parameter.identity
        sharded._libfsdp_shard = True
        vars(sharded).update(parameter.attributes)
        if parameter.grad_dtype is not None:
            sharded.grad_dtype = parameter.grad_dtype

    def _show_shards(self) -> None:
        for parameter in self.parameters:
            for place in parameter.places:
                setattr(place.module, place.name, parameter.sharded)

    def connect(self) -> None:
        """A model has taken the unit."""
        assert self.unit is not None
        on_meta = [p.name for p in self.parameters if p.local.is_meta]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still on meta "
                f"device: {on_meta}\nCall model.to_empty(device=...) and initialise them, or load a state dict"
            )
        for i, parameter in enumerate(self.parameters):
            if parameter.whole is None:
                if not parameter.extended:
                    parameter.whole = self._make_whole(i, self.unit.whole(i))
                for place in parameter.places:
                    module = place.module
                    plain = getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__
                    self.unit.add_place(i, module._parameters, place.name, None if plain else weakref.ref(module))
                if self.post_forward_mesh is not None:
                    parameter.post_forward = post_forward_parameter(
                        parameter, i, self.unit, self.post_forward_mesh, self.mesh.shard_size
                    )
                    if parameter.post_forward is not None:
                        vars(parameter.post_forward).update(attributes_of(parameter.sharded))
                        self.unit.set_post_forward(i, parameter.post_forward)
            self._connect_parameter(i)
        self._connect_extension()

    def _connect_extension(self) -> None:
        extended = {i: p for i, p in enumerate(self.parameters) if p.extended}
        if not extended or self.extension is not None:
            return
        assert self.unit is not None
        self.extension = ExtendedParameters(
            extended,
            self.mesh.shard_mesh,
            self.mesh.device,
            self.mp_policy,
            self._adopt_whole,
            outer_pieces=self.mesh.mesh.size(0) if self.options.outer_sharded else 1,
        )
        self.extension.attach_to(self.unit)

    def _adopt_whole(self, i: int, whole: torch.Tensor) -> None:
        """An extended parameter has been gathered for the first time."""
        assert self.unit is not None
        parameter = self.parameters[i]
        parameter.whole = self._make_whole(i, whole)
        self.unit.set_parameters(i, parameter.sharded, parameter.whole)
        self._collect_gradients(i)

    def _make_whole(self, i: int, whole: torch.Tensor) -> nn.Parameter:
        assert self.unit is not None
        parameter = self.parameters[i]
        if parameter.whole_spec is not None:
            whole = DTensor(whole, parameter.whole_spec, requires_grad=False)
        leaf = parameter.over(whole, requires_grad=parameter.sharded.requires_grad)
        leaf._libfsdp_identity = parameter.identity
        vars(leaf).update({**attributes_of(parameter.sharded), **parameter.attributes})
        if parameter.grad_dtype is not None:
            leaf.grad_dtype = self.mp_policy.reduce_dtype or parameter.grad_dtype
        if not parameter.extended:
            self.unit.set_leaf(i, local_of(leaf))
        return leaf

    def _connect_parameter(self, i: int) -> None:
        assert self.unit is not None
        parameter = self.parameters[i]
        if parameter.owner is not None:
            self.unit.tie(i, parameter.local)
        self.unit.set_parameters(i, parameter.sharded, parameter.whole)
        self.unit.set_wrap(i, parameter.gradient_wrap())
        self.unit.watch_version(parameter.sharded)
        self.unit.watch_version(parameter.local)
        if parameter.whole is not None:
            self._collect_gradients(i)

    def _collect_gradients(self, i: int) -> None:
        assert self.unit is not None
        parameter = self.parameters[i]
        assert parameter.whole is not None
        local = None
        if parameter.whole_spec is not None:
            local = functools.partial(
                local_gradient, whole=parameter.whole_spec, data_parallel=self.options.data_parallel
            )
        self.unit.collect_gradients(i, parameter.whole, local)

    # Parameters and values that the program sets.

    def shows_its_parameters(self) -> bool:
        """Between steps, returns True if the modules have the shards that they were given, over the unit's memory."""
        if self.unit is None:
            return True
        return all(
            place.module._parameters.get(place.name) is parameter.sharded
            for parameter in self.parameters
            for place in parameter.places
        ) and all(parameter.local.is_meta or self._owns(i) for i, parameter in enumerate(self.parameters))

    def _owns(self, i: int) -> bool:
        assert self.unit is not None
        parameter = self.parameters[i]
        if parameter.owner is not None:
            return parameter.owner.sharded is parameter.sharded
        extended = parameter.quantized is not None or is_extended(parameter.local)
        if parameter.extended or extended:
            return parameter.extended == extended
        return self.unit.allocated and share_memory(parameter.local, self.unit.shard(i))

    def registered(self) -> Registered:
        """Reads other parameters that modules have now. Hiding the unit would put the shards back in their places."""
        return registered_in(self.parameters)

    def fits(self, registered: Registered) -> bool:
        """True if adopt will keep the unit: no parameter was tied, has another dtype, or is trained only now."""
        found = registered.values
        if registered.tied:
            return False
        pairs = zip(registered.parameters, found, strict=True)
        if not all(isinstance(value, nn.Parameter) and p.has_form_of(value) for p, value in pairs):
            return True  # adopt takes none of them.
        return all(local_of(value).is_meta for value in found) or self._has_room_for(found)

    def _has_room_for(self, values: Sequence[nn.Parameter]) -> bool:
        """True if the unit has room for these shards and their gradients."""
        return all(
            value.dtype == p.dtype
            and (p.trainable or not value.requires_grad)
            and (p.quantized is not None or is_extended(local_of(value))) == p.extended
            for p, value in zip(self.parameters, values, strict=True)
        )

    def adopt_registered(self) -> None:
        """Adopts what modules have registered: for units that no model has."""
        if self.unit is not None:
            adopt_all([(self, self.registered())])

    def end_ties(self, registered: Registered) -> None:
        """Gives tied parameters shards of their own again, where modules no longer have the other unit's."""
        assert self.unit is not None
        now = {p.identity: value for p, value in zip(registered.parameters, registered.values, strict=True)}
        for i, parameter in enumerate(self.parameters):
            if parameter.owner is not None and now.get(parameter.identity) is not parameter.sharded:
                parameter.owner = None
                if self.unit.allocated:
                    self.unit.tie(i, None)

    @outside_transforms
    @torch.no_grad()
    def adopt(self, registered: Registered) -> None:
        """Makes other parameters that modules have now, or other memory of their shards, the shards, with their values.

        They come from module._apply (to_empty, to, cpu), from load_state_dict(assign=True), or from an assignment of the user. If the unit
        does not fit them, it is replaced, and no model may have it.
        """
        assert self.unit is not None
        self.parameters, found = registered.take_places(), registered.values
        self.unit.hide()
        if registered.tied:
            self._remake_unit([p.sharded for p in self.parameters])
        if any(value is not None and not isinstance(value, nn.Parameter) for value in found):
            return check_values_of_a_call(self.unit, self.parameters, found)
        owners = [owner_to_follow(p, value) for p, value in zip(self.parameters, found, strict=True)]
        names = [p.name for p, value in zip(self.parameters, found, strict=True) if not p.has_form_of(value)]
        if names:
            raise RuntimeError(
                f"parameters {names} were replaced by tensors that are no shards (DTensors); write to the sharded parameters "
                "in place, or load a state dict"
            )
        locals_ = [local_of(value) for value in found]
        if all(local.is_meta for local in locals_):
            return
        before_write([self])
        if not self._has_room_for(found):
            self._remake_unit(found)
        if not self.unit.allocated:
            self.unit.allocate()
        for i, (value, local, owner) in enumerate(zip(found, locals_, owners, strict=True)):
            assert value is not None
            parameter = self.parameters[i]
            if owner is not None:
                parameter.sharded, parameter.owner = value, owner
                if self.unit.model is not None:
                    self._connect_parameter(i)
                continue
            shard = local if parameter.extended else self.unit.shard(i)
            if shard is not local and not local.is_meta and not share_memory(local, shard):
                shard.copy_(local)
                if isinstance(value, DTensor):
                    value._local_tensor = shard.detach()
                else:
                    value.data = shard.detach()
            if value is not parameter.sharded or not hasattr(value, "_libfsdp_identity"):  # lost by swap_tensors
                self._set_sharded(i, value)
            if self.unit.model is not None:
                self._connect_parameter(i)
        self._show_shards()
        if self.unit.model is not None:
            self.unit.model.main_parameters_changed()

    def _remake_unit(self, values: list[nn.Parameter]) -> None:
        """Replaces the unit, because parameters have other dtypes, or are trained now. No model has it."""
        assert self.unit is not None
        assert self.unit.model is None
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.dtype = value.dtype
            carry_attributes(parameter, value)
            parameter.sharded = value
            if parameter.spec is not None:
                parameter.spec = value._spec
            parameter.whole = None
            extended = parameter.quantized is not None or is_extended(local_of(value))
            if parameter.quantized is not None and not parameter.extended and isinstance(value, DTensor):
                value._local_tensor = value._local_tensor.clone()  # otherwise it would keep the earlier unit's memory
            parameter.extended = extended
        self.extension = None
        before, self.unit = self.unit, self._make_unit()
        for option in _OPTIONS:
            setattr(self.unit, option, getattr(before, option))

    def set_reduce_dtype(self, dtype: torch.dtype | None) -> None:
        """Sets the dtype in which gradients are sent. This replaces the unit, which no model may have."""
        self.mp_policy = replace(self.mp_policy, reduce_dtype=dtype)
        self.options = replace(self.options, mp_policy=self.mp_policy)
        self._remake_unit([parameter.sharded for parameter in self.parameters])
        self.adopt_registered()

    # Calls of users.

    def set_reshard_after_forward(self, reshard: bool) -> None:
        self.reshard_after_forward_is_automatic = False
        self._set_after_forward(_C.AfterForward.RESHARD if reshard else _C.AfterForward.ACROSS_FORWARDS)

    def keep_until_backward(self) -> None:
        """Keeps the root gathered after forward, unless the user has set this, because backward begins with the root."""
        self._set_after_forward(_C.AfterForward.UNTIL_BACKWARD)

    def _set_after_forward(self, after_forward: _C.AfterForward) -> None:
        self.after_forward = after_forward
        self.reshard_after_forward = self.reshards_after_forward = after_forward is _C.AfterForward.RESHARD
        if self.post_forward_mesh is not None and self.unit is not None:
            self.reshard()
            self.unit.drop_post_forward_mesh()
        self.post_forward_mesh = None
        self.post_forward_size = 0
        if self.unit is not None:
            self.unit.after_forward = after_forward

    def wait_for_unshard(self) -> None:
        """Waits for the gather that unshard has started."""
        if self.unit is not None and self.unit.model is not None:
            self.unit.unshard(wait=True)

    def reshard(self) -> None:
        """Frees the unit, and registers the shards on its modules."""
        if self.unit is not None:
            self.unit.reshard()

    def apply_prefetch_lists(self) -> None:
        """Passes the prefetch lists of the user to the engine, if a model has the unit."""
        if self.unit is None or self.unit.model is None:
            return
        for in_backward, states in self.prefetch.items():
            # Units of other roots have other engines, which gather them themselves.
            listed = [state.unit for state in states if state.unit is not None and state.unit.model is self.unit.model]
            self.unit.set_prefetch(in_backward, listed)

    def collect_left_gradients(self) -> None:
        """Passes gradients to the engine that the program has set on unsharded parameters, as pipelining's backward for weights does."""
        for i, parameter in enumerate(self.parameters):
            if parameter.whole is None or parameter.whole.grad is None:
                continue
            gradient, parameter.whole.grad = parameter.whole.grad, None
            assert self.unit is not None
            if parameter.whole_spec is not None:
                gradient = local_gradient(gradient, parameter.whole_spec, self.options.data_parallel)
            self.unit.gradient(i, gradient)


def adopt_all(changed: Sequence[tuple[ShardState, Registered]]) -> None:
    """Adopts what the modules of several units had when it was read, after all ties that no longer hold have ended."""
    for state, registered in changed:
        state.end_ties(registered)
    refuse_lost_owners(registered for _, registered in changed)
    for state, registered in changed:
        state.adopt(registered)
