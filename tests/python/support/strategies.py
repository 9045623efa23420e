"""Models that are sharded in every way, after a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import libfsdp
from support import device
from support.training import CASES, batch_of, seeded


def a_step(model: Any, case_name: str, step: int, optimizer: torch.optim.Optimizer) -> None:
    case = CASES[case_name]
    case.loss(model, batch_of(case, step, 0, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def every_strategy() -> Iterator[tuple[Any, torch.optim.Optimizer, dict[str, Any]]]:
    """Small transformers with one frozen parameter, their optimizers, and fully_shard's options."""
    size = dist.get_world_size()
    line = init_device_mesh(device.TYPE, (size,), mesh_dim_names=("shard",))
    plane = init_device_mesh(device.TYPE, (2, size // 2), mesh_dim_names=("replicate", "shard"))
    kinds: list[dict[str, Any]] = [
        {"mesh": mesh, "placements": placements}
        for mesh in (line, plane)
        for placements in ("no_shard", "optim", "optim_grads", "optim_grads_params")
    ]
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    kinds += [
        {"mesh": plane, "outer_placements": "optim_if_even"},
        {"mesh": line, "main_params_dtype": torch.float64, "mp_policy": bf16},
        {"mesh": line, "gather_format": lambda p: libfsdp.Float8Blocks(16) if p.ndim == 2 else None},
        {
            "mesh": plane,
            "placements": "optim_grads",
            "gather_format": lambda p: libfsdp.Int4Differences(16) if p.ndim == 2 else None,
        },
        {"mesh": line, "offload_policy": CPUOffloadPolicy(pin_memory=False), "placements": "optim"},
        {"mesh": line, "shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.size(1) % size == 0 else None},
        {"mesh": line, "ignored_params": True},
    ]
    for kind in kinds:
        model: Any = seeded(CASES["transformer"])
        model.blocks[0].up.weight.requires_grad_(False)
        if kind.pop("ignored_params", False):
            kind["ignored_params"] = {model.norm.weight, model.blocks[0].up.bias}
        for block in model.blocks:
            libfsdp.fully_shard(block, **kind)
        libfsdp.fully_shard(model, **kind)
        # Of a device, several tensors at once are not updated if some of them are ignored, and no DTensors.
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, foreach=False)
        a_step(model, "transformer", 0, optimizer)
        yield model, optimizer, kind
