"""Models: the states of sharded modules that run together, and their engine, known since the first forward.

All other code knows only one state, or gets what it needs as arguments.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

import torch

from libfsdp import _C
from libfsdp._comm.collectives import are_replaced
from libfsdp._core.agreement import agree, require_one_device
from libfsdp._core.budget_choice import BudgetChoice, BudgetedUnit
from libfsdp._core.engine_options import EngineOptions
from libfsdp._core.function_calls import outside_transforms, untraced, weak_method
from libfsdp._core.gradient_reduction import GradientReductionHandle
from libfsdp._core.late_registrations import Registrations
from libfsdp._core.recomputation import set_recomputes
from libfsdp._core.sharded_parameter import names_of_places, refuse_shared
from libfsdp._core.state import ShardState, adopt_all
from libfsdp._core.warnings import Warnings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from libfsdp._comm.mesh import ShardingMesh
    from libfsdp._core.sharded_parameter import ManagedParameter, ShardedParameter
    from libfsdp._core.sharding_options import ShardingOptions

_ATTRIBUTE = "_libfsdp_state"
# By the identities of their parameters.
_states: weakref.WeakValueDictionary[int, MemberState] = weakref.WeakValueDictionary()


class MemberState(ShardState):
    """A state as a member of a model: what fully_shard attaches to modules.

    Attributes:
        model: the model that it belongs to now.
        companions: states of the same modules, whose parameters have other ranks.
        engine_options: the settings of the model's engine, if this state is its root.
        modules_to_run: those of a group of modules whose forwards have not ended in the present call.
        unsharded_early: whether the user has gathered it in a model that a larger one has replaced, or will replace.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        mesh: ShardingMesh,
        parameters: Sequence[ManagedParameter],
        options: ShardingOptions,
        companions: tuple[MemberState, ...] = (),
    ) -> None:
        """Makes the unit, and puts shards into the modules.

        Args:
            companions: states of the same modules that were made before.
        """
        super().__init__(modules, mesh, parameters, options)
        self.companions = companions
        self.model: Model | None = None
        self.engine_options = EngineOptions()
        self.modules_to_run: set[nn.Module] = set()
        self.post_optim_event: torch.Event | None = None
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.buffer_memory = _C.BufferMemory.PROCESS
        self.unsharded_early = False

    def attach(self) -> None:
        """Makes it the state of its modules, which is found by its parameters, too."""
        for module in self.modules:
            module.__dict__[_ATTRIBUTE] = self
        for parameter in self.parameters:
            _states[parameter.identity] = self

    def model_of_forward(self) -> Model:
        """Returns the model. If it is not known yet, it is formed with this state as its root."""
        if self.model is not None and not self.model.provisional:
            return self.model
        return form(self, provisional=False)

    def unshard(self, *, wait: bool) -> None:
        """Gathers the unit ahead of its use."""
        if self.unit is None:
            return
        model = self.model or form(self, provisional=True)
        self.unsharded_early = model.provisional
        if model.forward_root is None and not _C.inside_backward():
            self.unit.prepare_unshard()  # It gets the present values of the shards.
        self.unit.unshard(wait=wait)

    def set_reduce_dtype(self, dtype: torch.dtype | None) -> None:
        """Sets the dtype in which gradients are sent. This replaces the unit, so no gradient may be unreduced."""
        if self.unit is None or dtype == self.mp_policy.reduce_dtype:
            return
        self.reshard()
        if self.model is not None:
            self.model.dissolve()
        super().set_reduce_dtype(dtype)

    def set_engine_options(self, **settings: bool) -> None:
        """On a root: changes these of the engine's settings."""
        vars(self.engine_options).update(settings)
        if self.model is not None:
            self.model.engine.set(**settings)

    def wait_for_optimizer(self) -> None:
        """Orders gathers behind the event that the user has given, once."""
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            torch.get_device_module(self.mesh.device.type).current_stream().wait_event(event)


def state_of(module: nn.Module) -> MemberState | None:
    """Returns the state of a module that fully_shard was called on."""
    return module.__dict__.get(_ATTRIBUTE)


def owner_of(parameter: torch.Tensor) -> MemberState | None:
    """Returns the state that has a sharded parameter."""
    return _states.get(getattr(parameter, "_libfsdp_identity", -1))


def all_states() -> list[MemberState]:
    """Returns the states of all sharded modules in the process that have parameters."""
    return list(dict.fromkeys(_states.values()))


def states_in(*modules: nn.Module) -> Iterator[tuple[str, MemberState, MemberState | None]]:
    """Yields all states in modules, each once, with its name and the closest enclosing state. Enclosing states come first."""
    seen: set[nn.Module] = set()
    found: set[MemberState] = set()

    def walk(
        module: nn.Module, name: str, enclosing: MemberState | None
    ) -> Iterator[tuple[str, MemberState, MemberState | None]]:
        if module in seen:
            return
        seen.add(module)
        state = state_of(module)
        if state is not None:
            if state not in found:
                for one in (state, *state.companions):
                    found.add(one)
                    yield name, one, enclosing
                    enclosing = one
            else:
                enclosing = (state, *state.companions)[-1]
        for child_name, child in module.named_children():
            if child._modules or state_of(child) is not None:  # Most modules are leaves.
                yield from walk(child, f"{name}.{child_name}" if name else child_name, enclosing)

    for module in modules:
        yield from walk(module, "", None)


def _parameters_below(*modules: nn.Module) -> Iterator[ShardedParameter]:
    return (parameter for _, state, _ in states_in(*modules) for parameter in state.parameters)


class Model:
    """The units of one model, known since its first forward, and what they share: the engine."""

    def __init__(self, root: MemberState, *, provisional: bool) -> None:
        """Forms the engine of all units below a root.

        Args:
            root: the state of the outermost module.
            provisional: whether it is formed before a forward has shown which module is the root; a larger model may then replace it.
        """
        self.provisional = provisional
        below = list(states_in(*root.modules))
        require_one_device(root, below)
        self.states = [state for _, state, _ in below]
        # By their positions in the engine.
        self._with_units = [state for state in self.states if state.unit is not None]
        self._groups = [state for state in self.states if len(state.modules) > 1]
        self.forward_root: MemberState | None = None
        self.inner_root_calls = 0  # the number of calls of the root's modules within a call of them
        self.leaves_at_once = False
        self._buffer_memory = _C.BufferMemory.PROCESS
        self.engine = _C.HookedModel(
            root.mesh.engine_mesh,
            prefetch_depth=root.engine_options.prefetch_depth,
            keep_gathered_bytes=root.options.keep_gathered_bytes,
            report_nan=root.options.report_nan_in_param_grad,
        )
        self.engine.on_backward_end(weak_method(self._end_backward))
        self.engine.set(
            is_last_backward=root.engine_options.is_last_backward,
            ends_step=root.engine_options.ends_step,
            manual_finalization=root.engine_options.manual_finalization,
            overlaps_reductions=root.engine_options.overlaps_reductions,
        )
        self._finalization: GradientReductionHandle | None = None
        self._registrations = Registrations(root.modules, functools.partial(_parameters_below, *root.modules))
        self._warnings = Warnings([(name, state) for name, state, _ in below])
        if not provisional:
            self._warnings.options([(name, state) for name, state, _ in below])
        try:
            units = self._connect(below)
            self.memory_choice = BudgetChoice(root.modules, self.engine, units, root.engine_options.prefetch_depth)
            agree(
                self.engine,
                [one.state for one in units],
                {
                    "keep_gathered_bytes": root.options.keep_gathered_bytes,
                    "report_nan_in_param_grad": root.options.report_nan_in_param_grad,
                    "prefetch_depth": root.engine_options.prefetch_depth,
                    "memory_budget": root.options.memory_budget,
                },
            )
            if root.options.memory_budget is not None and units and not provisional:
                self.memory_choice.choose(root.options.memory_budget)
        except BaseException:
            # No other forward may use a model that has parameters on the meta device, on which the ranks do not agree, or that needs too
            # much memory.
            self.dissolve()
            raise
        self.choose_memory()
        if root.engine_options.buffers is not None:
            root.engine_options.buffers.serve(self.engine, (b for state in self.states for b in state.mesh.backends))
        for state in self.states:
            state.apply_prefetch_lists()
            if state.unsharded_early and not provisional:
                state.unshard(wait=True)

    def _connect(self, below: list[tuple[str, MemberState, MemberState | None]]) -> list[BudgetedUnit]:
        """Gives the engine the units of these states, enclosing ones first."""
        position_of: dict[MemberState, int] = {}
        units: list[BudgetedUnit] = []
        for name, state, enclosing in below:
            state.model = self
            if state.unit is not None:
                while enclosing is not None and enclosing not in position_of:  # it has no parameters of its own
                    enclosing = next((around for _, inner, around in below if inner is enclosing), None)
                parent = None if enclosing is None else position_of[enclosing]
                position_of[state] = len(position_of)
                self.engine.add(state.unit, parent)
                state.connect()
                state.unit.kept_by_budget = False
                for module in state.modules:
                    set_recomputes(module, False)
                units.append(BudgetedUnit(name or "(root)", state, state.unit, parent))
        return units

    def choose_memory(self) -> None:
        """Chooses the memory of buffers. The choice of any unit counts for all, because units share their buffers."""
        asked = max((state.buffer_memory for state in self.states), key=int)
        if asked != self._buffer_memory:
            self._buffer_memory = asked
            self.engine.set_buffer_memory(asked)

    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None:
        """Reduces the gradients that backwards have left, gives them to the shards (at once or by the handle), and frees units."""
        if self._finalization is not None:
            raise RuntimeError("finalize_backward was called before: wait on the previous handle first")
        for state in self.states:
            state.collect_left_gradients()
            if state.unit is not None and state.unit.reshard_after_backward:
                state.unit.hide()
        try:
            self.engine.finalize_backward(not async_op)
        except _C.CommError:
            raise
        except _C.Error:  # it reports NaN in gradients, which the user still gets
            self.deliver_gradients()
            raise
        if async_op:
            self._finalization = GradientReductionHandle(self.finish_finalization)
            return self._finalization
        self.deliver_gradients()
        return None

    def finish_finalization(self, handle: GradientReductionHandle) -> None:
        """Waits for the reductions that finalize_backward has started."""
        if self._finalization is not handle:
            return
        self._finalization = None
        self.engine.finish_gradient_sync()
        self.deliver_gradients()

    def deliver_gradients(self) -> None:
        """Makes the reduced gradients those of the shards, or adds them to those that the shards have."""
        for state in self.states:
            if state.engine_options.before_delivery is not None:
                state.engine_options.before_delivery()
        hooks = {k: s.all_reduce_hook for k, s in enumerate(self._with_units) if s.all_reduce_hook is not None}
        for position in self.engine.deliver_gradients(hooks):
            self._warnings.hooks(self._with_units[position].parameters)

    def refuse_to_drop(self, what: str) -> None:
        """Raises Error if backwards have left gradients that were not taken, because dissolving the model would drop them."""
        if self.engine.has_left_gradients():
            raise _C.Error(
                f"{what}, while backwards have left gradients that are not reduced, which would be lost: finish the accumulation "
                "first, or drop them by zero_grad()"
            )

    def dissolve(self) -> None:
        """Gives the units back, for another engine to take. Their shards stay as they are."""
        self._finalization = None
        self.engine.dissolve()
        for state in self.states:
            state.model = None
            if state.unit is not None:
                state.unit.hide()

    def begin_forward(self, root: MemberState) -> Model:
        """Called when the first of a model's modules, in most programs the root, begins its forward.

        Returns:
            This model, or the one that has replaced it because parameters have other dtypes, or are trained now.
        """
        for state in self._groups:
            state.modules_to_run.clear()
        if self.adopt_registered():
            return root.model_of_forward().begin_forward(root)
        self._registrations.check()
        self.memory_choice.begin_forward()
        self.forward_root = root
        self.inner_root_calls = 0
        root.wait_for_optimizer()
        _C.set_collectives_replaced(are_replaced())
        # A program that counts collectives must see only those that are needed, and not those that predictions start.
        self.leaves_at_once = _C.collectives_are_visible()
        self.engine.set(prefetch_depth=0 if self.leaves_at_once else self.memory_choice.prefetch_depth)
        self.engine.begin_forward()
        return self

    def adopt_registered(self) -> bool:
        """Adopts other parameters that modules have now. If a unit must be replaced for that, the model is dissolved first.

        Returns:
            True if the model was dissolved, for another one to be formed.
        """
        changed = [self._with_units[position] for position in self.engine.with_other_parameters()]
        if not changed:
            return False
        # All are read first, because a model that is dissolved puts the shards of its units back.
        registered = [state.registered() for state in changed]
        for state in changed:
            assigned = [] if state.unit is None else state.unit.with_assigned_data()
            if assigned:
                self._warnings.data([state.parameters[i].name for i in assigned])
        fit = all(state.fits(one) for state, one in zip(changed, registered, strict=True))
        if not fit:
            self.refuse_to_drop(
                f"parameters of {[state.class_names for state in changed]} have other dtypes, are tied, or are trained now"
            )
            self.dissolve()
        adopt_all(list(zip(changed, registered, strict=True)))
        return not fit

    def end_forward(self, outputs: Sequence[torch.Tensor], *, gives: bool) -> None:
        """What no backward will use is freed now; otherwise memory goes as the computation moves on.

        Args:
            outputs: of the forward. Backward enters by them a group of which only some modules ran, as others may have been used without
                their forward (a head's weight).
            gives: the forward has not failed: ranks have done the same before the program gets its output.
        """
        self.forward_root = None
        for state in self._groups:
            if state.modules_to_run:  # only some of them ran
                state.modules_to_run.clear()
                self.end_unit_forward(state, outputs)
        if not torch.is_grad_enabled():
            for state in self._with_units:
                if state.after_forward is not _C.AfterForward.ACROSS_FORWARDS:
                    state.reshard()
        if gives:
            self.engine.end_forward()

    def end_unit_forward(self, state: MemberState, outputs: Sequence[torch.Tensor] = ()) -> None:
        """A module of a state has run, and of a group, the last one. By these outputs of it, backward will enter the unit."""
        if state.unit is None:
            return
        hides = state.reshards_after_forward
        if not state.unit.leave(outputs, hides) or not hides:
            return
        if self.leaves_at_once or state.post_forward_mesh is not None:
            state.unit.leave_now()
            if state.post_forward_mesh is not None and torch.is_grad_enabled():
                state.unit.show_post_forward()

    @untraced
    def _end_backward(self) -> bool:
        """Returns True. If the model has been collected, its callback returns None instead, and the engine delivers the gradients."""
        self.forward_root = None
        self._warnings.missed(self.engine.take_missed())
        self._warnings.stale(self.engine.take_stale())
        for state in self._groups:
            state.modules_to_run.clear()
        try:
            options = self.states[0].engine_options
            if options.is_last_backward and not options.manual_finalization:
                self.deliver_gradients()
        finally:
            self.engine.hide_after_backward()
        for state in self.states:
            if state.engine_options.after_backward is not None:
                state.engine_options.after_backward()
        return True

    def zero_gradients(self) -> None:
        """Drops gradients that were not delivered yet, also those that are not reduced. Not inside of a backward."""
        self.engine.zero_grad()
        self._finalization = None  # Reductions under way are dropped, too.

    def reset(self) -> None:
        """Cleans up after an exception: frees gathered units, and drops gradients that are not reduced."""
        self._finalization = None
        self.engine.reset()
        self.forward_root = None
        for state in self._groups:
            state.modules_to_run.clear()
        for state in self._with_units:
            if state.unit is not None:
                state.unit.hide()


@outside_transforms
@torch.inference_mode(False)  # tensors that are made here also serve later forwards
def form(root: MemberState, *, provisional: bool) -> Model:
    """Makes the model of all states below a root. Models that were formed before with a smaller root are given up."""
    if len(root.modules) > 1 and not provisional:
        raise RuntimeError(f"FSDP requires a single root module but got {root.modules}")
    for name, state, _ in states_in(*root.modules):
        if state.model is None:
            continue
        if not state.model.provisional:
            raise RuntimeError(
                f"FSDP state has already been lazily initialized for {name}\n"
                "FSDP requires running forward through the root module first"
            )
        state.model.dissolve()
    if root.reshard_after_forward_is_automatic and not provisional:
        for state in (root, *root.companions):
            state.keep_until_backward()
    others = [state for _, state, _ in states_in(*root.modules) if not state.shows_its_parameters()]
    adopt_all([(state, state.registered()) for state in others])
    refuse_shared(parameter for _, state, _ in states_in(*root.modules) for parameter in state.parameters)
    _name_units(root)
    return Model(root, provisional=provisional)


def _name_units(root: MemberState) -> None:
    """Gives units the names that they have from this root on, for errors and profiles."""
    module = root.modules[0]
    names = names_of_places(module)
    module_names = {one: name for name, one in module.named_modules()}
    for _, state, _ in states_in(*root.modules):
        for parameter in state.parameters:
            parameter.name = parameter.name_among(names)
        if state.unit is not None:
            modules = [
                module_names.get(one) or class_name
                for one, class_name in zip(state.modules, state.class_names, strict=True)
            ]
            state.unit.rename(", ".join(modules), [parameter.name for parameter in state.parameters])
