"""Messages between the ranks of a process group, as one of them sends and receives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Messages(TorchDispatchMode):
    """Calls ``before`` before each message: whether this rank sends it, the other rank's place in the group, and its memory."""

    def __init__(self, before: Callable[[bool, int, Tensor], None]) -> None:
        super().__init__()
        self._before = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sends = function == torch.ops.c10d.send.default
        if sends or function == torch.ops.c10d.recv_.default:
            self._before(sends, args[2], args[0][0])
        return function(*args, **(kwargs or {}))
