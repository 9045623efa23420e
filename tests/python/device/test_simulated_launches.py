"""What the engine launches on the simulated device, by kind of reduction: it must not depend on the number of parameters."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import on_ranks
from support.training import mesh_of
from torch import nn

import libfsdp

pytestmark = pytest.mark.skipif(device.TYPE != "sim", reason="FSDP_TEST_DEVICE is not 'sim'")


class Twice(nn.Module):
    """Its first unit is used twice. Before the ranks have agreed on that, the unit's gradients are reduced in two steps."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.shared = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
        self.between = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.shared(self.between(self.shared(x)))
        return y


def launched_by_backward(layers: int) -> dict[str, int]:
    """The kernels of a first backward that copy and add."""
    model: Any = Twice(layers).to(device.TYPE)
    for unit in (model.shared, model.between, model):
        libfsdp.fully_shard(unit, mesh=mesh_of(2))
    sim: Any = importlib.import_module("sim_device")
    loss = model(torch.ones(2, 8).to(device.TYPE)).sum()
    torch.accelerator.synchronize()
    sim.reset_stats(dist.get_rank())
    loss.backward()
    kernels = sim.kernels(dist.get_rank())
    return {
        name: kernels.get(name, 0)
        for name in ("aten::copy_", "aten::add_", "aten::_foreach_copy_", "aten::_foreach_add_")
    }


@on_ranks(4)
def test_sums_of_replicas_are_one_kernel_per_unit() -> None:
    """They are copied to the main gradients, or are added to them, by a kernel for all parameters."""
    few, many = (launched_by_backward(layers) for layers in (1, 4))
    assert few == many
    assert few["aten::_foreach_add_"] == 1
