"""The state of one call of fully_shard: a unit, its parameters in their forms, and the options that users set."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from libfsdp import _C
from libfsdp._as_fsdp2_state import AsFSDP2State
from libfsdp._beyond import Beyond
from libfsdp._extensions import ExtendedParameters, copy_of_rows, is_extended
from libfsdp._first_values import FirstValues, compare
from libfsdp._forward_hooks import ForwardHooks
from libfsdp._kept import kept_parameter
from libfsdp._making import make_parameter, make_unit
from libfsdp._mesh import neighbours_mesh
from libfsdp._model import Model, Running, form
from libfsdp._optimizer_settings import owners
from libfsdp._optimizers import remember
from libfsdp._outside_transforms import outside_transforms
from libfsdp._registrations import refuse_lost, take_ties
from libfsdp._sharded_parameter import (
    Place,
    attributes_of,
    carry_attributes,
    check_values_of_a_call,
    local_gradient,
    local_of,
    rows_of,
    share_memory,
)
from libfsdp._states import ATTRIBUTE, states_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    from libfsdp._mesh import ShardingMesh
    from libfsdp._spmd import SpmdMesh

# The options that users set on a unit. A unit that replaces another one gets them, too.
_OPTIONS = (
    "reshard_after_backward",
    "kept_across_forwards",
    "updated_after_backward",
    "requires_gradient_sync",
    "requires_all_reduce",
    "gradient_divide_factor",
    "gathered_in_backward",
    "has_all_reduce_hook",
    "keeps_storage",
    "separate_reduce_group",
)


class ShardState(AsFSDP2State):
    """The modules of one call of fully_shard, with the unit of their parameters (None if they have none)."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        mesh: ShardingMesh,
        parameters: list[tuple[nn.Parameter, list[Place]]],
        *,
        reshard_after_forward: bool | int | None,
        shard_dim_of: Callable[[nn.Parameter], int],
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        placements: str,
        spmd: SpmdMesh | None,
        beyond: Beyond,
        companions: tuple[ShardState, ...] = (),
    ) -> None:
        """Makes the unit, and puts shards into the modules.

        Args:
            companions: states of the same modules that were made before, whose parameters have other ranks.
        """
        self.modules = modules
        self.class_names = [type(module).__name__ for module in modules]  # before fully_shard changes them
        self.mesh = mesh
        self.spmd = spmd
        self.mp_policy = mp_policy
        self.offload_policy = offload_policy
        self.placements = placements
        self.beyond = beyond
        self.companions = companions
        self.model: Model | None = None
        self.extension: ExtendedParameters | None = None
        self.modules_to_run: set[nn.Module] = set()
        self.post_optim_event: torch.Event | None = None
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.running = Running()
        self.is_last_backward = True
        self.manual_finalization = False
        self.buffer_memory = _C.BufferMemory.PROCESS
        self.kept_mesh: DeviceMesh | None = None
        self.unsharded_early = False  # by a model that a larger one has replaced, or will replace
        self.prefetch: dict[bool, list[ShardState]] = {False: [], True: []}  # by "in backward"
        self.reshard_after_forward_is_automatic = reshard_after_forward is None
        self.reshard_after_forward = True if reshard_after_forward is None else reshard_after_forward
        if parameters and self.kept_size > 1:
            # Connecting to neighbours is collective, so ranks with another number of them, or none, would be waited for. Therefore the
            # ranks compare first.
            self.mesh.engine_mesh.compare(f"reshard_after_forward={self.kept_size}")
            self.kept_mesh = neighbours_mesh(self.mesh.mesh, self.kept_size)
        self.parameters = [
            make_parameter(self, parameter, places, shard_dim_of(parameter)) for parameter, places in parameters
        ]
        self.unit: _C.Unit | None = make_unit(self) if parameters else None
        if self.unit is not None:
            self.unit.kept_across_forwards = not self.reshards_after_forward
        remember(self)
        values = [parameter for parameter, _ in parameters]
        if beyond.check_initial_values:
            compare(mesh, values, self.parameters)
        self._take_values(values)
        self.first_values = FirstValues(values, self.parameters)
        for module in modules:
            module.__dict__[ATTRIBUTE] = self
        self.hooks = ForwardHooks(self)
        self.hooks.register()

    @property
    def is_replicated(self) -> bool:
        """True if each rank has all of each parameter (ZeRO-0)."""
        return self.placements == "no_shard"

    @property
    def kept_size(self) -> int:
        """Returns the number of neighbours that keep a copy between them after forward; 0 if no copy is kept."""
        size = self.reshard_after_forward
        if self.is_replicated:
            return 0
        return size if not isinstance(size, bool) and 1 < size < self.mesh.shard_size else 0

    @property
    def is_trained(self) -> bool:
        """True if gradients of some parameter are collected."""
        return any(parameter.trainable for parameter in self.parameters)

    @property
    def offloads(self) -> bool:
        """True if shards, gradients and optimizer state lie in host memory."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    @property
    def reshards_after_forward(self) -> bool:
        """True if modules show shards again after forward."""
        if isinstance(self.reshard_after_forward, bool):
            return self.reshard_after_forward
        return self.reshard_after_forward != 1

    @torch.no_grad()
    def _take_values(self, values: list[nn.Parameter]) -> None:
        """Fills the shards with this rank's rows of the given parameters, which the modules then no longer show."""
        if self.unit is None:
            return
        if not any(value.is_meta for value in values):
            self.unit.allocate()
        for i, (parameter, value) in enumerate(zip(self.parameters, values, strict=True)):
            local = local_of(value)
            pieces, piece = self.mesh.piece(replicated=self.is_replicated, outer_sharded=self.beyond.outer_sharded)
            begin, rows = rows_of(local.size(parameter.shard_dim), pieces, piece)
            if parameter.quantized is not None:
                main = parameter.quantized.high_precision().to(self.mesh.device, parameter.dtype)
                shard = copy_of_rows(main, begin, rows, to_host=self.offloads)
            elif parameter.extended:
                shard = copy_of_rows(local.detach(), begin, rows, to_host=self.offloads)
            elif value.is_meta:
                shard = torch.empty(self.unit.shard_shape(i), dtype=parameter.dtype, device="meta")
            else:
                shard = self.unit.shard(i)
                shard.copy_(local.detach().narrow(parameter.shard_dim, begin, rows))
            self._set_sharded(i, nn.Parameter(parameter.place(shard), requires_grad=value.requires_grad))
        self._show_shards()

    def _set_sharded(self, i: int, sharded: nn.Parameter) -> None:
        parameter = self.parameters[i]
        carry_attributes(parameter, sharded)
        parameter.sharded = sharded
        sharded._libfsdp_identity = parameter.identity
        sharded._libfsdp_shard = True
        owners[parameter.identity] = self
        vars(sharded).update(parameter.attributes)
        if parameter.grad_dtype is not None:
            sharded.grad_dtype = parameter.grad_dtype

    def _show_shards(self) -> None:
        for parameter in self.parameters:
            for place in parameter.places:
                setattr(place.module, place.name, parameter.sharded)

    def connect(self, engine: _C.Model) -> None:
        """An engine has taken the unit."""
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
                if self.kept_mesh is not None:
                    parameter.kept = kept_parameter(parameter, i, self.unit, self.kept_mesh, self.mesh.shard_size)
                    if parameter.kept is not None:
                        vars(parameter.kept).update(attributes_of(parameter.sharded))
                        self.unit.set_kept(i, parameter.kept)
            self._connect_parameter(engine, i)
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
            outer_pieces=self.mesh.mesh.size(0) if self.beyond.outer_sharded else 1,
        )
        self.extension.attach_to(self.unit)

    def _adopt_whole(self, i: int, whole: torch.Tensor) -> None:
        """An extended parameter has been gathered for the first time."""
        assert self.model is not None
        assert self.unit is not None
        parameter = self.parameters[i]
        parameter.whole = self._make_whole(i, whole)
        self.unit.set_parameters(i, parameter.sharded, parameter.whole)
        self._collect_gradients(self.model.engine, i)

    def _make_whole(self, i: int, whole: torch.Tensor) -> nn.Parameter:
        assert self.unit is not None
        parameter = self.parameters[i]
        if parameter.whole_spec is not None:
            whole = DTensor(whole, parameter.whole_spec, requires_grad=False)
        leaf = nn.Parameter(whole, requires_grad=parameter.sharded.requires_grad)
        leaf._libfsdp_identity = parameter.identity
        vars(leaf).update({**attributes_of(parameter.sharded), **parameter.attributes})
        if parameter.grad_dtype is not None:
            leaf.grad_dtype = self.mp_policy.reduce_dtype or parameter.grad_dtype
        if not parameter.extended:
            self.unit.set_leaf(i, local_of(leaf))
        return leaf

    def _connect_parameter(self, engine: _C.Model, i: int) -> None:
        assert self.unit is not None
        parameter = self.parameters[i]
        self.unit.set_parameters(i, parameter.sharded, parameter.whole)
        self.unit.set_wrap(i, parameter.gradient_wrap())
        engine.watch_version(parameter.sharded)
        engine.watch_version(parameter.local)
        if parameter.whole is not None:
            self._collect_gradients(engine, i)

    def _collect_gradients(self, engine: _C.Model, i: int) -> None:
        assert self.unit is not None
        parameter = self.parameters[i]
        assert parameter.whole is not None
        local = None
        if parameter.whole_spec is not None:
            data_parallel = frozenset() if self.spmd is None else self.spmd.data_parallel
            local = functools.partial(local_gradient, whole=parameter.whole_spec, data_parallel=data_parallel)
        engine.collect_gradients(self.unit, i, parameter.whole, local)

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
        extended = parameter.quantized is not None or is_extended(parameter.local)
        if parameter.extended or extended:
            return parameter.extended == extended
        return self.unit.allocated and share_memory(parameter.local, self.unit.shard(i))

    @outside_transforms
    @torch.no_grad()
    def adopt_registered(self) -> None:
        """Makes other parameters that modules have now, or other memory of their shards, the shards, with their values.

        They come from module._apply (to_empty, to, cpu), from load_state_dict(assign=True), or from an assignment of the user.
        """
        if self.unit is None:
            return
        refuse_lost(self.parameters)
        all_before, self.parameters = self.parameters, take_ties(self.parameters)
        registered = [place.module._parameters[place.name] for place in (p.places[0] for p in self.parameters)]
        found = [
            p.sharded if now is not None and (now is p.whole or now is p.kept) else now
            for p, now in zip(self.parameters, registered, strict=True)
        ]
        self.unit.hide()
        if self.parameters is not all_before:
            self._remake_unit([p.sharded for p in self.parameters])
        assigned = self.unit.with_assigned_data()
        if assigned and self.model is not None:
            self.model.warnings.data([self.parameters[i].name for i in assigned])
        if any(value is not None and not isinstance(value, nn.Parameter) for value in found):
            return check_values_of_a_call(self.unit, self.parameters, found)
        names = [p.name for p, value in zip(self.parameters, found, strict=True) if not p.has_form_of(value)]
        if names:
            raise RuntimeError(
                f"parameters {names} were replaced by tensors that are no shards (DTensors); write to the sharded parameters "
                "in place, or load a state dict"
            )
        locals_ = [local_of(value) for value in found]
        if all(local.is_meta for local in locals_):
            return
        pairs = list(zip(found, self.parameters, strict=True))
        if any(
            value.dtype != p.dtype
            or (value.requires_grad and not p.trainable)
            or (p.quantized is not None or is_extended(local_of(value))) != p.extended
            for value, p in pairs
        ):
            self._remake_unit(found)
        if not self.unit.allocated:
            self.unit.allocate()
        for i, (value, local) in enumerate(zip(found, locals_, strict=True)):
            assert value is not None
            shard = local if self.parameters[i].extended else self.unit.shard(i)
            if shard is not local and not local.is_meta and not share_memory(local, shard):
                shard.copy_(local)
                if isinstance(value, DTensor):
                    value._local_tensor = shard.detach()
                else:
                    value.data = shard.detach()
            if value is not self.parameters[i].sharded or not hasattr(
                value, "_libfsdp_identity"
            ):  # lost by swap_tensors
                self._set_sharded(i, value)
            if self.model is not None:
                self._connect_parameter(self.model.engine, i)
        self._show_shards()
        if self.model is not None:
            self.model.engine.main_parameters_changed()

    def states_below(self) -> Iterator[tuple[str, ShardState, ShardState | None]]:
        """This state and all below its modules: see states_in."""
        return states_in(*self.modules)

    def _remake_unit(self, values: list[nn.Parameter]) -> None:
        """Replaces the unit, because parameters have other dtypes, or are trained now. The model is then formed again."""
        if self.model is not None:
            self.model.dissolve()
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
        assert self.unit is not None
        before, self.unit = self.unit, make_unit(self)
        for option in _OPTIONS:
            setattr(self.unit, option, getattr(before, option))

    def set_reduce_dtype(self, dtype: torch.dtype | None) -> None:
        """Sets the dtype in which gradients are sent. This replaces the unit, so no gradient may be unreduced."""
        if self.unit is None or dtype == self.mp_policy.reduce_dtype:
            return
        self.reshard()
        self.mp_policy = replace(self.mp_policy, reduce_dtype=dtype)
        self._remake_unit([parameter.sharded for parameter in self.parameters])
        self.adopt_registered()

    def model_of_forward(self) -> Model:
        """Returns the model. If it is not known yet, it is formed with this state as its root."""
        if self.model is not None and not self.model.provisional:
            return self.model
        return form(self, provisional=False)

    def end_call(self, outputs: Sequence[torch.Tensor] = ()) -> None:
        """A module of the unit has run, and of a group, the last one. By these outputs of it, backward will enter the unit."""
        if self.unit is None or self.model is None:
            return
        hides = self.reshards_after_forward
        if not self.model.engine.leave(self.unit, outputs, hides) or not hides:
            return
        if self.model.leaves_at_once or self.kept_mesh is not None:
            self.model.engine.leave_now(self.unit)
            if self.kept_mesh is not None and torch.is_grad_enabled():
                self.unit.show_kept()

    # Calls of users.

    def set_manual_finalization(self, enabled: bool) -> None:
        """On a root: with True, the end of a backward reduces nothing."""
        self.manual_finalization = enabled
        if self.model is not None:
            self.model.set_manual_finalization(enabled)

    def set_keeps_storage(self, keeps: bool) -> None:
        """Whole parameters keep their memory while the modules show shards."""
        if self.unit is None:
            return
        self.unit.keeps_storage = keeps
        if self.model is not None:
            self.model.engine.set_keeps_storage(self.unit, keeps)

    def set_reshard_after_forward(self, reshard: bool) -> None:
        self.reshard_after_forward_is_automatic = False
        self._reshard_after_forward(reshard)
        if self.unit is not None:
            self.unit.kept_across_forwards = not reshard

    def keep_until_backward(self) -> None:
        """Keeps the root gathered after forward, unless the user has set this, because backward begins with the root."""
        self._reshard_after_forward(False)

    def _reshard_after_forward(self, reshard: bool) -> None:
        self.reshard_after_forward = reshard
        if self.kept_mesh is not None and self.unit is not None:
            self.reshard()
            self.unit.forget_neighbours()
        self.kept_mesh = None
        if self.unit is not None:
            self.unit.reshard_after_forward = reshard

    def unshard(self, *, wait: bool) -> None:
        """Gathers the unit ahead of its use."""
        if self.unit is None:
            return
        model = self.model or form(self, provisional=True)
        self.unsharded_early = model.provisional
        model.prepare_unshard(self.unit)
        if not wait:
            model.engine.start_unshard(self.unit)
            return
        model.engine.unshard(self.unit)
        self.unit.show()

    def wait_for_unshard(self) -> None:
        """Waits for the gather that unshard has started."""
        if self.unit is not None and self.model is not None:
            self.model.engine.unshard(self.unit)
            self.unit.show()

    def reshard(self) -> None:
        """Frees the unit; modules show shards."""
        if self.unit is None:
            return
        self.unit.hide()
        if self.model is not None:
            self.model.engine.reshard(self.unit)

    def wait_for_optimizer(self) -> None:
        """Orders gathers behind the event that the user has given, once."""
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            torch.get_device_module(self.mesh.device.type).current_stream().wait_event(event)

    def apply_prefetch_lists(self) -> None:
        """Tells the engine the prefetch lists of the user, if there is an engine."""
        if self.unit is None or self.model is None:
            return
        for in_backward, states in self.prefetch.items():
            self.unit.set_prefetch(in_backward, [state.unit for state in states if state.unit is not None])

    def deliver_gradients(self) -> None:
        """Makes the reduced gradients those of the shards, or adds them to those that the shards have."""
        assert self.unit is not None
        assert self.model is not None
        if self.model.engine.deliver_gradients(self.unit, self.all_reduce_hook):
            self.model.warnings.hooks(self.parameters)
