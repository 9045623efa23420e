"""What a model of Megatron-FSDP's interface leaves behind when it goes, and what keeps it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.megatron import STRATEGIES, Block, batch, plain_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from libfsdp.megatron import experimental, fully_shard_model, fully_shard_optimizer, v2


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    device.join(0, 1, init_method=f"file://{tmp_path}/rendezvous")
    yield
    dist.destroy_process_group()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        model(batch(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_goes(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    """What `make` returns takes all along when it goes."""
    model, optimizer = make()
    left = [weakref.ref(thing) for thing in (model, *model.modules(), *model.parameters(), optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in left] == [None] * len(left)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", [{}, {"use_decoupled_grad": True}, {"fsdp_double_buffer": True}, {"nccl_ub": True}], ids=str)
def test_a_model_that_goes_takes_all_along(strategy: str, options: dict[str, Any]) -> None:
    if options.get("nccl_ub") and device.TYPE == "cpu":
        pytest.skip("it is for a GPU")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model: Any = fully_shard_model(
            plain_model(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy, device=device.of_rank(0), **options
        )
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
        if not options.get("use_decoupled_grad"):  # Which torch's optimizers do not know.
            trained(model, optimizer)
        else:
            model(batch(0, 0)).square().mean().backward()
        return model, optimizer

    assert_goes(make)


def test_the_second_interface() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model: Any = plain_model()
        for layer in (*model, model):
            v2.fully_shard(layer, mesh=init_device_mesh(device.TYPE, (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        trained(model, optimizer)
        return model, optimizer

    assert_goes(make)


def test_models_of_a_context() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = init_device_mesh(device.TYPE, (1,), mesh_dim_names=("dp",))
        rows = [Shard(0)]
        placements = experimental.Placements(dp_axes=("dp",), parameter=rows, gradient=rows, optimizer=rows)
        model: Any = plain_model()
        with experimental.fully_shard_context():
            for layer in (*model, model):
                experimental.fully_shard(layer, mesh, placements)
        optimizer = torch.optim.AdamW(model.parameters())
        trained(model, optimizer)
        return model, optimizer

    assert_goes(make)


def test_an_optimizer_keeps_its_model() -> None:
    inner = plain_model()
    optimizer = fully_shard_optimizer(
        torch.optim.SGD(fully_shard_model(inner, fsdp_unit_modules=[Block], device=device.of_rank(0)).parameters(), lr=0.1)
    )
    gc.collect()
    before = [p.detach().to_local().clone() for p in inner.parameters()]
    inner(batch(0, 0)).square().mean().backward()
    optimizer.step()
    assert not all(torch.equal(p.to_local(), value) for p, value in zip(inner.parameters(), before, strict=True))
    assert next(inner.parameters())._megatron_fsdp_model.module is inner
