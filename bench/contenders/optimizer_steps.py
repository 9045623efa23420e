"""A contender that does nothing but steps of AdamW on thousands of small sharded parameters: host time, as good as no arithmetic."""

from __future__ import annotations

import gc
import importlib
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

UNITS, PER_UNIT, ROWS, COLUMNS = 20, 100, 64, 16
WORLD = 8
OPTIONS = {
    "torch": {},
    "torch_foreach": {"foreach": True},
    "torch_fused": {"fused": True},
    "libfsdp": {},
    "libfsdp_fuse": {},
}


class Unit(nn.Module):
    """Parameters of a few rows each."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(ROWS, COLUMNS) for _ in range(PER_UNIT))


class OptimizerSteps:
    """One rank of WORLD, each of which has 8 rows of each parameter; nothing is communicated."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleList(Unit() for _ in range(UNITS))
        mesh = init_device_mesh("cpu", (WORLD,))
        libfsdp: Any = importlib.import_module("libfsdp") if kind.startswith("libfsdp") else None
        for unit in self.model:
            (libfsdp.fully_shard if libfsdp else fully_shard)(unit, mesh=mesh)
        self.weights = list(self.model.parameters())
        self.parameters = sum(weight.numel() for weight in self.weights)
        adamw: Any = libfsdp.optim.AdamW if kind == "libfsdp" else torch.optim.AdamW
        self.optimizer = adamw(self.weights, lr=1e-3, **OPTIONS[kind])
        if kind == "libfsdp_fuse":
            libfsdp.fuse(self.optimizer)
        for weight in self.weights:
            weight.grad = torch.full_like(weight, 0.5)
        gc.collect()
        gc.freeze()
        gc.disable()

    def handle(self, verb: str, count: int) -> dict[str, Any]:
        """Times `count` steps, each with gradients that are other objects than the last one's, as after a backward."""
        assert verb == "step"
        times, sums = [], []
        for _ in range(count):
            for weight in self.weights:
                assert weight.grad is not None
                weight.grad = weight.grad.detach()
            gc.collect()
            start = time.perf_counter()
            self.optimizer.step()
            times.append((time.perf_counter() - start) * 1e3)
            sums.append(sum(weight.to_local().double().sum().item() for weight in self.weights[::100]))
        return {"ms": times, "loss": sums}
