"""Parameters on ranks of their own, and modules that show what neighbours keep, on four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import needs_in_torch, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard

import libfsdp
from libfsdp import ShardPlacementResult, fully_shard


class Experts(nn.Module):
    """A block with parameters of two kinds, and a sharded one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 8)
        self.inner = nn.Linear(8, 8)
        self.expert = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.expert(torch.tanh(self.inner(torch.tanh(self.before(x)))))


def make(shard: Callable[..., Any], result: Callable[[Any], Any]) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), Experts(), nn.Linear(4, 4))
    for block in model[:2]:
        experts = set(block.expert.parameters())
        shard(block.inner)
        shard(block, shard_placement_fn=lambda p, e=experts: result(mesh["fsdp"]) if p in e else None)
    shard(model)
    return model


def train(model: nn.Module, *, sgd: bool = True) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    results = []
    for _ in range(3):
        loss = model(torch.randn(3, 4, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    return results + [p.full_tensor().detach() for p in model.parameters()]


@needs_in_torch(_fsdp_common, "ShardPlacementResult")
@on_ranks(4)
def test_parameters_on_ranks_of_their_own() -> None:
    infos: list[Any] = []  # FSDP2 wants one object.

    def theirs(mesh: Any) -> Any:
        infos.append(infos[0] if infos else _fsdp_common.FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0))
        return _fsdp_common.ShardPlacementResult(placement=Shard(0), mesh_info=infos[0])

    def ours(mesh: Any) -> Any:
        return ShardPlacementResult(placement=None, mesh_info=mesh)

    expected = train(make(fsdp2, theirs))
    for result in (ours, theirs):
        model = make(fully_shard, result)
        assert model[0].expert.weight.device_mesh.size() == 2
        assert model[0].expert.weight._local_tensor.shape == (2, 8)
        assert model[0].before.weight.device_mesh.size() == 4
        for mine, other in zip(train(model), expected, strict=True):
            torch.testing.assert_close(mine, other)
        # Both units answer to the module's methods.
        model[0].unshard()
        assert [p.shape for p in (model[0].before.weight, model[0].expert.weight)] == [(8, 4), (4, 8)]
        assert not isinstance(model[0].expert.weight, DTensor)
        model[0].reshard()
        assert isinstance(model[0].expert.weight, DTensor)
        names = [(unit.name, sorted(unit.mesh.values())) for unit in libfsdp.unit_info(model)]
        assert names[1:4] == [("0", [4]), ("0", [2]), ("0.inner", [4])]


@on_ranks(4)
def test_a_mesh_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="mesh_info has no mesh"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: ShardPlacementResult(None, "all"))


def shapes_between(shard: Callable[..., Any], rows: int) -> list[Any]:
    """What modules show after forward: shapes, placements, mesh and the local values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, rows), nn.Tanh(), nn.Linear(rows, 8), nn.Linear(8, 4))
    for layer in (model[0], model[2]):
        shard(layer, reshard_after_forward=2)
    shard(model)
    output = model(torch.ones(2, 4))
    shown: list[Any] = []
    for layer in (model[0], model[2]):
        weight = layer.weight
        assert isinstance(weight, DTensor)
        shown.append((weight.shape, weight.placements, weight.device_mesh.mesh.tolist(), weight.requires_grad))
        shown.append(weight.to_local().detach().clone())
        shown.append(weight.full_tensor().detach().clone())
    output.sum().backward()
    for layer in (model[0], model[2]):
        shown.append((layer.weight.placements, layer.weight.device_mesh.mesh.tolist()))
        shown.append(layer.weight.grad.full_tensor())
    return shown


def nn_weight(rows: int) -> torch.Tensor:
    torch.manual_seed(0)
    return nn.Linear(4, rows).weight.detach()


@on_ranks(4)
def test_modules_show_what_neighbours_keep() -> None:
    ours, theirs = shapes_between(fully_shard, 8), shapes_between(fsdp2, 8)
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine, other)
        else:
            assert mine == other
    assert ours[0][1] == (Replicate(), Shard(0))
    assert ours[0][2] == [[0, 1], [2, 3]]
    assert ours[1].shape == (4, 4)
    # Uneven rows have other cuts than torch.chunk would make among the neighbours: shards of all ranks are shown.
    uneven = shapes_between(fully_shard, 6)
    assert uneven[0][1] == (Shard(0),)
    assert torch.equal(uneven[2], nn_weight(6))


@on_ranks(4)
def test_reshard_brings_the_shards_of_all_ranks_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    fully_shard(model[0], reshard_after_forward=2)
    fully_shard(model)
    first = model[0].weight
    output = model(torch.ones(2, 4))
    assert model[0].weight is not first
    model[0].reshard()
    assert model[0].weight is first
    with torch.no_grad():
        first.zero_()
    output.sum().backward()
    assert first.grad is not None
    # Without gradients nothing is kept, and a second forward begins anew.
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert model[0].weight is first
    state = model.state_dict()
    assert state["0.weight"].placements == (Shard(0),)


def gathered_bytes(options: dict[str, Any], change: Callable[[Any], None] | None, *, within: bool) -> int:
    """What a rank sends in gathers of one step, after `change` to the first layer: between steps, or between forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4))
    fully_shard(model[0], **options)
    fully_shard(model[1])
    fully_shard(model)

    def step(between: Callable[[Any], None] | None = None) -> torch.Tensor:
        output = model(torch.ones(2, 4))
        if between is not None:
            between(model[0])
        output.sum().backward()
        gradient = model[0].weight.grad.full_tensor()
        model.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0)  # an update: all is gathered again
        return gradient

    gradients = [step()]
    if change is not None and not within:
        change(model[0])
    gradients.append(step(change if within else None))
    before = libfsdp.wire_stats(model)["all_gather_bytes"]
    gradients.append(step())
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    return libfsdp.wire_stats(model)["all_gather_bytes"] - before


@on_ranks(4)
def test_neighbours_may_keep_nothing_any_more() -> None:
    def forget(layer: Any) -> None:
        layer.set_reshard_after_forward(True)

    among_two = gathered_bytes({"reshard_after_forward": 2}, None, within=False)
    among_all = gathered_bytes({"reshard_after_forward": True}, None, within=False)
    assert among_two < among_all
    for within in (False, True):
        assert gathered_bytes({"reshard_after_forward": 2}, forget, within=within) == among_all
