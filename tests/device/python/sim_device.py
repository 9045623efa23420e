"""The simulated device in Python: importing this makes torch.sim, and the backend "simccl" of torch.distributed.

PYTHONPATH has to name the build's tests/device, where the extension is.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import _sim_device
import torch
import torch.distributed as dist
from _sim_device import host_waits, kernels, memory, now, reset_stats, set_cost, take_reports

__all__ = ["host_waits", "kernels", "memory", "now", "reset_stats", "set_cost", "take_reports"]


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class Stream:
    """As torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(device=torch.device("sim", _index(device)), priority=priority)


class Event:
    """As torch.cuda.Event."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event("sim", enable_timing=enable_timing)


@contextmanager
def stream(entered: torch.Stream | None) -> Iterator[None]:
    if entered is None:
        yield
        return
    before = torch._C._accelerator_getStream(entered.device_index)
    torch._C._accelerator_setStream(entered)
    try:
        yield
    finally:
        torch._C._accelerator_setStream(before)


@contextmanager
def device(entered: Any) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(_index(entered))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _module() -> types.ModuleType:
    """What torch asks of the module of a device."""
    module = types.ModuleType("torch.sim")
    names: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "device": device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: _sim_device.DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(_index(device)),
        "current_stream": lambda device=None: torch._C._accelerator_getStream(_index(device)),
        "set_stream": torch._C._accelerator_setStream,
        "synchronize": lambda device=None: torch._C._accelerator_synchronizeDevice(_index(device)),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "memory_allocated": lambda device=None: memory(_index(device))["allocated"],
        "max_memory_allocated": lambda device=None: memory(_index(device))["peak"],
        "empty_cache": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module


def _make_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    return _sim_device.make_collectives(dist.ProcessGroupGloo(store, rank, size, timeout))


torch._register_device_module("sim", _module())
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.register_backend("simccl", _make_backend, devices=["sim"])
