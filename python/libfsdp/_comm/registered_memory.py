"""Buffers of collectives in memory that NCCL knows: pools that are registered with the process groups."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch.distributed as dist

    from libfsdp import _C

_FIRST_WITH_WINDOWS = (2, 27, 0)  # of NCCL


def can_register(backend: dist.Backend) -> bool:
    """As NCCL's: it takes pools of memory."""
    return hasattr(backend, "register_mem_pool") and hasattr(backend, "deregister_mem_pool")


class RegisteredMemory:
    """Two pools of NCCL's memory for the buffers of a model, which grow and do not shrink while the model lives.

    Torch has no memory of NCCL's for GPUs without multicast (before Hopper, or without NVSwitch). There, the pools are of ordinary memory.

    What gathers fill lies in a pool of its own, which is registered as windows (symmetric memory) where NCCL has them and the memory is its
    own: that is collective, and all ranks gather alike. What a rank needs for gradients depends on those that it gets, so the other pool is
    registered on each rank for itself. Torch registers what a pool gets later, too. The pools are deregistered when the model is destroyed.

    Args:
        device: where the buffers lie.
        symmetric: windows for gathers.
        manually: not before ``register()`` is called.
    """

    def __init__(self, device: torch.device, *, symmetric: bool, manually: bool) -> None:
        self._device = device
        self._windows = symmetric and torch.cuda.nccl.version() >= _FIRST_WITH_WINDOWS
        self._registers = not manually
        self._backends: list[dist.Backend] = []
        self._pools: list[torch.cuda.MemPool] = []
        self._registered: list[tuple[dist.Backend, torch.cuda.MemPool]] = []
        # Not when the interpreter ends, because the groups no longer exist then.
        weakref.finalize(self, _deregister, self._registered).atexit = False

    def serve(self, engine: _C.HookedModel, backends: Iterable[dist.Backend]) -> None:
        """Makes the engine's buffers come from here, after its communicators have been made, with these backends. Collective."""
        self._backends = list(dict.fromkeys(backend for backend in backends if can_register(backend)))
        if not self._backends:
            return
        if not self._pools:
            first = self._backends[0]
            is_own = first.supports_tensor_alloc(self._device)
            self._windows = self._windows and is_own  # NCCL refuses other memory as a window.
            self._pools = [torch.cuda.MemPool(first.mem_allocator) if is_own else torch.cuda.MemPool() for _ in range(2)]
        of_gathers, of_the_rest = self._pools
        engine.set_buffer_sources(self._source(of_gathers), self._source(of_the_rest))
        if self._registers:
            self.register()

    def register(self) -> None:
        """With all groups that the model's engine has; where there is none yet, as soon as there is one. Collective."""
        self._registers = True
        new = [backend for backend in self._backends if all(backend is not known for known, _ in self._registered)]
        options = torch._C._distributed_c10d.BarrierOptions()
        if self._device.index is not None:
            options.device_ids = [self._device.index]  # Else NCCL guesses one.
        for backend in new:
            # NCCL's communicator is there from the first collective on, and a window is made by all ranks.
            backend.barrier(options).wait()
            for pool, is_window in zip(self._pools, (self._windows, False), strict=True):
                backend.register_mem_pool(pool, symm=is_window)
                self._registered.append((backend, pool))

    def _source(self, pool: torch.cuda.MemPool) -> Callable[[int], torch.Tensor]:
        def allocate(size: int) -> torch.Tensor:
            with torch.cuda.use_mem_pool(pool, self._device):
                return torch.empty(size, dtype=torch.uint8, device=self._device)

        return allocate


def _deregister(registered: list[tuple[dist.Backend, torch.cuda.MemPool]]) -> None:
    for backend, pool in registered:
        with contextlib.suppress(RuntimeError):  # The group was destroyed, or has failed.
            backend.deregister_mem_pool(pool)
