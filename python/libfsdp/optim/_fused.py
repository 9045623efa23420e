"""torch.optim's Adam, AdamW and SGD, stepped by one call of C++."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from libfsdp import _C
from libfsdp.optim._optimizer_settings import tell_settings
from libfsdp.optim._optimizers import BeginsAnew
from libfsdp.optim._preparing import loss_of, prepare_gradient, zeros_like

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


class _InOneCall(BeginsAnew):
    """The step that replaces torch's in Adam and AdamW, and with other arithmetic in SGD."""

    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have a gradient; see torch.optim.

        Args:
            closure: computes the loss again, and gradients.

        Returns:
            What the closure returned.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            _refuse_flags(self, group)
        tell_settings(self, getattr(self, "grad_scale", None))
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and not (found_inf.device.type != "cpu" and self._kernel_skips(found_inf.device)):
            if found_inf.item() != 0:
                return loss
            found_inf = None
        self._step_in_cpp(grad_scale, found_inf)
        return loss

    @torch.no_grad()
    def _step_in_cpp(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        groups, state = self.param_groups, self.state
        call = functools.partial(_C.step_adam, type(self).__name__, groups, state, grad_scale, found_inf)
        if to_prepare := call():
            for g, i in to_prepare:
                group = groups[g]
                parameter = group["params"][i]
                prepare_gradient(parameter)
                make_adam_state(state[parameter], parameter, group)
            if call():
                raise RuntimeError("internal: state that was made is not there")

    def _kernel_skips(self, device: torch.device) -> bool:
        """True if the kernel itself skips the step where a GradScaler has found an infinity, so that the host need not wait to know."""
        return all(group["fused"] for group in self.param_groups) and _are_on(self, device)


class Adam(_InOneCall, torch.optim.Adam):
    """torch.optim.Adam, stepped in C++.

    Arguments, ``param_groups``, state and ``state_dict()`` are torch's, and so is the result: to the last bit that of
    torch's own with ``fused=True``, whatever ``foreach`` and ``fused`` say. ``differentiable`` and ``capturable`` are errors.
    """


class AdamW(_InOneCall, torch.optim.AdamW):
    """torch.optim.AdamW, stepped in C++.

    Arguments, ``param_groups``, state and ``state_dict()`` are torch's, and so is the result: to the last bit that of
    torch's own with ``fused=True``, whatever ``foreach`` and ``fused`` say. ``differentiable`` and ``capturable`` are errors.
    """


class SGD(_InOneCall, torch.optim.SGD):
    """torch.optim.SGD, stepped in C++.

    Arguments, ``param_groups``, state and ``state_dict()`` are torch's, and so is the result: to the last bit that of
    torch's own with ``fused=True`` on each rank's part, whatever ``foreach`` and ``fused`` say. ``differentiable`` is an error.
    """

    @torch.no_grad()
    def _step_in_cpp(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        groups, state = self.param_groups, self.state
        call = functools.partial(_C.step_sgd, type(self).__name__, groups, state, grad_scale, found_inf)
        if to_prepare := call([]):
            first = []
            for g, i in to_prepare:
                parameter = groups[g]["params"][i]
                prepare_gradient(parameter)
                if groups[g]["momentum"] != 0 and state[parameter].get("momentum_buffer") is None:
                    state[parameter]["momentum_buffer"] = zeros_like(parameter.grad)
                    if found_inf is None:  # else it begins with the zeros
                        first.append((g, i))
            if call(first):
                raise RuntimeError("internal: state that was made is not there")

    def _kernel_skips(self, device: torch.device) -> bool:
        # A first step that is skipped leaves zeros as the momentum. The next one takes them for one that was damped.
        return _are_on(self, device) and all(
            group["momentum"] == 0
            or group["dampening"] == 0
            or all(self.state[p].get("momentum_buffer") is not None for p in group["params"] if p.grad is not None)
            for group in self.param_groups
        )


_STEPPED: dict[type, type] = {torch.optim.Adam: Adam, torch.optim.AdamW: AdamW, torch.optim.SGD: SGD}


def fuse(optimizer: _Optimizer) -> _Optimizer:
    """Makes an optimizer step in C++ from now on, by changing its class to one of this module.

    Its groups, state, hooks and learning rate schedulers stay.

    Args:
        optimizer: exactly torch's Adam, AdamW or SGD.

    Returns:
        The same object.

    Raises:
        TypeError: if it is of another class, or something else has replaced its ``step``.
        ValueError: if a group is ``differentiable`` or ``capturable``.
    """
    if type(optimizer) in _STEPPED.values():
        return optimizer
    stepped = _STEPPED.get(type(optimizer))
    if stepped is None:
        raise TypeError(
            f"fuse: {type(optimizer).__name__} is none of torch's Adam, AdamW and SGD; it may step otherwise than these. "
            "Muon and AdamW8bit are classes of libfsdp.optim"
        )
    replaced = optimizer.__dict__.get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise TypeError(f"fuse: {replaced!r} has replaced {type(optimizer).__name__}.step; call fuse before that")
    for group in optimizer.param_groups:
        _refuse_flags(optimizer, group)
    optimizer.__class__ = stepped
    optimizer._patch_step_function()
    if replaced is not None:
        # A scheduler's wrapper holds the step of the former class.
        optimizer.step = _tracked(optimizer)
    return optimizer


def _tracked(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Wraps a step like torch's schedulers do, to know whether it was called before theirs."""
    optimizer_of = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        stepping = optimizer_of()
        assert stepping is not None
        stepping._opt_called = True
        return type(stepping).step(stepping, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _refuse_flags(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    name = type(optimizer).__name__
    if group.get("differentiable"):
        raise ValueError(f"{name}: differentiable=True needs a step that autograd records; use torch.optim.{name}")
    if group.get("capturable"):
        raise ValueError(
            f"{name}: capturable=True is for steps within a graph capture, where a step in C++ needs "
            f"fused=True alone; leave it out, or use torch.optim.{name}"
        )


def _are_on(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    return all(p.device == device for group in optimizer.param_groups for p in group["params"])


def make_adam_state(state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
    """Makes missing state of a parameter in the same way as torch's Adam."""
    if "step" not in state:
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not group["fused"] else torch.float32
        device = parameter.device if group["fused"] else "cpu"
        state["step"] = torch.zeros((), dtype=dtype, device=device)
    moments = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
    for name in moments:
        if name not in state:
            state[name] = zeros_like(parameter)
