"""Meshes of two devices in one model: the CPU's and the simulated device's. FSDP_TEST_DEVICE=sim runs it."""

from __future__ import annotations

import pytest
import torch
from support import device
from support.marks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import libfsdp

pytestmark = pytest.mark.skipif(device.TYPE != "sim", reason="FSDP_TEST_DEVICE is not 'sim'")


@on_ranks(2)
def test_units_of_a_model_are_on_one_device() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    libfsdp.fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    libfsdp.fully_shard(model, mesh=init_device_mesh("sim", (2,)))
    with pytest.raises(libfsdp.Error, match=r"^unit '0' is sharded over a mesh of cpu, and the module around it over one of sim:"):
        model(torch.ones(2, 4))
