"""What torch.compile is to leave out of its graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch._C._dynamo import eval_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = TypeVar("Function", bound=Callable[..., Any])

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def untraced(function: Function) -> Function:
    """torch.compile neither traces the function nor what it calls.

    As torch.compiler.disable, but the function stays what it is: no wrapper that costs microseconds per call, and torch's compiler, which
    takes a second to load, is not loaded for programs that do not compile.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where a call would be traced
    function._torchdynamo_disable_msg = "libfsdp's hooks run between graphs"  # type: ignore[attr-defined]
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP)  # where it is called between graphs
    return function
