"""Keeps functions out of torch.compile's graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch._C._dynamo import eval_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = TypeVar("Function", bound=Callable[..., Any])

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def untraced(function: Function) -> Function:
    """Makes torch.compile trace neither the function nor the functions that it calls.

    It works like torch.compiler.disable, but without a wrapper, which would cost microseconds per call. Nor does it
    load torch's compiler, which takes a second, for programs that do not compile.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where a call would be traced
    function._torchdynamo_disable_msg = "libfsdp's hooks run between graphs"  # type: ignore[attr-defined]
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP)  # where it is called between graphs
    return function
