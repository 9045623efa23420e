"""FSDP2's private names that public programs read of a module's state: docs/migrate/from-fsdp2.md lists them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.distributed import _composable_state
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp2
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.distributed.tensor import DTensor, Shard

from libfsdp import _C
from libfsdp._core.model import MemberState, state_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from libfsdp._core.sharded_parameter import ShardedParameter

_torchs_state_of = _fsdp_state._get_module_fsdp_state


def get_module_fsdp_state(module: nn.Module) -> Any:
    """Replaces torch's function of this name: returns the state of a module that fully_shard was called on, be it torch's or this one."""
    return state_of(module) or _torchs_state_of(module)


def _missing(what: str, name: str) -> AttributeError:
    return AttributeError(
        f"FSDP2's private {what} has a '{name}', libfsdp's does not: docs/migrate/from-fsdp2.md lists what there is, and what to use "
        "instead"
    )


class _View:
    """An object of FSDP2, made when it is asked for. Views of the same thing are equal; names that it lacks raise AttributeError."""

    _stands_for = ""

    def __init__(self, state: MemberState, position: int = 0) -> None:
        """Makes it for a state, or for the state's parameter of this position."""
        self._state: MemberState
        self._position: int
        self.__dict__.update(_state=state, _position=position)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self._state, self._position))

    def __getattr__(self, name: str) -> Any:
        raise _missing(self._stands_for, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = getattr(type(self), name, None)
        if not isinstance(own, property) or own.fset is None:
            raise _missing(f"{self._stands_for}, to be set,", name)
        own.fset(self, value)

    @property
    def device(self) -> torch.device:
        return self._state.mesh.device

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        return self._state.mp_policy

    @property
    def mesh_info(self) -> Any:
        mesh = self._state.mesh
        if mesh.replicates:
            return fsdp2.HSDPMeshInfo(mesh.mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        if mesh.shards:
            return fsdp2.FSDPMeshInfo(mesh.mesh, shard_mesh_dim=0)
        return fsdp2.DDPMeshInfo(mesh.mesh, replicate_mesh_dim=0)


class _ParameterView(_View):
    _stands_for = "FSDPParam"

    @property
    def _parameter(self) -> ShardedParameter:
        return self._state.parameters[self._position]

    @property
    def sharded_param(self) -> nn.Parameter:
        return self._parameter.sharded

    @property
    def _param_fqn(self) -> str:
        return self._parameter.name

    @property
    def _orig_size(self) -> torch.Size:
        return self._parameter.shape

    @property
    def sharded_size(self) -> torch.Size:
        return self._parameter.local.shape

    @property
    def _sharding_spec(self) -> DTensorSpec:
        sharded = self._parameter.sharded
        if not isinstance(sharded, DTensor):
            raise _missing("FSDPParam of a parameter that is not cut", "_sharding_spec")
        return sharded._spec

    @property
    def fsdp_placement(self) -> Shard:
        return Shard(self._parameter.shard_dim)

    @property
    def orig_dtype(self) -> torch.dtype:
        return self._parameter.dtype

    @property
    def param_dtype(self) -> torch.dtype | None:
        dtype = self._parameter.compute_dtype(self.mp_policy)
        return None if dtype == self._parameter.dtype else dtype

    @property
    def is_dtensor(self) -> bool:
        return self._parameter.whole_spec is not None

    @property
    def offload_to_cpu(self) -> bool:
        return self._state.options.offloads

    def reset_sharded_param(self) -> None:
        """Does nothing: the next forward takes another parameter that a program has registered."""


def _option(name: str) -> property:
    """Returns a property of a group that is this option of the unit."""
    return property(
        lambda self: getattr(self._state.unit, name), lambda self, value: setattr(self._state.unit, name, value)
    )


class _GroupView(_View):
    _stands_for = "FSDPParamGroup"

    reduce_grads = _option("requires_gradient_sync")
    all_reduce_grads = _option("requires_all_reduce")
    reshard_after_backward = _option("reshard_after_backward")
    unshard_in_backward = _option("gathered_in_backward")

    @property
    def fsdp_params(self) -> list[_ParameterView]:
        return [_ParameterView(self._state, i) for i in range(len(self._state.parameters))]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self._state.modules

    @property
    def offload_policy(self) -> OffloadPolicy:
        return self._state.options.offload_policy

    @property
    def post_forward_mesh_info(self) -> Any:
        """None keeps the parameters after forward, and mesh_info frees them; with a number, neighbours keep a copy."""
        if self._state.post_forward_mesh is not None:
            return fsdp2.HSDPMeshInfo(self._state.post_forward_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        return self.mesh_info if self._reshard_after_forward else None

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, value: Any) -> None:
        if value == self.post_forward_mesh_info:
            return
        if value is not None and value != self.mesh_info:
            raise _missing("FSDPParamGroup, to be set to other ranks,", "post_forward_mesh_info")
        self._state.set_reshard_after_forward(value is not None)

    @property
    def _reshard_after_forward(self) -> bool:
        return self._state.reshards_after_forward

    @property
    def is_sharded(self) -> bool:
        return all(self._shown(p) is p.sharded for p in self._state.parameters)

    @property
    def is_unsharded(self) -> bool:
        return all(self._shown(p) is p.whole for p in self._state.parameters)

    def _shown(self, parameter: ShardedParameter) -> torch.Tensor | None:
        place = parameter.places[0]
        return place.module._parameters.get(place.name)

    @property
    def _training_state(self) -> fsdp2.TrainingState:
        if _C.inside_backward():
            return fsdp2.TrainingState.PRE_BACKWARD
        model = self._state.model
        return fsdp2.TrainingState.IDLE if model is None or model.forward_root is None else fsdp2.TrainingState.FORWARD

    @_training_state.setter
    def _training_state(self, value: fsdp2.TrainingState) -> None:
        """Accepts IDLE, which programs set after a forward that has failed, before they reshard. Here that changes nothing."""
        if value != fsdp2.TrainingState.IDLE:
            raise _missing("FSDPParamGroup, to be set to other states than IDLE,", "_training_state")

    def lazy_init(self) -> None:
        """Does nothing: the first forward initialises the groups of all modules together."""

    def unshard(self, async_op: bool = False) -> None:
        self._state.unshard(wait=not async_op)

    def wait_for_unshard(self) -> None:
        self._state.wait_for_unshard()

    def reshard(self) -> None:
        self._state.reshard()

    def post_backward(self, *_: Any) -> None:
        """Reduces the gradients that backwards have left, those of all groups of the model at once."""
        if self._state.model is not None:
            self._state.model.finalize_backward(async_op=False)


class _ContextView(_View):
    _stands_for = "FSDPStateContext"

    @property
    def all_states(self) -> list[MemberState]:
        states = [] if self._state.model is None else self._state.model.states
        return [one for one in states if state_of(one.modules[0]) is one]  # The others are groups of these.

    @property
    def iter_forward_root(self) -> MemberState | None:
        return None if self._state.model is None else self._state.model.forward_root

    @property
    def is_last_backward(self) -> bool:
        return self._state.engine_options.is_last_backward

    @is_last_backward.setter
    def is_last_backward(self, value: bool) -> None:
        self._state.modules[0].set_is_last_backward(value)


class FSDP2State(MemberState):
    """A state that also has the names of FSDP2's states."""

    def attach(self) -> None:
        super().attach()
        for module in self.modules:
            # Programs look there for the modules around one, and for their states.
            _composable_state._module_state_mapping[module] = weakref.ref(self)

    def __getattr__(self, name: str) -> Any:
        raise _missing("FSDPState", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") and not hasattr(type(self), name):
            raise _missing("FSDPState, to be set,", name)
        super().__setattr__(name, value)

    @property
    def _is_root(self) -> bool | None:
        """Whether this is the root; None until the first forward, which determines it."""
        return None if self.model is None or self.model.provisional else self.model.states[0] is self

    def _lazy_init(self) -> None:
        self.model_of_forward()

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return self.modules

    @property
    def _device(self) -> torch.device:
        return self.mesh.device

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self.mp_policy

    @property
    def _training_state(self) -> fsdp2.TrainingState:
        return _GroupView(self)._training_state

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return self.reshard_after_forward_is_automatic

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, value: bool) -> None:
        self.reshard_after_forward_is_automatic = value

    @property
    def _state_ctx(self) -> _ContextView:
        """The object through which pipelining finds all states, to end the backwards of all microbatches."""
        return _ContextView(self)

    @property
    def _fsdp_param_groups(self) -> list[_GroupView]:
        return [_GroupView(one) for one in (*self.companions, self) if one.unit is not None]

    @property
    def _fsdp_param_group(self) -> _GroupView | None:
        """The only group, or None without parameters."""
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise AssertionError(f"_fsdp_param_group: these modules have {len(groups)} groups of parameters; use _fsdp_param_groups")
        return groups[0] if groups else None

    def _root_post_backward_final_callback(self) -> None:
        if self.model is not None:
            self.model.finalize_backward(async_op=False)
