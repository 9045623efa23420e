"""Where gradients and state lie on the simulated device, and what is written in their place. FSDP_TEST_DEVICE=sim runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.device import take_reports
from support.marks import on_ranks
from support.training import full, mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp.optim._adamw_8bit import _zeros_per_block

pytestmark = pytest.mark.skipif(device.TYPE != "sim", reason="FSDP_TEST_DEVICE is not 'sim'")

bf16 = torch.bfloat16


class Halves(nn.Module):
    """Uses one of two parameters, of which each is all that there is of its dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(8, 8))
        self.second = nn.Parameter(torch.randn(8, 8).to(bf16))

    def forward(self, x: Tensor, uses_second: bool) -> Tensor:
        return (x.to(bf16) @ self.second).float() if uses_second else x @ self.first


def add_up_in_place(manual: bool) -> list[Tensor]:
    """The gradients of two microbatches, of which the second one is not synchronized until the end."""
    model: Any = Halves().to(device.TYPE)
    libfsdp.fully_shard(model, mesh=mesh_of(1))
    x = torch.full((2, 8), 1.0 + dist.get_rank()).to(device.TYPE)
    if manual:
        model.set_manual_backward_finalization(True)
        model(x, False).sum().backward()
        model.set_requires_gradient_sync(False)
        model(x, True).sum().backward()
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
    else:
        (model(x, False).sum() + model(x, True).sum()).backward()
    assert take_reports() == []
    return [full(p.grad) for p in model.parameters()]


@on_ranks(2)
def test_gradients_that_wait_are_reduced_where_others_add_up() -> None:
    assert all(map(torch.equal, add_up_in_place(manual=True), add_up_in_place(manual=False)))


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: libfsdp.optim.AdamW(parameters, lr=0.1),
    "SGD": lambda parameters: libfsdp.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW8bit": lambda parameters: libfsdp.optim.AdamW8bit(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_state_of_offloaded_parameters_is_on_the_host(name: str) -> None:
    """After two steps, all of their state lies where they do."""
    torch.manual_seed(0)
    model: Any = nn.Linear(256, 64).to(device.TYPE)
    libfsdp.fully_shard(model, mesh=mesh_of(1), offload_policy=CPUOffloadPolicy())
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(2):
        model(torch.full((2, 256), step + 1.0).to(device.TYPE)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter, state in optimizer.state.items():
        for value in state.values():
            assert value.ndim == 0 or value._local_tensor.device == parameter._local_tensor.device
    assert parameter._local_tensor.device.type == "cpu"
    assert take_reports() == []


@on_ranks(2)
def test_values_of_blocks_are_on_the_device() -> None:
    """Parameters that are replicated, or of no sharded module, are on the device."""
    model: Any = nn.Linear(256, 64).to(device.TYPE)
    plain = nn.Parameter(torch.ones(4096).to(device.TYPE))
    libfsdp.fully_shard(model, mesh=mesh_of(1), placements="no_shard")
    for parameter in (model.weight, plain):
        values = _zeros_per_block(parameter, "a parameter")
        assert (values.to_local() if isinstance(values, DTensor) else values).device.type == device.TYPE
