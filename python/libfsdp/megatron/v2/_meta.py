"""Gives modules on the meta device their values before they are sharded, those of one call at a time."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from libfsdp._core.model import state_of
from libfsdp._core.sharded_parameter import local_of
from libfsdp.megatron._meta import is_on_meta

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

_TRACKERS = ("megatron.core.tensor_parallel.random", "megatron.core.tensor_parallel")


@torch.no_grad()
def materialize(module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Gives modules with parameters or buffers on meta their values, by ``reset_parameters``, except for sharded ones below.

    The values of the mesh's first rank count. Megatron-Core's tracker of random numbers is forked around each, if it is in use,
    so that tensor-parallel ranks draw the same numbers for parameters that they all have; TransformerEngine's modules do so themselves.

    Raises:
        ValueError: if a module has parameters or buffers on meta, and no ``reset_parameters``.
    """
    found = [(name, inner) for name, inner in _own_modules(module, "") if is_on_meta(inner)]
    for name, inner in found:
        if not callable(getattr(inner, "reset_parameters", None)):
            raise ValueError(
                f"fully_shard: module '{name or type(inner).__name__}' has parameters or buffers of its own on the meta device, and no "
                "reset_parameters() that gives them values"
            )
    done: set[int] = set()
    for _, inner in found:
        inner.to_empty(device=device, recurse=False)
        with torch.enable_grad(), _forked(inner):
            reset: Any = inner.reset_parameters
            reset()
        for tensor in (*inner.parameters(recurse=False), *inner.buffers(recurse=False)):
            local = local_of(tensor)
            if id(tensor) not in done and local.numel() > 0:
                done.add(id(tensor))
                for dim in range(mesh.ndim):
                    group = mesh.get_group(dim)
                    dist.broadcast(local.detach(), src=dist.get_global_rank(group, 0), group=group)


def _own_modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules to which the call applies, inner ones first."""
    for child_name, child in module.named_children():
        if state_of(child) is None:
            yield from _own_modules(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _forked(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that forks the random numbers of Megatron-Core's tracker."""
    if type(module).__module__.startswith("transformer_engine"):
        return contextlib.nullcontext()
    for name in _TRACKERS:
        get = getattr(sys.modules.get(name), "get_cuda_rng_tracker", None)
        if get is not None:
            tracker = get()
            return tracker.fork() if tracker.is_initialized() else contextlib.nullcontext()
    return contextlib.nullcontext()
