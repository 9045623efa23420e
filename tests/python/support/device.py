"""Where tests train: on the CPU, or on what FSDP_TEST_DEVICE names. Ranks share a GPU where there are fewer of them.

"sim" is the simulated device of tests/device, which needs the build's tests/device on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)

TYPE = os.environ.get("FSDP_TEST_DEVICE", "cpu")
# NCCL refuses two ranks on one GPU; "gloo" moves CUDA tensors, too.
BACKEND = os.environ.get("FSDP_TEST_BACKEND", {"cpu": "gloo", "sim": "simccl"}.get(TYPE, "nccl"))
if TYPE == "sim":
    importlib.import_module("sim_device")


def of_rank(rank: int) -> torch.device:
    """A rank's device."""
    return (
        torch.device("cpu")
        if TYPE == "cpu"
        else torch.device(TYPE, rank % torch.get_device_module(TYPE).device_count())
    )


def move(module: ModuleT) -> ModuleT:
    """To the device, but for a module on the meta device, which has nothing to move."""
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    return module if on_meta else module.to(TYPE)


def take_reports() -> list[str]:
    """Returns and forgets the reports of the simulated device on this rank."""
    torch.accelerator.synchronize()
    reports: list[str] = importlib.import_module("sim_device").take_reports()
    return reports


def join(rank: int, size: int, **options: Any) -> torch.device:
    """Makes the default group, with Gloo for the CPU's tensors, and the rank's device the current one."""
    device = of_rank(rank)
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(device)
    backend = BACKEND if device.type == "cpu" else f"cpu:gloo,{device.type}:{BACKEND}"
    dist.init_process_group(backend, rank=rank, world_size=size, **options)
    return device
