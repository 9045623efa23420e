"""FSDP2's private names that public programs read of a module's state: the same answers as FSDP2's own, or an error that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.ranks import ComparedRanks, run_both
from support.states import assert_equal
from support.training import installed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import libfsdp


def fields(info: Any) -> Any:
    """What programs read of a mesh_info."""
    if info is None:
        return None
    names = ("shard_mesh_dim", "replicate_mesh_dim", "shard_mesh_size", "shard_mesh_rank", "replicate_mesh_size", "replicate_mesh_rank")
    return type(info).__name__, info.mesh.mesh.tolist(), [getattr(info, name, None) for name in names]


OF_STATES: dict[str, Callable[[Any], Any]] = {
    "_is_root": lambda s: s._is_root,
    "_mp_policy": lambda s: s._mp_policy.param_dtype,
    "_modules": lambda s: [type(m).__name__ for m in s._modules],
    "_device": lambda s: s._device,
    "_training_state": lambda s: s._training_state,
    "_auto_reshard_after_forward": lambda s: s._auto_reshard_after_forward,
    "all_states": lambda s: len(s._state_ctx.all_states),
    "iter_forward_root": lambda s: s._state_ctx.iter_forward_root,
    "is_last_backward": lambda s: s._state_ctx.is_last_backward,
    "groups": lambda s: [s._fsdp_param_group] == s._fsdp_param_groups or (s._fsdp_param_group, s._fsdp_param_groups) == (None, []),
}
OF_GROUPS: dict[str, Callable[[Any], Any]] = {
    "mesh_info": lambda g: fields(g.mesh_info),
    "post_forward_mesh_info": lambda g: fields(g.post_forward_mesh_info),
    "_reshard_after_forward": lambda g: g._reshard_after_forward,
    "modules": lambda g: len(g.modules),
    "device": lambda g: g.device,
    "mp_policy": lambda g: g.mp_policy.reduce_dtype,
    "offload_policy": lambda g: type(g.offload_policy).__name__,
    "_training_state": lambda g: g._training_state,
    "switches": lambda g: (g.reduce_grads, g.all_reduce_grads, g.reshard_after_backward, g.unshard_in_backward),
    "shown": lambda g: (g.is_sharded, g.is_unsharded),
}
OF_PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "_param_fqn": lambda p: p._param_fqn,
    "sizes": lambda p: (p._orig_size, p.sharded_size, p.sharded_param._local_tensor.shape),
    "sharding": lambda p: (p._sharding_spec.placements, p.fsdp_placement, p.is_dtensor),
    "dtypes": lambda p: (p.orig_dtype, p.param_dtype),
    "offload_to_cpu": lambda p: p.offload_to_cpu,
    "mesh_info": lambda p: fields(p.mesh_info),
    "gradient": lambda p: p.sharded_param.grad is not None and bool(p.sharded_param.grad.full_tensor().isnan().any()),
}


def read(model: nn.Module, state_of: Callable[[nn.Module], Any]) -> list[Any]:
    seen: list[Any] = []
    runs = state_of(model)._is_root is not None
    of_parameters = {key: get for key, get in OF_PARAMETERS.items() if runs or key not in ("_param_fqn", "dtypes")}
    for name, module in model.named_modules():
        state = state_of(module)
        seen.append((name, state is None))
        if state is None:
            continue
        seen += [(name, key, get(state)) for key, get in OF_STATES.items()]
        for group in state._fsdp_param_groups:
            seen += [(name, key, get(group)) for key, get in OF_GROUPS.items()]
            seen += [(name, key, get(one)) for one in group.fsdp_params for key, get in of_parameters.items()]
    return seen


def read_all(implementation: str, replicas: int, keeps: int) -> list[Any]:
    """Before the first forward, and after a backward that leaves a NaN in one gradient."""
    with installed(implementation):
        from torch.distributed._composable_state import _get_module_state
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

        world = dist.get_world_size()
        sizes, names = ((world,), ("s",)) if replicas == 1 else ((replicas, world // replicas), ("r", "s"))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        rows = 4 if keeps > 1 else 3  # Neighbours show copies of what divides by the ranks.
        inner = nn.Sequential(nn.Linear(rows, 4), nn.Linear(4, 4))
        model: Any = nn.Sequential(nn.Linear(5, rows), inner, nn.Linear(4, 4), nn.Tanh())
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
        for module in (model[0], model[1]):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=keeps if keeps > 1 else bool(keeps))
        fully_shard(model[3], mesh=mesh)  # without parameters
        fully_shard(model, mesh=mesh)
        assert all((_get_module_state(m) is None) == (_get_module_fsdp_state(m) is None) for m in model.modules())
        seen = read(model, _get_module_fsdp_state)
        model.set_requires_gradient_sync(False)
        model[0].set_unshard_in_backward(False)
        seen += read(model, _get_module_fsdp_state)
        model.set_requires_gradient_sync(True)
        output = model(torch.ones(2, 5))
        seen += read(model, fully_shard.state)
        (output * torch.tensor([torch.nan, 1, 1, 1])).sum().backward()
        return seen + read(model, fully_shard.state)


@pytest.mark.parametrize(("world", "replicas", "keeps"), [(2, 1, 1), (2, 1, 0), (4, 2, 1), (4, 1, 2)])
def test_as_fsdp2(compared_ranks: ComparedRanks, world: int, replicas: int, keeps: int) -> None:
    ours, theirs = run_both(compared_ranks, world, read_all, replicas, keeps)
    assert_equal(ours, theirs)
    assert all(any(one[1:] == ("gradient", True) for one in mine) for mine in ours)


def change(implementation: str) -> list[Any]:
    """As verl and DINOv3 do, and VeOmni before it moves a model."""
    with installed(implementation):
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model)
        state = fully_shard.state(model)
        before = state._fsdp_param_group.post_forward_mesh_info
        state._lazy_init()
        seen: list[Any] = [state._fsdp_param_group.post_forward_mesh_info]
        state._fsdp_param_group.post_forward_mesh_info = before  # the root frees its parameters, too
        inner = fully_shard.state(model[0])
        inner._auto_reshard_after_forward = False
        inner._fsdp_param_group.post_forward_mesh_info = None
        with torch.no_grad():
            model(torch.ones(2, 4))
        seen += [(m._get_fsdp_state()._fsdp_param_group.is_sharded, type(m.weight).__name__) for m in (model[0],)]
        seen.append(state._fsdp_param_group.is_sharded)
        inner._fsdp_param_group._training_state = TrainingState.IDLE
        inner._fsdp_param_group.reshard()
        group = inner._fsdp_param_group
        group.unshard()
        group.wait_for_unshard()
        seen.append((group.is_unsharded, model[0].weight.shape))
        group.reshard()
        model.set_requires_gradient_sync(False)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        seen.append([p.grad is None for p in model.parameters()])
        model.set_requires_gradient_sync(True)
        for one in state._state_ctx.all_states:
            if one._fsdp_param_group:
                one._fsdp_param_group.post_backward()
        state._root_post_backward_final_callback()
        return [*seen, *(p.grad.full_tensor() for p in model.parameters())]


def test_changes_by_private_names(compared_ranks: ComparedRanks) -> None:
    assert_equal(*run_both(compared_ranks, 2, change))


@on_ranks(2)
def test_other_private_names_are_errors() -> None:
    model: Any = libfsdp.fully_shard(nn.Linear(4, 4))
    state = model._get_fsdp_state()
    group = state._fsdp_param_group
    way_out = "docs/migrate/from-fsdp2.md lists what there is"
    for of, name in ((state, "_comm_ctx"), (group, "_all_gather_result"), (group.fsdp_params[0], "_unsharded_param")):
        assert not hasattr(of, name)
        with pytest.raises(AttributeError, match=f"FSDP2's private FSDP.* has a '{name}', libfsdp's does not: {way_out}"):
            getattr(of, name)
        with pytest.raises(AttributeError, match=f"to be set, has a '{name}'"):
            setattr(of, name, None)
    with pytest.raises(AttributeError, match="to be set to other states than IDLE"):
        group._training_state = torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState.FORWARD
    assert group == state._fsdp_param_group
    assert {group: 1}[state._fsdp_param_groups[0]] == 1
