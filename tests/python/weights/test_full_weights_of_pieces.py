"""Whole weights of parameters that tensor parallelism, or a mesh of experts, has cut before: those of the model before all cuts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import needs_in_torch, on_ranks
from support.weights import BF16, assert_exported, assert_same, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import libfsdp
from libfsdp import WeightSnapshot, apply_changes, full_weights

FUSED = _StridedShard(0, split_factor=3)  # of q, k and v alike


@functools.cache
def mesh_of(names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """Made once on each rank: torch keeps specifications of DTensors by meshes that are equal, and wants the same one of all."""
    return init_device_mesh(device.TYPE, sizes, mesh_dim_names=names)


class Parameters(nn.Module):
    """Parameters of all shapes; nothing is computed with them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.columns = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6, 8))
        self.odd, self.few = nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(1, 4))
        self.qkv = nn.Parameter(torch.randn(12, 4))
        self.cube = nn.Parameter(torch.randn(4, 6, 4), requires_grad=False)
        self.alike, self.bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(9))
        self.register_buffer("count", torch.arange(4))


# How tensor parallelism cuts, and the dimension that FSDP cuts.
CUTS: dict[str, dict[str, tuple[Any, int]]] = {
    "rows": {"rows": (Shard(0), 0), "columns": (Shard(1), 0), "odd": (Shard(0), 0), "few": (Shard(0), 0)},
    "columns": {"rows": (Shard(0), 1), "columns": (Shard(1), 1), "odd": (Shard(1), 0), "cube": (Shard(1), 2)},
    "fused": {"qkv": (FUSED, 0), "cube": (_StridedShard(1, split_factor=3), 0), "bias": (Shard(0), 0)},
    "fused_columns": {"qkv": (FUSED, 1), "cube": (_StridedShard(1, split_factor=3), 2), "alike": (Replicate(), 0)},
}


def cut(model: nn.Module, mesh: DeviceMesh, placements: dict[str, list[Any]]) -> None:
    """Makes parameters DTensors. Each rank takes its piece of what it has."""
    for name, of_mesh in placements.items():
        value = model.get_parameter(name)
        piece = value.detach()
        for dim, placement in enumerate(of_mesh):
            if not isinstance(placement, Replicate):
                pieces, _ = placement._split_tensor(piece, mesh.size(dim), with_padding=False)
                piece = pieces[mesh.get_local_rank(dim)]
        spread = DTensor.from_local(
            piece.contiguous(), mesh, of_mesh, run_check=False, shape=value.shape, stride=value.stride()
        )
        setattr(model, name, nn.Parameter(spread, requires_grad=value.requires_grad))


def cut_model(kind: str, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """A model that is cut over two dimensions, and its weights before."""
    mesh = mesh_of(("dp", "tp"), (2, 2))
    model = Parameters().to(device.TYPE)
    expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    cut(model, mesh["tp"], {name: [placement] for name, (placement, _) in CUTS[kind].items()})
    dims = {id(model.get_parameter(name)): dim for name, (_, dim) in CUTS[kind].items()}
    if "placements" not in options:
        options["shard_placement_fn"] = lambda p: Shard(dims.get(id(p), 0))
    return libfsdp.fully_shard(model, mesh=mesh["dp"], **options), expected


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in CUTS), *(("rows", {"placements": one}) for one in ("no_shard", "optim", "optim_grads"))],
)
@on_ranks(4)
def test_the_weights_before_all_cuts(kind: str, options: dict[str, Any]) -> None:
    model, expected = cut_model(kind, **options)
    for _ in range(2):
        for bucket_bytes in (1, 150):
            assert_exported(model, expected, bucket_bytes)
        assert_same(whole(model, ranks="one_per_host", bucket_bytes=150), expected if dist.get_rank() == 0 else {})
        some = list(expected)[1::2]
        assert_same(whole(model, names=some), {name: expected[name] for name in some})
        with torch.no_grad():
            for p in model.parameters():
                getattr(p, "_local_tensor", p).mul_(-2)
        expected = {name: value if name == "count" else -2 * value for name, value in expected.items()}
    source = libfsdp.WeightSource(model)
    assert source.metadata() == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
        [_StridedShard(0, split_factor=2), Shard(0)],
        [Replicate(), Shard(1)],
    ],
    ids=str,
)
@on_ranks(4)
def test_several_dimensions_that_cut(placements: list[Any]) -> None:
    mesh = mesh_of(("dp", "ep", "tp"), (1, 2, 2))
    model = Parameters().to(device.TYPE)
    expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    cut(model, mesh["ep", "tp"], dict.fromkeys(("rows", "columns", "odd", "qkv", "cube"), placements))
    libfsdp.fully_shard(model, mesh=mesh["dp"])
    assert_exported(model, expected, 1)


@on_ranks(4)
def test_replicas() -> None:
    mesh = mesh_of(("replicate", "shard", "tp"), (2, 1, 2))
    model = Parameters().to(device.TYPE)
    expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    cut(model, mesh["tp"], {"rows": [Shard(0)], "odd": [Shard(1)]})
    libfsdp.fully_shard(model, mesh=mesh["replicate", "shard"])
    assert_exported(model, expected, 150)


@on_ranks(4)
def test_a_model_that_trains() -> None:
    """A model that computes, as PyTorch's tutorial cuts it, with frozen and tied parameters."""
    mesh = mesh_of(("dp", "tp"), (2, 2))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.LayerNorm(6), nn.Linear(6, 10))
    model.to(device.TYPE)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel()})
    model[4].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    libfsdp.fully_shard(model[2], mesh=mesh["dp"])
    libfsdp.fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(device.TYPE)
        model(x).square().mean().backward()
        before = whole(model, bucket_bytes=100)  # between microbatches
        optimizer.step()
        optimizer.zero_grad()
        expected = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
            for name, value in model.state_dict().items()
        }
        found = whole(model, bucket_bytes=100)
        assert found.keys() == expected.keys()
        assert_same({name: found[name] for name in expected}, expected)
        assert not torch.equal(found["0.weight"], before["0.weight"])
        assert torch.equal(found["2.weight"], before["2.weight"])
        assert torch.equal(found["0.weight"], found["4.weight"])


@on_ranks(4)
def test_experts_on_a_mesh_of_their_own() -> None:
    """Experts on one mesh, the rest on another one of the same ranks."""
    flat = mesh_of(("fsdp",), (4,))
    mesh = mesh_of(("efsdp", "ep"), (2, 2))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), Parameters(), nn.Linear(5, 3)).to(device.TYPE)
    expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    cut(model[1], mesh["ep"], {name: [Shard(0)] for name in ("rows", "columns", "odd", "qkv", "cube")})
    libfsdp.fully_shard(model[1], mesh=mesh["efsdp"])
    libfsdp.fully_shard(model, mesh=flat)

    def fails_on_one(name: str) -> str:
        if dist.get_rank() == 0:
            raise ValueError("no name")
        return name

    with pytest.raises(libfsdp.Error, match="rename failed"):  # Before any export, which makes views of meshes.
        full_weights(model, rename=fails_on_one)
    assert_exported(model, expected, 100)
    receive_changes(model)


@needs_in_torch(torch.distributed.fsdp, "DataParallelMeshDims")
@pytest.mark.parametrize(
    ("names", "dims"),
    [(("dp", "tp"), {"shard": "dp"}), (("tp", "dp"), {"shard": "dp"}), (("dp", "tp"), {"replicate": "dp"})],
    ids=["dp_tp", "tp_dp", "ddp_tp"],
)
@on_ranks(4)
def test_dtensors_on_a_mesh_of_all_ranks(names: tuple[str, str], dims: dict[str, str]) -> None:
    mesh = mesh_of(names, (2, 2))
    model = Parameters().to(device.TYPE)
    expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    placements: dict[str, list[Any]] = {name: [Replicate(), Replicate()] for name, _ in model.named_parameters()}
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("odd", Shard(0))):
        placements[name][names.index("tp")] = placement
    cut(model, mesh, placements)
    libfsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=torch.distributed.fsdp.DataParallelMeshDims(**dims))
    assert_exported(model, expected, 100)
    receive_changes(model)


def disturb(model: nn.Module, share: float, generator: torch.Generator) -> None:
    """Changes a share of all elements. Ranks that have the same ones change them alike."""
    for p in model.parameters():
        change = torch.rand(p.shape, generator=generator) < share
        local = getattr(p, "_local_tensor", p).detach()
        if isinstance(p, DTensor):
            offsets = p.__create_chunk_list__()[0].offsets if local.numel() else [0] * p.ndim
            for dim, begin in enumerate(offsets):
                change = change.narrow(dim, begin if local.numel() else 0, local.size(dim))
        local[change.to(local.device)] += 1


def receive_changes(model: nn.Module, *, in_boxes: bool = True) -> None:
    """A receiver that applies what has changed has the bits of a whole export, in each dtype and division."""
    for options in ({}, {"dtype": BF16, "ranks": "first"}):
        receives = options.get("ranks") != "first" or dist.get_rank() == 0
        snapshot = WeightSnapshot()
        weights = {name: torch.zeros_like(value) for name, value in whole(model, **options).items()}
        generator = torch.Generator().manual_seed(1)
        seen: set[bool] = set()
        for number, share in enumerate((0.0, 0.03, 0.03, 1.0, 0.0)):
            if in_boxes:
                disturb(model, share, generator)
            elif share:
                for p in model.parameters():
                    getattr(p, "_local_tensor", p).detach().view(-1)[:1] += 1
            buckets = full_weights(model, since=snapshot, bucket_bytes=200, **options)
            for bucket in buckets:
                seen.update(change.positions is None for change in bucket)
                apply_changes(weights, [bucket])
            assert_same(weights, whole(model, **options))
            assert (buckets.changed_fraction > 0) == (share > 0 or number == 0)
        assert seen == ({False, True} if receives else set())


@pytest.mark.parametrize(
    ("kind", "in_boxes"), [("rows", True), ("columns", True), ("fused", False), ("fused_columns", False)]
)
@on_ranks(4)
def test_what_has_changed(kind: str, in_boxes: bool) -> None:
    model, _ = cut_model(kind)
    receive_changes(model, in_boxes=in_boxes)


@on_ranks(4)
def test_the_least_bytes_and_memory() -> None:
    mesh = mesh_of(("dp", "tp"), (2, 2))
    model: Any = Parameters().to(device.TYPE)
    del model.alike, model.bias
    cut(model, mesh["tp"], {name: [Shard(1 if name == "columns" else 0)] for name, _ in model.named_parameters()})
    pieces = {name: p._local_tensor.numel() for name, p in model.named_parameters()}
    libfsdp.fully_shard(model, mesh=mesh["dp"])
    whole(model, bucket_bytes=1)  # Statistics begin with it.
    own = sum(p._local_tensor.numel() * 4 for p in model.parameters())
    everything = sum(p.numel() * 4 for p in model.parameters())
    largest = max(p.numel() * 4 for p in model.parameters())
    aligned = (largest + 63) // 64 * 64

    def on_all(value: int) -> int:
        total = torch.tensor(value)
        dist.all_reduce(total)
        return int(total)

    def sent(bucket_bytes: int, **options: Any) -> int:
        before, memory = libfsdp.wire_stats(model), libfsdp.memory_stats(model)
        whole(model, bucket_bytes=bucket_bytes, **options)
        after = libfsdp.memory_stats(model)
        assert after["gathered_parameters.live"] == memory["gathered_parameters.live"]
        # Two buckets, and what puts the values of one parameter into their places.
        most = 2 * max(aligned, bucket_bytes) + largest
        assert after["gathered_parameters.peak"] <= memory["gathered_parameters.live"] + most
        return on_all(libfsdp.wire_stats(model)["all_gather_bytes"] - before["all_gather_bytes"])

    # Each rank gets what it has not, once.
    least = 4 * everything - on_all(own)
    assert on_all(own) == everything
    for bucket_bytes in (1, 300):
        assert sent(bucket_bytes=bucket_bytes) == least
        assert sent(bucket_bytes=bucket_bytes, dtype=BF16) == least // 2
    # On CPUs, straight to the first rank. Else along its row of dp, and in the other one to the first rank, which then sends a piece.
    straight = on_all(own if dist.get_rank() > 0 else 0)
    to_rows = on_all(own if mesh.get_local_rank("dp") == 1 else 0)
    to_first = on_all(4 * sum(pieces.values()) if dist.get_rank() == mesh.mesh[0, 1] else 0)
    assert sent(bucket_bytes=300, ranks="first") == (straight if device.TYPE == "cpu" else to_rows + to_first)


@pytest.mark.parametrize(("at", "who"), [(0, 3), (2, 0), (3, 1)])
@on_ranks(4)
def test_a_rank_may_stop(at: int, who: int) -> None:
    """One rank stops: the others learn it, those in other rows, too."""
    model, expected = cut_model("rows")
    buckets = len(full_weights(model, bucket_bytes=1, names=None))
    whole(model, bucket_bytes=1)
    seen = ""
    try:
        with full_weights(model, bucket_bytes=1) as weights:
            for k, _ in enumerate(weights):
                if dist.get_rank() == who and k == at:
                    break
    except libfsdp.Error as error:
        seen = str(error)
    if dist.get_rank() != who and at + 1 < buckets:
        assert "has stopped before bucket" in seen
    else:
        assert not seen
    assert_same(whole(model), expected)


@on_ranks(4)
def test_what_is_wrong_is_one_error_on_every_rank() -> None:
    model, expected = cut_model("rows")
    rank = dist.get_rank()

    def refused(text: str, **options: Any) -> None:
        with pytest.raises(libfsdp.Error, match=text):
            full_weights(model, **options)
        assert_same(whole(model), expected)

    refused("bucket_bytes 6", bucket_bytes=5 if rank < 3 else 6)
    refused("what is asked for: rank . and rank . differ", names=["rows"] if rank == 1 else None)
    refused("no parameter or buffer 'none'", names=["none" if rank == 2 else "rows"])
    refused("bucket_bytes must be an int", bucket_bytes="5" if rank == 3 else 5)


def _other_sizes(mesh: DeviceMesh) -> DTensor:
    rows = 2 if mesh.get_local_rank() == 0 else 6
    local = torch.randn(rows, 4, device=device.TYPE)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 4)), stride=(4, 1))


def _other_rows(mesh: DeviceMesh) -> DTensor:
    local = torch.randn(4, 2, device=device.TYPE)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 4)), stride=(4, 1))


@on_ranks(4)
def test_pieces_that_are_not_those_of_the_placements() -> None:
    mesh = mesh_of(("dp", "tp"), (2, 2))
    for make in (_other_sizes, _other_rows):
        model = nn.Linear(4, 8, bias=False).to(device.TYPE)
        model.weight = nn.Parameter(make(mesh["tp"]))
        libfsdp.fully_shard(model, mesh=mesh["dp"])
        with pytest.raises(libfsdp.Error, match=r"parameter 'weight' of \[8, 4\] has a piece of .* and by its placements"):
            full_weights(model)


@on_ranks(4)
def test_tensors_of_no_unit() -> None:
    """DTensors that no unit has."""
    mesh = mesh_of(("dp", "tp"), (2, 2))
    model: Any = Parameters().to(device.TYPE)
    expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    cut(model, mesh["tp"], {"rows": [Shard(0)], "odd": [Shard(1)]})
    model.register_buffer("table", distribute_tensor(torch.arange(12.0).view(4, 3), mesh["tp"], [Shard(0)]))
    expected["table"] = torch.arange(12.0).view(4, 3)
    libfsdp.fully_shard(model, mesh=mesh["dp"], ignored_params={model.rows, model.odd})
    assert_exported(model, expected, 1)
