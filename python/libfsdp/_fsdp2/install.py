"""Makes the names of torch.distributed.fsdp refer to libfsdp, and undoes this."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed.fsdp._fully_shard._fully_shard as functions

from libfsdp._core.precision import MixedPrecisionPolicy, torch_has_override
from libfsdp._fsdp2.fsdp2_state import get_module_fsdp_state
from libfsdp._fsdp2.fsdp_module import FSDPModule, UnshardHandle, disable_fsdp_module_new_init
from libfsdp._fsdp2.fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("libfsdp")

_OURS: dict[str, Any] = {
    "fully_shard": fully_shard,
    "FSDPModule": FSDPModule,
    "UnshardHandle": UnshardHandle,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
    "disable_fsdp_module_new_init": disable_fsdp_module_new_init,
    "_get_module_fsdp_state": get_module_fsdp_state,  # Programs ask it whether a module is sharded already.
    # If torch's policy lacks param_dtype_override_fn, programs for newer versions of torch still run.
    **({} if torch_has_override else {"MixedPrecisionPolicy": MixedPrecisionPolicy}),
}
_replaced: list[tuple[Any, str, Any]] = []


def install() -> None:
    """Makes programs that import ``fully_shard`` and related names from torch get libfsdp's, even if they have imported them before.

    Modules that have imported the names into their own (``from torch.distributed.fsdp import fully_shard``) are
    changed, too. Nothing happens if it is installed already.
    """
    if _replaced:
        return
    for name, mine in _OURS.items():
        theirs = getattr(functions, name, None)
        if theirs is None:
            continue
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})
            if names.get(name) is theirs and not names.get("__name__", "").startswith("libfsdp"):
                _replaced.append((module, name, theirs))
                setattr(module, name, mine)
        logger.info("libfsdp: torch.distributed.fsdp.%s is libfsdp's now", name)


def uninstall() -> None:
    """Undoes install(). Modules that have imported the names since then keep libfsdp's."""
    while _replaced:
        module, name, theirs = _replaced.pop()
        setattr(module, name, theirs)


@contextmanager
def installed() -> Iterator[None]:
    """Applies install() for the time of a ``with`` block. If it is installed already, it stays so afterwards."""
    was_installed = bool(_replaced)
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()
