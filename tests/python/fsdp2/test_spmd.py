"""fully_shard of DTensors on a mesh of all ranks (``dp_mesh_dims``): as FSDP2, and as a replica that sums in one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.marks import IMPLEMENTATIONS, on_ranks
from support.ranks import ComparedRanks, run_both
from support.training import api
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import libfsdp

if TYPE_CHECKING or hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    from torch.distributed.fsdp import DataParallelMeshDims
else:
    pytest.skip("FSDP2 of this torch has no DataParallelMeshDims", allow_module_level=True)

WIDTH = 8
STEPS = 3


@dataclass(frozen=True)
class Layout:
    """A mesh of four ranks, and which of its dimensions are data-parallel."""

    names: tuple[str, ...]
    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None
    tensor_parallel: str | None = None
    cuts_again: bool = False  # the dimension that tensor parallelism has cut

    def dims(self) -> DataParallelMeshDims:
        return DataParallelMeshDims(shard=self.shard, replicate=self.replicate)

    def batches(self) -> int:
        """So many ranks have data of their own."""
        return 2 if self.tensor_parallel else 4


LAYOUTS = {
    "fsdp": Layout(("fsdp",), shard="fsdp"),
    "fsdp_tp": Layout(("fsdp", "tp"), shard="fsdp", tensor_parallel="tp"),
    "fsdp_tp_in_one_dimension": Layout(("fsdp", "tp"), shard="fsdp", tensor_parallel="tp", cuts_again=True),
    "tp_fsdp": Layout(("tp", "fsdp"), shard="fsdp", tensor_parallel="tp"),
    "hsdp": Layout(("replicate", "fsdp"), shard="fsdp", replicate="replicate"),
    "two_that_shard": Layout(("outer", "inner"), shard=("outer", "inner")),
    "ddp": Layout(("ddp",), replicate="ddp"),
    "ddp_tp": Layout(("ddp", "tp"), replicate="ddp", tensor_parallel="tp"),
}


@functools.cache
def mesh_of(names: tuple[str, ...]) -> DeviceMesh:
    """Made once on each rank: torch keeps specifications of DTensors by meshes that are equal, and FSDP2 asks for the same one."""
    return init_device_mesh("cpu", (4,) if len(names) == 1 else (2, 2), mesh_dim_names=names)


@dataclass
class Trained:
    """What one rank has seen and has at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the last step, whole
    parameters: dict[str, Tensor] = field(default_factory=dict)
    placements: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def batch(step: int, number: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + number))


def distribute(model: nn.Sequential, mesh: DeviceMesh, tensor_parallel: str | None) -> None:
    """Parameters become DTensors: replicated, but for weights that tensor parallelism cuts by columns, then by rows."""
    names = mesh.mesh_dim_names or ()
    for name, parameter in list(model.named_parameters()):
        module, _, short = name.rpartition(".")
        placements: list[Any] = [Replicate()] * mesh.ndim
        if tensor_parallel and short == "weight":
            placements[names.index(tensor_parallel)] = Shard(0 if module == "0" else 1)
        distributed = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
        model.get_submodule(module).register_parameter(short, distributed)


def other_dim(parameter: nn.Parameter) -> Shard:
    """Not the one that is cut already."""
    assert isinstance(parameter, DTensor)
    cut = [placement.dim for placement in parameter.placements if isinstance(placement, Shard)]
    return Shard(1) if cut == [0] else Shard(0)


def train(implementation: str, name: str) -> Trained:
    layout = LAYOUTS[name]
    mesh = mesh_of(layout.names)
    model = plain_model()
    distribute(model, mesh, layout.tensor_parallel)
    cuts_others = layout.tensor_parallel and layout.shard and not layout.cuts_again
    options = {"shard_placement_fn": other_dim} if cuts_others else {}
    fully_shard = api(implementation).fully_shard
    fully_shard(model[0], mesh=mesh, dp_mesh_dims=layout.dims(), **options)
    fully_shard(model, mesh=mesh, dp_mesh_dims=layout.dims(), **options)
    trained = Trained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    number = dist.get_rank()
    if layout.tensor_parallel:
        number = mesh.get_local_rank(1 - layout.names.index(layout.tensor_parallel))
    for step in range(STEPS):
        x = DTensor.from_local(batch(step, number), mesh, [Replicate()] * mesh.ndim, run_check=False)
        loss: Any = model(x).square().sum()
        loss.backward()
        trained.losses.append(loss.full_tensor().item())
        trained.gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    for n, p in model.named_parameters():
        assert isinstance(p, DTensor)
        trained.parameters[n] = p.full_tensor()
        trained.placements[n] = str(p.placements)
        trained.shapes[n] = tuple(p.to_local().shape)
    return trained


def replica(batches: int) -> Trained:
    """The same training in one process: gradients are the mean over the batches."""
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained = Trained()
    for step in range(STEPS):
        for number in range(batches):
            (model(batch(step, number)).square().sum() / batches).backward()
        trained.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    trained.parameters = {n: p.detach() for n, p in model.named_parameters()}
    return trained


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_follows_the_replica(compared_ranks: ComparedRanks, layout: str, implementation: str) -> None:
    expected = replica(LAYOUTS[layout].batches())
    for of_rank in compared_ranks[implementation](4).run(train, implementation, layout):
        for name, value in expected.parameters.items():
            torch.testing.assert_close(of_rank.gradients[name], expected.gradients[name])
            torch.testing.assert_close(of_rank.parameters[name], value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lies_as_with_fsdp2(compared_ranks: ComparedRanks, layout: str) -> None:
    """The same DTensors, and the same losses to the last digits."""
    for mine, other in zip(*run_both(compared_ranks, 4, train, layout), strict=True):
        assert mine.placements == other.placements
        assert mine.shapes == other.shapes
        assert mine.losses == pytest.approx(other.losses, rel=1e-5)


@on_ranks(2)
def test_what_does_not_fit_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    dims = DataParallelMeshDims(shard="fsdp")

    def refused(text: str, model: nn.Module, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            libfsdp.fully_shard(model, **{"mesh": mesh, "dp_mesh_dims": dims, **options})

    refused("must be DTensors", plain_model())
    model = plain_model()
    distribute(model, mesh, None)
    refused("not found in mesh", model, dp_mesh_dims=DataParallelMeshDims(shard="tp"))
    refused("must have mesh_dim_names", model, mesh=DeviceMesh("cpu", [0, 1]))
    refused("same mesh", model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    cut = plain_model()
    distribute(cut, mesh, "fsdp")
    refused(r"Expected Replicate\(\) on DP shard dim 'fsdp'", cut)
    with pytest.raises(NotImplementedError, match="as int"):
        libfsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=2)
