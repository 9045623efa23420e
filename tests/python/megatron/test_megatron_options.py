"""Options of Megatron-FSDP's class and functions, and the names of its ranks, each by what it changes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import on_ranks
from support.megatron import Block, batch, gathered_gradients, mean_gradients, plain_model, ranks_of, shard, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp.megatron import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    fully_shard,
    fully_shard_model,
)
from libfsdp.megatron import _config as config


def wrapped(module: nn.Module, **options: Any) -> MegatronFSDP:
    """The class itself, over all ranks."""
    return MegatronFSDP(module, FSDPDistributedIndex(**ranks_of("fsdp")), **options)


def units(model: MegatronFSDP) -> list[str]:
    return [unit.name for unit in libfsdp.unit_info(model.module)]


@on_ranks(2)
def test_fine_grained_units() -> None:
    every = [
        name for name, module in plain_model().named_modules() if any(True for _ in module.parameters(recurse=False))
    ]
    blocks = [name for name, module in plain_model().named_modules() if isinstance(module, Block)]
    assert blocks
    assert set(blocks) < {name.partition(".")[0] for name in every}
    for option in ("enable_fine_grained_param_gather_hook", "enable_fine_grained_param_gather_backward_hook"):
        assert sorted(units(wrapped(plain_model(), **{option: True}))) == sorted(every)
    # Modules of these types are one unit with all below them.
    types = {"fine_grained_recurse_module_types": (Block,)}
    together = units(wrapped(plain_model(), enable_fine_grained_param_gather_hook=True, **types))
    assert sorted(together) == sorted({name.partition(".")[0] for name in every})
    assert units(wrapped(plain_model(), **types)) == ["(root)"]
    assert units(wrapped(plain_model())) == ["(root)"]


@on_ranks(2)
def test_classes_of_no_module_are_told() -> None:
    class Absent(nn.Module):
        pass

    def warned(**options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped(plain_model(), **options)
        return [str(warning.message) for warning in caught if "which make no unit" in str(warning.message)]

    leads = dist.get_rank() == 0
    told = warned(fsdp_unit_modules=[Absent, nn.LayerNorm])
    assert len(told) == (1 if leads else 0), told
    if leads:
        absent = f"({Absent.__qualname__}, LayerNorm)"
        start = f"fsdp_unit_modules: no module is of the classes that were given {absent}"
        assert told[0].startswith(start), told
        assert "The model's modules are of the classes " in told[0], told
        assert "Block" in told[0], told
    fine = {"enable_fine_grained_param_gather_hook": True, "fine_grained_recurse_module_types": (Absent,)}
    assert len(warned(**fine)) == (1 if leads else 0)
    assert not warned()
    for classes in ([Absent, Block], []):
        assert not warned(fsdp_unit_modules=classes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard_model(plain_model(), **ranks_of("fsdp"), fsdp_unit_modules=[Absent])
    assert len([one for one in caught if "which make no unit" in str(one.message)]) == (1 if leads else 0)


class Owner(nn.Module):
    """Has a layer of its own, and one that others have, too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.own(self.shared(x))
        return out


@on_ranks(2)
def test_units_may_have_several_owners() -> None:
    torch.manual_seed(0)
    shared = nn.LayerNorm(4)
    model = nn.Sequential(Owner(shared), Owner(shared), nn.Linear(4, 2)).to(device.TYPE)
    plain = copy.deepcopy(model)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Owner, nn.LayerNorm])
    assert sorted(units(sharded)) == ["(root)", "0", "0.shared", "1"]
    x = torch.ones(2, 4, device=device.TYPE)
    sharded(x).sum().backward()
    plain(x).sum().backward()
    assert all(map(torch.equal, gathered_gradients(sharded), [p.grad for p in plain.parameters()]))


class Container(nn.Module):
    """Computes with its layers' parameters, and does not call them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((nn.functional.linear(x, one.weight, one.bias) for one in self.experts), start=x)


@on_ranks(2)
def test_containers() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Container()).to(device.TYPE)
    model = wrapped(
        copy.deepcopy(plain),
        enable_fine_grained_param_gather_hook=True,
        fine_grained_recurse_module_types=(Container,),
        sync_model_each_microbatch=True,
    )
    assert sorted(units(model)) == ["0", "1"]
    model(batch(0, dist.get_rank())).square().mean().backward()
    expected = mean_gradients(plain, [0])
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(whole(p.grad), gradient)


@on_ranks(2)
def test_arguments_of_the_class() -> None:
    config._told.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = wrapped(
            plain_model(),
            keep_fp8_transpose_cache=True,
            fsdp_double_buffer=True,
            fsdp_db_use_persist_buf_on_alloc_fail=True,
            disable_symmetric_registration=True,
        )
    told = {str(one.message).partition(" ")[0] for one in caught if "changes nothing" in str(one.message)}
    assert told == {
        "keep_fp8_transpose_cache",
        "fsdp_db_use_persist_buf_on_alloc_fail",
        "disable_symmetric_registration",
    }
    assert model.ddp_config.fsdp_double_buffer
    assert model.data_parallel_sharding_strategy == "optim_grads_params"
    assert shard(plain_model(), maxpool_double_buffer=True).ddp_config.fsdp_double_buffer
    assert not shard(plain_model()).ddp_config.fsdp_double_buffer
    assert model.get_distributed_index() is model.dist_index


@on_ranks(2)
def test_places_in_state_dicts() -> None:
    def told(state: dict[str, Any]) -> list[bool]:
        tensors = [value for value in state.values() if isinstance(value, DTensor)]
        assert tensors
        return [hasattr(value._local_tensor, "__create_chunk_list__") for value in tensors]

    assert all(told(shard(plain_model()).state_dict()))
    assert not any(told(shard(plain_model(), preproc_state_dict_for_dcp_ckpt=False).state_dict()))
    for tells in (True, False):
        module = plain_model()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        model, _ = fully_shard(module, optimizer, fsdp_unit_modules=[Block], preproc_state_dict_for_dcp_ckpt=tells)
        assert set(told(model.state_dict())) == {tells}
        # Complete before the first step, or as torch has it.
        assert bool(optimizer.state_dict()["state"]) == tells


@on_ranks(2)
def test_gradients_by_hand() -> None:
    model = shard(plain_model(), sync_model_each_microbatch=False)
    model(batch(0, dist.get_rank())).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
    model.attach_grad_to_optimizer_state()
    assert all(p.grad is not None for p in model.parameters() if p.numel() > 0 and p.to_local().numel() > 0)


@on_ranks(2)
def test_the_first_unit_is_gathered_at_once() -> None:
    for at_once in (True, False):
        mesh_options: dict[str, Any] = {
            "ddp_config": DistributedDataParallelConfig(
                data_parallel_sharding_strategy="optim_grads_params",
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                fsdp_all_gather_in_start_param_sync=at_once,
            ),
            "fsdp_unit_modules": [Block],
        }
        model = wrapped(plain_model(), **mesh_options)
        model(batch(0, dist.get_rank())).square().mean().backward()
        model.synchronize_param_gather()
        model.install_optimized_model_weights()
        before = libfsdp.wire_stats(model.module)["all_gathers"]
        model.start_param_sync()
        assert libfsdp.wire_stats(model.module)["all_gathers"] - before == int(at_once)


@on_ranks(4)
def test_ranks_by_name() -> None:
    """On (outer, shard) = (2, 2) ranks, of which the inner dimension cuts first."""
    mesh = init_device_mesh(device.TYPE, (2, 2), mesh_dim_names=("outer", "shard"))
    both = mesh[("outer", "shard")]._flatten("both").get_group()
    index = FSDPDistributedIndex(
        mesh, dp_shard_dim="shard", dp_outer_dim="outer", hybrid_fsdp_group=both, hsdp_outer_dp_shard=True
    )

    def ranks_in(group: dist.ProcessGroup | None) -> list[int]:
        assert group is not None
        return dist.get_process_group_ranks(group)

    outer, inner = mesh.get_local_rank("outer"), mesh.get_local_rank("shard")
    assert index.get_root_mesh() is mesh
    assert index.get_root_mesh(is_expert_parallel=True) is None
    assert ranks_in(index.get_fsdp_group()) == [2 * outer, 2 * outer + 1]
    assert ranks_in(index.get_outer_fsdp_group()) == [inner, 2 + inner]
    assert ranks_in(index.get_dp_group()) == [0, 1, 2, 3]
    assert index.get_fsdp_group(independent_all_gather=True) is None
    assert tuple(index.data_parallel_mesh().mesh_dim_names or ()) == ("outer", "shard")
    assert index.get_submesh("shard").size() == 2
    assert index.get_submesh(("outer", "shard")).shape == (2, 2)
    assert index.tensor_parallel_mesh() is None
    with pytest.raises(ValueError, match="not all dimensions"):
        index.get_submesh("tp")
    plain = FSDPDistributedIndex(mesh, dp_shard_dim="shard", dp_outer_dim="outer", hybrid_fsdp_group=both)
    with pytest.raises(ValueError, match="not sharded over the outer dimension"):
        plain.get_logical_hybrid_fsdp_rank()
    # The piece that the index names is the one that this rank has.
    model = fully_shard_model(
        nn.Linear(2, 8, bias=False),
        device_mesh=mesh,
        dp_shard_dim="shard",
        dp_outer_dim="outer",
        hybrid_fsdp_group=both,
        outer_dp_sharding_strategy=1,
    )
    with torch.no_grad():
        piece = next(model.parameters())
        assert isinstance(piece, DTensor)
        piece.to_local().fill_(dist.get_rank())
        row = index.get_logical_hybrid_fsdp_rank() * 2
        assert whole(piece)[row, 0] == dist.get_rank()
    assert index.get_logical_hybrid_fsdp_rank() == [0, 2, 1, 3][dist.get_rank()]
