"""How this package's functions are called: not traced, outside of transformations, without keeping their objects alive."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = TypeVar("Function", bound=Callable[..., Any])

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.FuncTorchDynamicLayerBackMode
)


def untraced(function: Function) -> Function:
    """Makes torch.compile trace neither the function nor the functions that it calls.

    It works like torch.compiler.disable, but without a wrapper, which would cost microseconds per call. Nor does it
    load torch's compiler, which takes a second, for programs that do not compile.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where a call would be traced
    function._torchdynamo_disable_msg = "libfsdp's hooks run between graphs"  # type: ignore[attr-defined]
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP)  # where it is called between graphs
    return function


def outside_transforms(function: Function) -> Function:
    """Makes operators in the function ignore a transformation (grad, jvp, vmap) that is under way. See src/base/outside_transforms.h."""

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return function(*args, **kwargs)

    return outside  # type: ignore[return-value]


def outside_inference(function: Function) -> Function:
    """Makes the function leave inference mode, because tensors that are made in it could not be trained, and DTensors fail there."""

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return outside  # type: ignore[return-value]


def weak_method(method: Any) -> Callable[..., Any]:
    """Returns the method without keeping its object alive, because the garbage collector can't see references of the engine."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        return None if target is None else target(*args, **kwargs)

    return call
