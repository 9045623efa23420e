"""Keeps transformations of torch.func away from the code that moves parameters."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = TypeVar("Function", bound=Callable[..., Any])

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.FuncTorchDynamicLayerBackMode
)


def outside_transforms(function: Function) -> Function:
    """Makes operators in the function ignore a transformation (grad, jvp, vmap) that is under way. See src/base/outside_transforms.h."""

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return function(*args, **kwargs)

    return outside  # type: ignore[return-value]
