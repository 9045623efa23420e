"""The class that sharded modules get in addition to their own."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
from torch import nn

from libfsdp import _C
from libfsdp._comm.mesh import sharding_mesh
from libfsdp._core.arguments import as_flag, check_number, refuse
from libfsdp._core.buffer_memory import refuse_custom_collectives, use_memory_of_group, use_symmetric_memory
from libfsdp._core.function_calls import outside_inference
from libfsdp._core.gradient_reduction import GradientReductionHandle
from libfsdp._core.model import state_of, states_in
from libfsdp._core.readers import before_write
from libfsdp._fsdp2.fsdp2_state import FSDP2State
from libfsdp.optim._optimizers import drop_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from libfsdp._core.model import MemberState

_constructs_original = True


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """A context in which making an object of a sharded class does not run its ``__init__``, for code that copies modules itself."""
    global _constructs_original
    before, _constructs_original = _constructs_original, False
    try:
        yield
    finally:
        _constructs_original = before


class UnshardHandle:
    """Waits for the gather that ``FSDPModule.unshard(async_op=True)`` has started."""

    def __init__(self, states: Sequence[MemberState] = ()) -> None:
        self._states = states

    def wait(self) -> None:
        """Returns when the unsharded parameters are registered on the module. A module's own forward waits, too."""
        for state in self._states:
            state.wait_for_unshard()
        self._states = ()


class FSDPModule:
    """The class that fully_shard gives a module in addition to its own."""

    # FSDP<Original>, FSDPModule, Original, ...
    _class_prefix = "FSDP"
    _orig_cls_mro_index = 2
    _state_class = FSDP2State

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an object of the original class: slicing a sharded container gives an ordinary one."""
        original = cls.__mro__[cls._orig_cls_mro_index]
        self = original.__new__(original, *args, **kwargs)
        if _constructs_original:
            self.__init__(*args, **kwargs)
        return self

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")

    def _get_fsdp_state(self) -> MemberState:
        state = state_of(cast("nn.Module", self))
        if state is None:
            raise AssertionError(f"No FSDP state found on {self}")
        return state

    def _states(self, recurse: bool) -> list[MemberState]:
        if not recurse:
            state = self._get_fsdp_state()
            return [state, *state.companions]
        return [state for _, state, _ in states_in(cast("nn.Module", self))]

    def _set_units(self, recurse: bool, **options: Any) -> None:
        """Sets options of the units, by their names."""
        units = [state.unit for state in self._states(recurse) if state.unit is not None]
        for name, value in options.items():
            for unit in units:
                setattr(unit, name, value)

    def reshard(self) -> None:
        """Frees the module's unsharded parameters, and registers the shards. Not recursive."""
        for state in self._states(recurse=False):
            state.reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the module's parameters. Not recursive.

        Args:
            async_op: return at once, with a handle to wait on.
        """
        states = self._states(recurse=False)
        for state in states:
            state.unshard(wait=not async_op)
        return UnshardHandle(states) if async_op else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Works like nn.Module's, and also drops gradients that are not synchronized. Must not be called within a backward."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        states = self._states(recurse=True)
        for parameter in (parameter for state in states for parameter in state.parameters):
            place, shard = parameter.places[0], parameter.sharded
            if shard.grad is None or place.module._parameters.get(place.name) is shard:
                continue
            if set_to_none:
                shard.grad = None
            else:
                shard.grad.zero_()
        drop_gradients(states)

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: frees what was gathered, and drops gradients that are not reduced.

        Call it on the root. The next forward does this by itself, too.
        """
        state = self._get_fsdp_state()
        if state.model is None:
            return
        if state.model.states[0] is not state:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        state.model.reset()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """With False, the step of ``step_report`` and of timelines continues after backward, until one with True.

        Nothing else changes: each backward that reduces gradients waits for them and gives them to the parameters. In
        FSDP2, each backward gives gradients, too, but only the last one orders the current stream behind the
        reductions.
        """
        state = self._get_fsdp_state()
        root = state if state.model is None else state.model.states[0]
        root.set_engine_options(ends_step=bool(is_last_backward))

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """With True, the end of a backward does not reduce the gradients that are left; ``finalize_backward`` does, once for all backwards.

        Call it on the root, between backwards.

        Raises:
            RuntimeError: inside of a backward, and on a module that is not the root.
        """
        root = self._root_state("set_manual_backward_finalization")
        root.set_engine_options(manual_finalization=as_flag("enabled", enabled))

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduces the gradients that backwards have left: with manual finalization, or without synchronization before it was set again.

        Unsharded parameters are freed as at the end of a backward, for the modules that ``set_reshard_after_backward``
        says.

        Call it on the root, on all ranks, when the last backward has ended; parameters then have their gradients.

        Args:
            async_op: return at once, with a handle to wait on.

        Raises:
            RuntimeError: inside of a backward, on a module that is not the root, and if no wait for an earlier handle
                has ended.
        """
        model = self._root_state("finalize_backward").model
        if model is None:
            return GradientReductionHandle() if async_op else None
        return model.finalize_backward(async_op=async_op)

    def _root_state(self, method: str) -> MemberState:
        state = self._get_fsdp_state()
        if _C.inside_backward():
            raise RuntimeError(f"{method} cannot be called inside of a backward")
        if state.model is not None and state.model.states[0] is not state:
            raise RuntimeError(f"{method} must be called on the root FSDP module")
        return state

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """With True, unsharded parameters keep their memory while they are resharded, and therefore their addresses (for CUDA graphs).

        Their values are gathered again nevertheless. With False, the memory is freed.
        """
        self._set_units(recurse, fixed_addresses=as_flag("keep", keep))

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """With False, backwards add up gradients on this rank, without communication, until one with True.

        Args:
            requires_gradient_sync: reduce gradients.
            recurse: whether to apply it to all modules below, too.
        """
        reduces = as_flag("requires_gradient_sync", requires_gradient_sync)
        self._set_units(recurse, requires_gradient_sync=reduces, requires_all_reduce=reduces)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With False, gradients are reduced over the sharding dimension only, and the replicas' are added up later (HSDP)."""
        self._set_units(recurse, requires_all_reduce=as_flag("requires_all_reduce", requires_all_reduce))

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether parameters are freed between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for state in self._states(recurse):
            state.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Sets whether parameters are freed after backward. With False, the next forward of an accumulation gathers nothing."""
        self._set_units(recurse, reshard_after_backward=as_flag("reshard_after_backward", reshard_after_backward))

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the modules whose gathers start when this one's forward begins, instead of those that are predicted."""
        self._set_prefetch(modules, in_backward=False)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the modules whose gathers start when this one's backward begins, instead of those that are predicted."""
        self._set_prefetch(modules, in_backward=True)

    def _set_prefetch(self, modules: Sequence[FSDPModule], *, in_backward: bool) -> None:
        if not isinstance(modules, Iterable):
            refuse("modules", modules, "a list of modules")
        for module in modules:
            if not isinstance(module, FSDPModule):
                raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        listed = [state for module in modules for state in module._states(recurse=False)]
        for state in self._states(recurse=False):
            state.prefetch[in_backward] = listed
            state.apply_prefetch_lists()

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Sets the number by which the sum of the ranks' gradients is divided; None stands for the number of ranks."""
        self._set_units(False, gradient_divide_factor=0.0 if factor is None else check_number("factor", factor))

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """The older name of set_gradient_divide_factor."""
        self.set_gradient_divide_factor(factor)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Makes ``comm``, an object like FSDP2's AllGather, run the gathers of this module's unit."""
        for state in self._states(recurse=False):
            refuse_custom_collectives(state, "set_custom_all_gather")
        self._custom_collectives().custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Makes ``comm``, an object like FSDP2's ReduceScatter, run the reductions of this module's unit."""
        for state in self._states(recurse=False):
            refuse_custom_collectives(state, "set_custom_reduce_scatter")
        self._custom_collectives().custom_reduce_scatter = comm

    def _custom_collectives(self) -> Any:
        """Returns the collectives along the sharding dimension, made for this module alone."""
        state = self._get_fsdp_state()
        if not state.mesh.collectives or not state.mesh.is_own:
            state.mesh = sharding_mesh(state.mesh.mesh, own_collectives=True)
            if state.unit is not None:
                state.unit.set_mesh(state.mesh.engine_mesh)
        return state.mesh.collectives[-1]

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """With True, buffers of collectives come from the process group's own allocator, if its backend has one (NCCL).

        Units share their buffers, so all buffers of the model come from there if one of its units asks for it. Backends
        without an allocator, Gloo among them, keep the ordinary one. Call it on all ranks.

        Raises:
            AssertionError: if the module has a collective of ``set_custom_all_gather`` or ``set_custom_reduce_scatter``, or
                after ``set_symm_mem_for_comm()``.
        """
        for state in self._states(recurse=False):
            use_memory_of_group(state, enable=as_flag("enable", enable))

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Makes gathers go into torch's symmetric memory, for which NCCL has faster collectives.

        Units share their buffers, so this holds for all gathers of the model if one of its units asks for it. Sets the
        backend of torch's symmetric memory in this process. That memory is reused, but never freed. Call it on all
        ranks.

        Raises:
            ValueError: for another backend than NCCL.
            AssertionError: if the module has a collective of ``set_custom_all_gather`` or ``set_custom_reduce_scatter``, or
                after ``set_allocate_memory_from_process_group_for_comm(True)``.
            RuntimeError: if the module's process group is not NCCL's own, on CUDA; the module stays as it is.
        """
        if backend != "NCCL":
            raise ValueError(
                f"set_symm_mem_for_comm: the backend of symmetric memory can only be NCCL, not {backend!r}"
            )
        for state in self._states(recurse=False):
            use_symmetric_memory(state, backend)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None) -> None:
        """Calls ``hook`` with a unit's reduced gradients (one flat tensor, to be changed in place) at the end of backward; None ends this.

        Raises:
            ValueError: if a stream is given on a mesh of two dimensions, whose replicas the engine reduces itself.
            Error: at the end of a backward, for a unit whose gradients have several dtypes.
        """
        state = self._get_fsdp_state()
        if stream is not None and state.mesh.replicates:
            raise ValueError("stream cannot be set when using native HSDP")
        if state.unit is not None:
            state.unit.has_all_reduce_hook = hook is not None
        if stream is None or hook is None:
            state.all_reduce_hook = hook
            return
        device = torch.get_device_module(state.mesh.device.type)

        def on_stream(gradients: torch.Tensor) -> None:
            with device.stream(stream):
                hook(gradients)

        state.all_reduce_hook = on_stream

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Gives reductions connections of their own, so that they and gathers do not wait for each other. Collective."""
        self._set_units(recurse, separate_reduce_group=as_flag("enable", enable))

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Does nothing: reductions are always sums, which the receiving rank scales."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Does nothing: on a rank that has not used a parameter, its gradient always counts as zero."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Checks its argument only: there are never more than two reductions under way.

        Raises:
            TypeError: if it is no integer.
            ValueError: if it is less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """With False, backward does not gather the module's parameters. For parameters whose values backward does not need."""
        self._set_units(False, gathered_in_backward=as_flag("unshard_in_backward", unshard_in_backward))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Makes the root's next forward wait for this event before it gathers. The event is used once."""
        self._get_fsdp_state().post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Does nothing: gathers are always asynchronous."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Works like nn.Module's, after readers of the shards have ended. It runs before the modules below this one."""
        before_write(self._states(recurse=False))
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    @outside_inference
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Works like nn.Module's, also in inference mode."""
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    @outside_inference
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Works like nn.Module's, also in inference mode."""
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    @outside_inference
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Works like nn.Module's on shards, whose values become those of the result."""
        state = self._get_fsdp_state()
        self.reshard()
        if state.model is not None:
            if state.model.engine.has_left_gradients() and _changes_nothing(self, *args[:1]):
                return self
            state.model.refuse_to_drop(f"{type(self).__name__} is converted")
            state.model.dissolve()  # The engine refers to the tensors, and nothing may refer to them while they are exchanged.
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for one in self._states(recurse=False):
            one.adopt_registered()
        return result


def _changes_nothing(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """True if what module._apply is called with returns each tensor as it is, as that of .to() does for a device that they are on."""
    with torch.no_grad():
        return all(convert(tensor) is tensor for tensor in (*module.parameters(), *module.buffers()))
