"""The hooks that run before and after a sharded module's forward."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors, _to_kwargs

from libfsdp import _C
from libfsdp._core.function_calls import untraced

if TYPE_CHECKING:
    from libfsdp._core.model import MemberState

# Functions whose `self` is a module that runs.
CALLS: set[types.CodeType] = {nn.Module._call_impl.__code__}


def _calls_of(module: nn.Module) -> int:
    """Returns how many calls of the module are under way on this thread: a method such as generate may call it, or it may call itself.

    It looks at the stack instead of counting, because a KeyboardInterrupt ends a call without its hooks. It is called
    if a root's forward seems to be under way when the forward begins.
    """
    count = 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in CALLS and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back
    return count


class ForwardHooks:
    """Notifies the engine when the modules of a state are used, and casts their inputs and outputs."""

    def __init__(self, state: MemberState) -> None:
        self.state = state
        self._is_group = len(state.modules) > 1

    def register(self) -> None:
        """Registers the hooks. Called once, when the modules are sharded."""
        state = self.state
        for module in state.modules:
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            # It runs even after a forward that raised, so that its module is not left with unsharded parameters.
            module.register_forward_hook(self.post_forward, always_call=True)
        # Each module that has parameters gets the hook, because a program may save or load a part of the model.
        for module in dict.fromkeys((*state.modules, *(place.module for p in state.parameters for place in p.places))):
            module.register_state_dict_pre_hook(self._show_shards)
            module.register_load_state_dict_pre_hook(self._show_shards)

    def _show_shards(self, *_: Any) -> None:
        """Registers the shards on the modules, because state dicts must hold shards."""
        self.state.reshard()

    @untraced
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Runs before a module's forward: gathers the unit, and registers the unsharded parameters on the module."""
        state = self.state
        model, unit = state.model, state.unit
        # Most calls, in as few steps as possible: the forward of one module within the root's.
        if unit is not None and model is not None and model.forward_root not in (None, state) and not self._is_group:
            if state.mp_policy.param_dtype is not None:
                args, kwargs = self._cast_inputs(args, kwargs)
            unit.enter(True)
            return args, kwargs
        if model is None or model.provisional:
            model = state.model_of_forward()
        if _C.inside_backward():  # activation checkpointing repeats a forward
            if state.unit is not None:
                state.unit.enter(True)
            return self._cast_inputs(args, kwargs)
        begins_forward = not state.modules_to_run  # for a group, it begins once for all of its modules
        if not state.modules_to_run:
            if model.forward_root is state and _calls_of(module) > 1:
                model.inner_root_calls += 1
            elif model.forward_root is None or model.forward_root is state:
                model = model.begin_forward(state)
                args, kwargs = self._move_inputs(args, kwargs)
            if self._is_group:
                state.modules_to_run.update(state.modules)
        if state.mp_policy.param_dtype is not None:
            args, kwargs = self._cast_inputs(args, kwargs)
        if state.unit is not None:
            state.unit.enter(begins_forward)
        return args, kwargs

    @untraced
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Runs after a module's forward: registers the shards again, and makes backward enter the unit when it reaches the output."""
        state = self.state
        model, unit = state.model, state.unit
        if model is None:
            return self._cast_output(output)
        is_within = model.forward_root not in (None, state) and not self._is_group and not model.leaves_at_once
        if unit is not None and is_within and unit.leave_by(output):  # most calls
            return output if state.mp_policy.output_dtype is None else self._cast_output(output)
        repeated = _C.inside_backward()
        outputs: list[torch.Tensor] = []
        if state.unit is not None and torch.is_grad_enabled():
            if type(output) is not torch.Tensor:
                outputs = tensors_with_gradient(output)
            elif output.requires_grad:
                outputs = [output]
            if not repeated and any(tensor._base is not None for tensor in outputs):
                names = ", ".join(state.class_names)
                warnings.warn(
                    f"FSDP2-wrapped module ({names}) returned a view tensor. An in-place operation on it would drop the hook "
                    "by which backward gathers the module's parameters: use out-of-place operations, or clone() it first",
                    stacklevel=2,
                )
        if repeated:
            # It may have a backward of its own (reentrant activation checkpointing), before which other units of the same region have taken
            # this one's place.
            if state.unit is not None:
                state.unit.leave(outputs, False)
            return self._cast_output(output)
        state.modules_to_run.discard(module)
        if not state.modules_to_run:
            model.end_unit_forward(state, outputs)
        elif state.unit is not None:
            state.unit.watch(outputs)
        if model.forward_root is state:
            if model.inner_root_calls > 0:
                model.inner_root_calls -= 1
            else:
                model.end_forward(outputs or tensors_with_gradient(output), gives=output is not None)
        return self._cast_output(output)

    def _move_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.state.mesh.device.type == "cpu" or not (args or kwargs):
            return args, kwargs
        moved_args, moved_kwargs = _to_kwargs(args, kwargs, self.state.mesh.device, False)
        return moved_args[0], moved_kwargs[0]

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.state.mp_policy.param_dtype
        if dtype is None or not self.state.mp_policy.cast_forward_inputs:
            return args, kwargs
        if not kwargs and all(type(value) is torch.Tensor and value.dtype is dtype for value in args):
            return args, kwargs
        cast = functools.partial(cast_floating, dtype)
        return _apply_to_tensors(cast, args), _apply_to_tensors(cast, kwargs)

    def _cast_output(self, output: Any) -> Any:
        dtype = self.state.mp_policy.output_dtype
        return output if dtype is None else _apply_to_tensors(functools.partial(cast_floating, dtype), output)


def tensors_with_gradient(output: Any) -> list[torch.Tensor]:
    """Returns all tensors that require a gradient in a module's output, also in mappings, sequences, sets and dataclasses."""
    found: list[torch.Tensor] = []
    _collect(output, found)
    return found


# This is not a closure, because one that calls itself is a cycle, which would keep the outputs and their graph until the garbage collector
# runs.
def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            found.append(value)
    elif isinstance(value, Mapping):
        for inner in value.values():
            _collect(inner, found)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            _collect(inner, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found)


def cast_floating(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor
