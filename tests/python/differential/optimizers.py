"""Optimizers of random programs, by name: on sharded parameters, and on a replica's slices."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from differential.program import Optimizer


class SGD(torch.optim.SGD):
    """With ATen's fused kernel, and 16 bits widened: its own arithmetic for these is wrong on CPUs."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p.numel() == 0:
                    continue
                state, momentum = self.state[p], group["momentum"]
                is_first = "momentum_buffer" not in state
                if momentum and is_first:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                rounded = [p, p.grad, *([state["momentum_buffer"]] if momentum else [])]
                wide = [one.float() for one in rounded]
                torch._fused_sgd_(
                    wide[:1],
                    wide[1:2],
                    wide[2:],
                    weight_decay=group["weight_decay"],
                    momentum=momentum,
                    lr=group["lr"],
                    dampening=group["dampening"],
                    nesterov=group["nesterov"],
                    maximize=group["maximize"],
                    is_first_step=is_first,
                )
                for one, copy in zip(rounded, wide, strict=True):
                    one.copy_(copy)


# What a replica steps with where the library's own optimizer is asked for: ATen's fused kernels on each rank's slice.
FUSED = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "SGD": SGD}
# Those whose update of an element depends on others. A replica takes their results as they are, after a check within bounds.
OF_WHOLE_MATRICES = ("Muon", "AdamW8bit", "Adafactor")


def groups_of(plan: Optimizer, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """One group, or two with other settings."""
    if not plan.groups:
        return [{"params": list(parameters.values())}]
    first = {name for name in parameters if zlib.crc32(name.encode()) % 3 == 0}
    split: list[dict[str, Any]] = [
        {"params": [p for name, p in parameters.items() if name in first], "lr": 0.013},
        {"params": [p for name, p in parameters.items() if name not in first]},
    ]
    return [group for group in split if group["params"]]


def chosen(plan: Optimizer, parameters: dict[str, Tensor], ndims: dict[str, int]) -> dict[str, Tensor]:
    """The parameters that the optimizer takes: Muon has matrices only."""
    if not plan.kind.endswith("Muon"):
        return parameters
    return {name: p for name, p in parameters.items() if ndims[name] == 2}


def make(plan: Optimizer, parameters: dict[str, Any], *, replica: bool) -> torch.optim.Optimizer:
    """An optimizer of these parameters."""
    package, name = plan.kind.split(".")
    groups = groups_of(plan, parameters)
    arguments = dict(plan.arguments)
    if package == "torch":
        return getattr(torch.optim, name)(groups, **arguments)
    if replica and name in OF_WHOLE_MATRICES:  # Its results are taken over.
        return torch.optim.SGD(groups, lr=0.0)
    if replica:
        return FUSED[name](groups, **arguments, **({} if name == "SGD" else {"fused": True}))
    libfsdp = importlib.import_module("libfsdp")
    if package == "fuse":
        return libfsdp.fuse(getattr(torch.optim, name)(groups, **arguments))
    return getattr(libfsdp.optim, name)(groups, **arguments)


def slices(whole: Tensor, cut: tuple[tuple[int, int], ...]) -> Tensor:
    """What a rank has of a tensor: offset and size in each dimension."""
    for dim, (offset, size) in enumerate(cut):
        whole = whole.narrow(dim, offset, size)
    return whole


def as_leaf(tensor: Tensor) -> nn.Parameter:
    """A parameter of its own, whose memory begins as a shard's does."""
    return nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format))


def sums_of_state(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> list[float]:
    """Of its tensors, by parameter and name: this rank's parts."""
    values = [value for p in parameters for _, value in sorted(optimizer.state.get(p, {}).items())]
    parts = [
        value._local_tensor if isinstance(value, DTensor) else value for value in values if isinstance(value, Tensor)
    ]
    return [part.double().abs().sum().item() for part in parts if part.ndim > 0 and part.numel() > 0]
