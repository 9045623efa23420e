"""What fully_shard takes beyond FSDP2's arguments: what it changes in placements, bytes and memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.collectives import all_gather
from support.marks import on_ranks
from support.training import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import libfsdp
from libfsdp import Float8Blocks, MixedPrecisionPolicy, fully_shard
from libfsdp.megatron.uneven_dtensor import redistribute_uneven_dtensor_to_replicated


def model(rows: int = 8, **options: Any) -> Any:
    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(32, rows), nn.Tanh(), nn.Linear(rows, 32), nn.Linear(32, 4))
    fully_shard(sharded[0], **options)
    fully_shard(sharded[2], **options)
    return fully_shard(sharded, **options)


def train(sharded: Any, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = sharded(torch.randn(3, 32, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses + [full(p) for p in sharded.parameters()]


@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
@on_ranks(4)
def test_outer_ranks_cut_shards(offload: bool) -> None:
    mesh = init_device_mesh(device.TYPE, (2, 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"mesh": mesh}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    replicated = model(**options)
    sharded = model(outer_placements="optim", **options)
    weight = sharded[0].weight
    assert weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    # Half of the rows that replicas have, and so of the optimizer's state.
    assert weight._local_tensor.shape == (2, 32)
    assert replicated[0].weight._local_tensor.shape == (4, 32)
    assert torch.equal(full(weight), full(replicated[0].weight))
    for mine, other in zip(train(sharded), train(replicated), strict=True):
        torch.testing.assert_close(mine, other)
    sharded(torch.ones(1, 32)).sum().backward()
    assert sharded[0].weight.grad._local_tensor.shape == (2, 32)
    norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    replicated(torch.ones(1, 32)).sum().backward()
    torch.testing.assert_close(full(norm), full(torch.nn.utils.clip_grad_norm_(replicated.parameters(), 1.0)))


@on_ranks(8)
def test_outer_ranks_cut_shards_of_tensor_parallel_pieces() -> None:
    mesh = init_device_mesh(device.TYPE, (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 8)).to(device.TYPE)
    module = copy.deepcopy(plain)
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}, src_data_rank=None)
    for part in (*module, module):
        fully_shard(part, mesh=mesh["replicate", "shard"], outer_placements="optim")
    # The pieces of tensor parallelism are cut into shards, and these between the outer ranks.
    by_columns, by_rows = module[0].weight, module[1].weight
    assert by_columns.placements == (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0))
    assert by_rows.placements == (_StridedShard(0, split_factor=2), Shard(0), Shard(1))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, plain)]
    for step in range(3):
        for mine, whole in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(mine), full(whole))
            torch.testing.assert_close(redistribute_uneven_dtensor_to_replicated(mine).to_local(), whole)
        batches = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(step)).to(device.TYPE)
        own = 2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")
        for one, batch in ((module, batches[own]), (plain, batches)):
            one.zero_grad()
            one(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


@on_ranks(4)
def test_what_does_not_fit_is_refused() -> None:
    mesh = init_device_mesh(device.TYPE, (2, 2), mesh_dim_names=("replicate", "shard"))
    for options, text in (
        ({"outer_placements": "optim"}, "two dimensions"),
        ({"outer_placements": "optim", "mesh": mesh, "placements": "optim"}, "needs placements"),
        ({"outer_placements": "optim", "mesh": mesh, "rows": 6}, r"'weight' \(6, 32\).*divide by all 4"),
        ({"outer_placements": "grads"}, "no_shard, optim"),
        ({"keep_gathered_bytes": -1}, "keep_gathered_bytes is -1"),
        ({"gather_format": lambda p: Float8Blocks(24)}, "multiple of 16"),
        ({"gather_format": lambda p: Float8Blocks(64)}, "rows of whole blocks of 64"),
    ):
        with pytest.raises(ValueError, match=text):
            model(**options)


@on_ranks(2)
def test_parameters_travel_in_eight_bits() -> None:
    def matrices(parameter: nn.Parameter) -> Float8Blocks | None:
        return Float8Blocks(32) if parameter.ndim == 2 and parameter.size(1) == 32 else None

    eight, plain = model(gather_format=matrices), model()
    sent = []
    for sharded in (eight, plain):
        train(sharded, 1)
        before = libfsdp.wire_stats(sharded)["all_gather_bytes"]
        train(sharded, 1)
        sent.append(libfsdp.wire_stats(sharded)["all_gather_bytes"] - before)
    fresh, reference = model(gather_format=matrices), model()
    x = torch.ones(2, 32)
    got, expected = fresh(x), reference(x)
    assert not torch.equal(got, expected)
    torch.testing.assert_close(got, expected, rtol=0.1, atol=0.1)
    # Shards are as they were.
    assert torch.equal(full(fresh[0].weight), full(reference[0].weight))
    # The first matrix, gathered twice, and the last one (32 columns each) travel in 33 bytes instead of 128 for 32
    # elements; a rank sends half of each.
    assert sent[1] - sent[0] == (2 * 8 + 4) * 32 * 4 // 2 * (128 - 33) // 128


@on_ranks(2)
def test_a_budget_keeps_parameters_for_backward() -> None:
    gathers = []
    for budget in (0, 1 << 20):
        sharded = model(keep_gathered_bytes=budget)
        train(sharded, 1)
        before = libfsdp.wire_stats(sharded)["all_gathers"]
        train(sharded, 1)
        gathers.append(libfsdp.wire_stats(sharded)["all_gathers"] - before)
    assert gathers == [4, 3]


@on_ranks(2)
def test_nan_in_gradients_is_reported() -> None:
    sharded = model(report_nan_in_param_grad=True)
    train(sharded, 1)
    x = torch.ones(1, 32)
    if dist.get_rank() == 1:
        x[0, 3] = float("nan")
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' of unit '.*' before reduction, on rank 1"):
        sharded(x).sum().backward()
    # Gradients are the user's all the same; without them, training goes on.
    assert full(sharded[0].weight.grad).isnan().any()
    sharded.zero_grad()
    sharded.set_manual_backward_finalization(True)
    sharded(x).sum().backward()
    with pytest.raises(libfsdp.Error, match=r"parameter '0\.weight'"):
        sharded.finalize_backward()
    assert full(sharded[0].weight.grad).isnan().any()
    sharded.set_manual_backward_finalization(False)
    sharded.zero_grad()
    train(sharded, 1)
    assert not full(sharded[0].weight).isnan().any()


@on_ranks(2)
def test_unit_info() -> None:
    sharded = model(rows=6, reshard_after_forward=True)
    root, first, second = libfsdp.unit_info(sharded)
    assert [unit.name for unit in (root, first, second)] == ["(root)", "0", "2"]
    assert first.parameters == ("0.weight", "0.bias")
    assert first.whole_bytes == 4 * (6 * 32 + 6)
    assert first.shard_bytes == 4 * (3 * 32 + 3)
    assert first.mesh == {"dim_0": 2}
    assert first.reshard_after_forward is True
    assert [unit.name for unit in libfsdp.unit_info(nn.ModuleList([sharded]))] == ["0", "0.0", "0.2"]
    with pytest.raises(ValueError, match="is not sharded"):
        libfsdp.unit_info(nn.Linear(1, 1))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    low = model(rows=6, mp_policy=policy)
    units = libfsdp.unit_info(low)
    assert units[1].whole_bytes == 2 * (6 * 32 + 6)
    assert units[1].shard_bytes == 4 * (3 * 32 + 3)
    assert (units[1].param_dtypes, units[1].main_dtypes) == ((torch.bfloat16,), (torch.float32,))
    lines = str(units).splitlines()
    assert lines[0].split("  ")[0] == "unit"
    assert lines[2].split() == ["0", "2", "396", "bfloat16", "396", "float32", "yes", "dim_0=2"], lines
    assert lines[1].split() == ["(root)", "2", "264", "bfloat16", "264", "float32", "yes", "dim_0=2"], lines
    whole, shard = (sum(unit.whole_bytes for unit in units), sum(unit.shard_bytes for unit in units))
    assert lines[-1].split() == ["all", "6", str(whole), str(shard)]
    assert units == list(units)


@pytest.mark.skipif(device.TYPE != "cpu", reason="of Gloo on the CPU, which has no memory of its own")
@on_ranks(2)
def test_memory_of_process_groups() -> None:
    sharded = model()
    expected = train(model())
    sharded.set_allocate_memory_from_process_group_for_comm(True)  # Gloo has no memory of its own
    assert all(map(torch.equal, train(sharded), expected))
    with pytest.raises(AssertionError, match=r"cannot call set_custom_all_gather\(\)"):
        sharded.set_custom_all_gather(all_gather)
    with pytest.raises(AssertionError, match=r"when set_allocate_memory_from_process_group_for_comm\(\) is in effect"):
        sharded.set_symm_mem_for_comm()
    sharded.set_allocate_memory_from_process_group_for_comm(False)
    with pytest.raises(
        RuntimeError, match="needs torch's own groups of NCCL on CUDA, but the ranks have a ProcessGroup of gloo on cpu"
    ):
        sharded.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="can only be NCCL"):
        sharded.set_symm_mem_for_comm("NVSHMEM")
    custom = model()
    custom.set_custom_all_gather(all_gather)
    for call in (
        lambda: custom.set_allocate_memory_from_process_group_for_comm(True),
        custom.set_symm_mem_for_comm,
    ):
        with pytest.raises(AssertionError, match="when a collective is custom"):
            call()
