"""Shards a module: the function behind every front end's fully_shard."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem, _get_registry
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _get_root_modules

from libfsdp._comm.mesh import default_mesh, sharding_mesh
from libfsdp._core.arguments import check_functions, check_ignored, check_mesh, check_module
from libfsdp._core.forward_hooks import ForwardHooks
from libfsdp._core.function_calls import outside_inference
from libfsdp._core.late_registrations import mark_ignored
from libfsdp._core.model import MemberState, state_of
from libfsdp._core.placement import placement_of
from libfsdp._core.sharded_parameter import ManagedParameter, Place
from libfsdp._core.sharding_options import check_options, check_reshard_after_forward, divides_by_all
from libfsdp._core.spmd import spmd_mesh
from libfsdp._core.warnings import tell_of_early_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import DataParallelMeshDims

    from libfsdp._comm.mesh import ShardingMesh
    from libfsdp._core.sharding_options import ShardingOptions

_classes: dict[tuple[type[nn.Module], type], type[nn.Module]] = {}


@outside_inference
def shard(
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh | None,
    options: ShardingOptions,
    module_class: type[Any],
    *,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shards the parameters of a module that no earlier call has taken, in place. Raises what libfsdp.fully_shard raises.

    Args:
        module: see libfsdp.fully_shard, as for the arguments that are not listed here.
        module_class: libfsdp.FSDPModule or a class derived from it, which the module gets in addition to its own. It names the class of
            states (`_state_class`) and what its classes of modules begin with (`_class_prefix`).

    Returns:
        The given module or modules.
    """
    check_module(module)
    check_mesh(mesh)
    check_functions(shard_placement_fn=shard_placement_fn)
    ignored = check_ignored(ignored_params)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")
    mesh = mesh or default_mesh()
    cuts = True
    if dp_mesh_dims is not None:
        spmd = spmd_mesh(mesh, dp_mesh_dims)
        if isinstance(options.reshard_after_forward, int) and not isinstance(options.reshard_after_forward, bool):
            raise NotImplementedError("reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)")
        mesh, cuts, options = spmd.data_parallel_mesh(), bool(spmd.shard), replace(options, spmd=spmd)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    ranks = sharding_mesh(mesh, shards=cuts)
    check_options(options, ranks)
    modules = (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(list(module)))
    for one in modules:
        if state_of(one) is not None:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard has already been "
                f"applied to the following module:\n{one}"
            )
    managed = _managed_modules(modules)
    parameters = _managed_parameters(managed, ignored)
    shards = [one.places[0].name for one in parameters if hasattr(one.value, "_libfsdp_shard")]
    if shards:
        raise ValueError(
            f"parameters {shards} are shards of a module around this one: call fully_shard for inner modules first, and for outer ones "
            "after them"
        )
    tell_of_early_hooks([(one.places[0].name, one.value) for one in parameters])
    _move_to_device(managed, parameters, ranks.device)
    _make_states(modules, parameters, shard_placement_fn, ranks, options, module_class._state_class)
    mark_ignored(managed, [place for one in parameters for place in one.places])
    for one in managed:
        # As in FSDP2, for torch.compile: not if all that is below a module is ignored.
        if not ignored or any(True for _ in one.buffers()) or any(p not in ignored for p in one.parameters()):
            one._is_fsdp_managed_module = True
            one._fsdp_use_orig_params = True
    for one in modules:
        # Other composable functions of torch (replicate) leave such modules alone.
        one.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()
        key = (type(one), module_class)
        if key not in _classes:
            _classes[key] = type(f"{module_class._class_prefix}{type(one).__name__}", (module_class, type(one)), {})
        one.__class__ = _classes[key]
    return module


def _managed_modules(roots: tuple[nn.Module, ...]) -> list[nn.Module]:
    """Returns the modules whose parameters belong to the unit: those below the roots that belong to no other call."""
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if "replicate" in (_get_registry(module) or {}):
            return
        if module not in roots and state_of(module) is not None:
            return
        seen.add(module)
        for child in module.children():
            if child not in seen:
                visit(child)
        found.append(module)

    for root in roots:
        visit(root)
    return found


def _managed_parameters(modules: list[nn.Module], ignored: set[nn.Parameter]) -> list[ManagedParameter]:
    places: dict[nn.Parameter, list[Place]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            if parameter.ndim == 0:
                raise ValueError(
                    "fully_shard doesn't support scalar parameters. "
                    f"Change {name} to a 1D tensor with numel equal to 1."
                )
            if not parameter.is_contiguous():
                raise NotImplementedError(
                    f"FSDP does not support non-contiguous parameters yet: {parameter.shape=} {parameter.stride()=}"
                )
            places.setdefault(parameter, []).append(Place(module, name))
    return [ManagedParameter(parameter, where) for parameter, where in places.items()]


def _move_to_device(modules: list[nn.Module], parameters: list[ManagedParameter], device: torch.device) -> None:
    """Moves parameters and buffers to the mesh's device, except for those on meta."""
    for parameter in (one.value for one in parameters):
        if parameter.device == device or parameter.is_meta:
            continue
        if isinstance(parameter, DTensor):
            raise ValueError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh "
                f"but got {parameter.device_mesh.device_type} for DTensor and {device.type} for FSDP"
            )
        parameter.data = parameter.to(device)
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.to(device)


def _make_states(
    modules: tuple[nn.Module, ...],
    parameters: list[ManagedParameter],
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    ranks: ShardingMesh,
    options: ShardingOptions,
    state_class: type[MemberState],
) -> None:
    """Makes a state for the parameters that are cut over the same ranks, attaches it to the modules, and registers its hooks.

    The state of the call's own ranks is the last one, which knows the others. It is made even if it has no parameters.
    """
    groups = {(id(ranks.engine_mesh), options.outer_sharded): (ranks, list[ManagedParameter]())}
    for one in parameters:
        own, dim = placement_of(shard_placement_fn, ranks, one.value)
        even = options.outer_placements != "optim_if_even" or divides_by_all(own, one.value, dim)
        _, group = groups.setdefault((id(own.engine_mesh), options.outer_sharded and even), (own, []))
        group.append(one._replace(shard_dim=0 if options.is_replicated else dim))
    if len(groups) > 1 and options.spmd is not None:
        raise NotImplementedError("ShardPlacementResult is not supported together with dp_mesh_dims")
    companions: tuple[MemberState, ...] = ()
    first, *others = groups.items()
    for group_key, (own, group) in (*others, first):
        check_reshard_after_forward(options.reshard_after_forward, own)
        of_group = options if group_key[1] else replace(options, outer_placements="no_shard")
        is_last = group_key == first[0]
        state = state_class(modules, own, group, of_group, companions if is_last else ())
        state.attach()
        ForwardHooks(state).register()
        companions = (*companions, state)
