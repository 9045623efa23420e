"""Whole weights in a stream, of models behind Megatron-FSDP's interface: those of state_dict()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import at_night, on_ranks
from support.megatron import STRATEGIES, batch, mesh_of, plain_model, shard, whole
from support.quantized_training import model_of, sharded
from support.weights import assert_exported
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import libfsdp
from libfsdp.megatron import fully_shard_model


def exported(model: Any) -> dict[str, torch.Tensor]:
    """Returns the weights, after a comparison with all kinds of exports."""
    expected = {name: whole(value).cpu().clone() for name, value in model.state_dict().items()}
    assert_exported(model, expected, 200)
    source = libfsdp.WeightSource(model, names=list(expected)[::2])
    assert source.metadata() == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    return expected


@pytest.mark.parametrize(("size", "kind"), [(2, "fsdp"), at_night(4, "hsdp"), (4, "hfsdp")])
@on_ranks("size")
def test_the_state_dict(kind: str) -> None:
    for strategy in STRATEGIES if kind != "hfsdp" else STRATEGIES[-1:]:
        model = shard(plain_model(), strategy, kind)
        plain = dict(plain_model().state_dict())
        first = exported(model)
        for (name, value), (_, of_plain) in zip(first.items(), plain.items(), strict=True):
            assert torch.equal(value, of_plain), name
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(batch(step, dist.get_rank())).square().mean().backward()
            model.finish_grad_sync()
            exported(model)
            optimizer.step()
            optimizer.zero_grad()
            after = exported(model)
        assert not torch.equal(next(iter(after.values())), next(iter(first.values())))


@on_ranks(2)
def test_main_parameters_of_quantized_ones() -> None:
    model = sharded(model_of(torch.bfloat16, block=2))
    for step in range(2):
        model(batch(step, dist.get_rank(), dtype=torch.bfloat16)).square().mean().backward()
        model.finish_grad_sync()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad.to(p.dtype), alpha=0.1)
        exported(model)


class Cut(nn.Module):
    """A rank's pieces of two matrices, as Megatron's layers have them."""

    def __init__(self, rank: int, *, is_expert: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_all = {"up": torch.randn(12, 8), "down": torch.randn(8, 12)}
        for dim, (name, value) in enumerate(self.of_all.items()):
            piece = nn.Parameter(value.chunk(2, dim)[rank].clone())
            vars(piece).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1, allreduce=not is_expert)
            self.register_parameter(name, piece)


@pytest.mark.parametrize("is_expert", [False, True], ids=["tensor_parallel", "experts"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@on_ranks(4)
def test_pieces_of_megatrons_layers(strategy: str, is_expert: bool) -> None:
    mesh = init_device_mesh(device.TYPE, (2, 2), mesh_dim_names=("dp", "tp"))
    cut = Cut(mesh.get_local_rank("tp"), is_expert=is_expert)
    expected = {"1.up": cut.of_all["up"].clone(), "1.down": cut.of_all["down"].clone()}
    module = nn.Sequential(nn.Linear(8, 7), cut, nn.Linear(7, 3)).to(device.TYPE)
    options: dict[str, Any] = {"device_mesh": mesh_of(4, 1), "expt_device_mesh": mesh} if is_expert else {"device_mesh": mesh}
    model: Any = fully_shard_model(
        module,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Cut],
        zero_dp_strategy=strategy,
        **options,
    )
    found = exported(model)
    for name, value in expected.items():
        assert torch.equal(next(v for key, v in found.items() if key.endswith(name)).cpu(), value)
    snapshot = libfsdp.WeightSnapshot()
    received = {name: torch.zeros_like(value) for name, value in found.items()}
    for element in range(3):
        libfsdp.apply_changes(received, libfsdp.full_weights(model, since=snapshot))
        assert all(torch.equal(received[name], value) for name, value in exported(model).items())
        for p in model.parameters():
            p._local_tensor.detach().view(-1)[element : element + 1] += 1
