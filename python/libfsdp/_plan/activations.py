"""Finds the modules and parameters that a forward uses, and the bytes that autograd keeps, without memory and without a device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# What fake tensors raise where an operator needs values, such as item() and nonzero().
_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)


class _Uses(TorchFunctionMode):
    """Writes down which units and parameters a forward uses, in its order."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        # "begin", "use" or "end", the name of a unit or parameter, and of "end" whether the output has a gradient.
        self.events: list[tuple[str, str, bool]] = []
        self._names = {id(value): name for name, value in parameters.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        used = [self._names[id(one)] for one in tree_leaves((args, kwargs)) if id(one) in self._names]
        if used and _has_gradient(result):  # Others ask for its dtype, for example.
            self.events.extend(("use", name, True) for name in used)
        return result


def _has_gradient(value: Any) -> bool:
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves(value))


class _Kept:
    """Counts the bytes that autograd keeps beside parameters, by the unit whose forward has kept them first."""

    def __init__(self, units: Sequence[str], parameters: Mapping[str, torch.Tensor], uses: _Uses) -> None:
        self._events = uses.events
        self.bytes_of = dict.fromkeys(units, 0)
        self.inputs_of = dict.fromkeys(units, 0)
        self._has_input: dict[int, str] = {}
        self._running = [units[0]]
        self._seen = {value.untyped_storage()._cdata for value in parameters.values()}
        self._alive: list[torch.Tensor] = []  # A storage that is freed could come back as another one.

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(tensor)
            self.bytes_of[self._running[-1]] += storage.nbytes()
        return tensor

    def begin(self, unit: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            tree_map_only(torch.Tensor, lambda tensor: self._take_input(unit, tensor), (args, kwargs))
            self._running.append(unit)
            self._events.append(("begin", unit, True))

        return hook

    def _take_input(self, unit: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        other = self._has_input.get(storage._cdata)
        if other is None:
            self._alive.append(tensor)
        elif other in self._running:  # It lies around this unit, so that it does not recompute.
            self.inputs_of[other] -= storage.nbytes()
        else:  # What all units share, such as a mask, is kept once.
            return
        self._has_input[storage._cdata] = unit
        self.inputs_of[unit] += storage.nbytes()

    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._events.append(("end", self._running.pop(), _has_gradient(output)))


def kept_by_unit(
    module: nn.Module,
    units: Mapping[str, nn.Module],
    inputs: tuple[Any, ...] | Mapping[str, Any],
    dtype: torch.dtype | None,
) -> tuple[dict[str, int], dict[str, int], list[tuple[str, str, bool]]]:
    """Returns the bytes that autograd keeps from each unit's forward to its backward, beside parameters, those of its inputs, and events.

    An event is the "begin" or the "end" of a unit's forward, and whether its output has a gradient, or the "use" of a parameter.

    The module runs on tensors without memory, and stays as it is. Modules that recompute (torch.utils.checkpoint) keep what they
    keep in a run.

    Args:
        units: all units by name, the root first.
        dtype: the dtype of the computation; None for the parameters' own.
    """

    def fake(tensor: torch.Tensor, *, cast: bool = True) -> torch.Tensor:
        wanted = dtype if cast and dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=wanted, device="cpu", requires_grad=tensor.requires_grad)

    # Fake tensors have sizes and no memory, as tensors on the meta device, and choose kernels as a device does: what attention keeps
    # depends on its kernel.
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        parameters = {name: fake(value) for name, value in module.named_parameters()}
        fakes = dict(zip(map(id, module.parameters()), parameters.values(), strict=True))
        fakes |= {id(value): fake(value, cast=False) for value in module.buffers()}
        # Tied tensors are in several modules. But functional_call would not restore a module that it knows by two names.
        tensors = {
            f"{prefix}.{name}" if prefix else name: fakes[id(value)]
            for prefix, one in module.named_modules()
            for name, value in (*one._parameters.items(), *one._buffers.items())
            if value is not None
        }
        given = tree_map_only(torch.Tensor, fake, inputs)
        uses = _Uses(parameters)
        kept = _Kept(list(units), parameters, uses)
        for name, unit in units.items():
            for handle in (
                unit.register_forward_pre_hook(kept.begin(name), prepend=True, with_kwargs=True),
                unit.register_forward_hook(kept.end, always_call=True),
            ):
                stack.callback(handle.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor))
        stack.enter_context(torch.enable_grad())
        arguments = given if isinstance(given, tuple) else ()
        keywords = {} if isinstance(given, tuple) else dict(given)
        stack.enter_context(uses)
        # The result keeps the graph, and with it what is counted.
        try:
            output = torch.func.functional_call(module, tensors, arguments, keywords, tie_weights=False)
        except _NEEDS_VALUES as error:
            raise ValueError(
                f"inputs: the forward of {type(module).__name__} depends on values of tensors ({error}), which a plan does not have: "
                "instead of inputs, give the bytes that each unit keeps, as activations={name: bytes}"
            ) from error
        del output
    return kept.bytes_of, kept.inputs_of, uses.events
