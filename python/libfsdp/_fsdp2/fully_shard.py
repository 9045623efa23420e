"""fully_shard and related functions."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem, _get_registry
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _get_root_modules

from libfsdp._comm.mesh import default_mesh, sharding_mesh
from libfsdp._core.arguments import (
    as_bytes,
    check_flags,
    check_functions,
    check_ignored,
    check_mesh,
    check_module,
    check_policies,
    refuse_shards,
)
from libfsdp._core.function_calls import outside_inference
from libfsdp._core.memory_budget import MemoryBudget, check_budget
from libfsdp._core.model import state_of
from libfsdp._core.placement import ShardPlacementResult, placement_of
from libfsdp._core.precision import MixedPrecisionPolicy
from libfsdp._core.registrations import mark_ignored
from libfsdp._core.sharded_parameter import ManagedParameter, Place
from libfsdp._core.sharding_options import (
    Float8Blocks,
    ShardingOptions,
    check_options,
    check_placements,
    check_reshard_after_forward,
    divides_by_all,
)
from libfsdp._core.spmd import spmd_mesh
from libfsdp._core.warnings import tell_of_early_hooks
from libfsdp._fsdp2.forward_hooks import CALLS, ForwardHooks
from libfsdp._fsdp2.fsdp2_state import FSDP2State
from libfsdp._fsdp2.fsdp_module import FSDPModule
from libfsdp.optim._optimizers import remember

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.tensor import Shard

    from libfsdp._comm.mesh import ShardingMesh
    from libfsdp._core.spmd import SpmdMesh

_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


@outside_inference
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | ShardPlacementResult | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # as FSDP2's; it is frozen
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    placements: str = "optim_grads_params",
    outer_placements: str = "no_shard",
    gather_format: Callable[[nn.Parameter], Float8Blocks | None] | None = None,
    keep_gathered_bytes: int | float | str = 0,
    memory_budget: MemoryBudget | int | float | str | None = None,
    report_nan_in_param_grad: bool = False,
    follow_grad_dtype: bool | None = None,
    main_params_dtype: torch.dtype | None = None,
    main_grads_dtype: torch.dtype | Literal["own"] | None = None,
    check_initial_values: bool = False,
) -> Any:
    """Shards the parameters of a module over the ranks of a mesh, in place.

    Called bottom-up, for each block and then for the root: each call makes one unit of those parameters below the module
    that no earlier call has taken. A unit's parameters are gathered before the module's forward and before its backward, and
    its gradients are reduced when backward has left it. Between steps ``module.parameters()`` are DTensors, for any optimizer
    of torch.

    Args:
        module: the module, or several that make up one unit together. A list is reduced to its outermost modules.
        mesh: one dimension to shard over, or two: the first replicates, the second shards (HSDP). By default all ranks.
        reshard_after_forward: True frees the parameters after forward and gathers them again in backward; False keeps them;
            a number keeps one copy between this many neighbouring ranks. None means True, except for the root, where it
            means False.
        shard_placement_fn: the dimension that a parameter is cut along, as ``Shard(dim)``; None for the first one. A dimension
            other than the first must be divisible by the number of ranks. A :class:`ShardPlacementResult` says over which
            ranks, too: parameters on ranks of their own make up a unit of their own.
        mp_policy: the dtypes of computation and of reductions.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state in host memory; None is the same as the default.
        ignored_params: parameters that stay as they are.
        dp_mesh_dims: the data-parallel dimensions of ``mesh``: those that shard and those that replicate. ``mesh`` is
            then a mesh of all ranks on which the parameters are DTensors already.
        placements: what is sharded: "optim_grads_params" (ZeRO-3), "optim_grads" or "optim" (ZeRO-2, 1), or nothing: "no_shard"
            (ZeRO-0). Without sharding ``module.parameters()`` stay ordinary tensors, each rank has all of them, and gradients are
            averaged over all ranks of the mesh, as by DistributedDataParallel.
        outer_placements: what happens over the first of two dimensions. "no_shard" replicates (HSDP). "optim" also cuts
            shards, and with them gradients and optimizer state, over it (HFSDP); only gathers of parameters stay within
            the second dimension. "optim_if_even" does the same, and replicates parameters whose rows do not divide by
            all ranks.
        gather_format: the format in which gathers send a parameter: :class:`Float8Blocks`, or None for the dtype of the
            computation.
        keep_gathered_bytes: the number of bytes of whole parameters that stay gathered from forward into backward, in
            the units that forward used first. The value of the root's call counts.
        memory_budget: how many bytes of its device each rank may use, as a number, a size such as "60GiB" (60 * 2**30) or
            "60GB" (60 * 10**9), or a :class:`MemoryBudget`. At the first
            forward, it is chosen from a plan which units stay gathered between forward and backward (those that save most
            communication), and, only if nothing else fits, which units recompute, of those that the budget names, and that
            fewer units are gathered ahead. :func:`explain` says what was chosen. If nothing fits, that forward raises ``Error``
            on all ranks, which says by how much, and which option would help. Not together with ``keep_gathered_bytes``. The
            value of the root's call counts.
        report_nan_in_param_grad: whether each backward looks for NaN in gradients, and raises ``Error`` on all ranks
            with the names of parameters, units and ranks. The value of the root's call counts.
        follow_grad_dtype: whether gradients get the ``grad_dtype`` that was set on a parameter before this call, and
            are sent in it unless the policy has a reduce_dtype. None does the same as FSDP2, which follows
            ``grad_dtype`` from torch 2.15 on.
        main_params_dtype: the dtype of the shards that are trained, and with them of optimizer state. Modules compute
            in the dtype that their parameters had, or in the policy's param_dtype. None: shards have the parameters'
            dtype.
        main_grads_dtype: the dtype of the shards' gradients, in which those of several backwards add up. Gradients are
            sent in it unless the policy has a reduce_dtype, and sums are not rounded to the latter. "own" stands for
            the dtype that the parameter had, and None for that of the shards.
        check_initial_values: whether ranks compare the first values of all parameters, and raise ``Error`` if they
            differ. By default, before the first forward they compare 64 elements of each parameter that has not been
            written until then (loaded, broadcast), and warn if these differ.

    Returns:
        The given module or modules, whose class has been changed to one that is also an :class:`FSDPModule`.

    Raises:
        ValueError: for containers without a forward, meshes of other than one or two dimensions, scalar parameters, a
            ``reshard_after_forward`` that does not divide the ranks, options that do not fit each other, a module around which
            another one was sharded before, and without a mesh, if no process group can be initialised.
        NotImplementedError: for uneven cuts along another dimension than the first, parameters that are not contiguous, and
            options that parameters with ``fsdp_pre_all_gather`` can't have.
        AssertionError: if fully_shard was called on the module before.
        TypeError: if an argument is of another type; it is named.
    """
    check_module(module)
    check_mesh(mesh)
    mp_policy, offloads = check_policies(mp_policy, offload_policy)
    check_functions(shard_placement_fn=shard_placement_fn, gather_format=gather_format)
    kept = as_bytes("keep_gathered_bytes", keep_gathered_bytes)
    budget = check_budget(memory_budget)
    check_flags(report_nan_in_param_grad=report_nan_in_param_grad, follow_grad_dtype=follow_grad_dtype or False)
    ignored = check_ignored(ignored_params)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")
    check_placements(placements, outer_placements)
    ranks, spmd = _ranks_of(mesh or default_mesh(), dp_mesh_dims, reshard_after_forward)
    options = ShardingOptions(
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        offload_policy=offloads,
        placements=placements,
        outer_sharded=outer_placements != "no_shard",
        spmd=spmd,
        gather_format=gather_format,
        follow_grad_dtype=follow_grad_dtype,
        keep_gathered_bytes=kept,
        memory_budget=budget,
        report_nan=report_nan_in_param_grad,
        main_params_dtype=main_params_dtype,
        main_grads_dtype=main_grads_dtype,
        check_initial_values=check_initial_values,
    )
    check_options(options, ranks)
    modules = (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(list(module)))
    _refuse_sharded(modules)
    managed = _managed_modules(modules, ignored)
    parameters = _managed_parameters(managed, ignored)
    refuse_shards(parameters)
    tell_of_early_hooks([(one.places[0].name, one.value) for one in parameters])
    _move_to_device(managed, parameters, ranks.device, ignored)
    placed = [(one, *placement_of(shard_placement_fn, ranks, one.value)) for one in parameters]
    _make_states(modules, _grouped(placed, ranks, options, replicates_uneven=outer_placements == "optim_if_even"), options)
    mark_ignored(_managed_modules(modules, set()), [place for one in parameters for place in one.places])
    for one in managed:
        one._is_fsdp_managed_module = True
        one._fsdp_use_orig_params = True
    for one in modules:
        _make_fsdp_module(one)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def _refuse_deepcopy(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def _make_fsdp_module(module: nn.Module) -> None:
    """Changes the class of a sharded module to one that is also an FSDPModule."""
    # Other composable functions of torch (replicate) leave such modules alone.
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()
    cls = type(module)
    if cls not in _sharded_classes:
        _sharded_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _refuse_deepcopy})
    module.__class__ = _sharded_classes[cls]


def _ranks_of(
    mesh: DeviceMesh, dims: DataParallelMeshDims | None, reshard_after_forward: bool | int | None
) -> tuple[ShardingMesh, SpmdMesh | None]:
    """Returns the ranks that shard and replicate, and the mesh of all ranks, if parameters are DTensors on it already."""
    spmd = None
    if dims is not None:
        spmd = spmd_mesh(mesh, dims)
        if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
            raise NotImplementedError("reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)")
        mesh = spmd.data_parallel_mesh()
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    ranks = sharding_mesh(mesh, shards=spmd is None or bool(spmd.shard))
    check_reshard_after_forward(reshard_after_forward, ranks)
    return ranks, spmd


def _refuse_sharded(modules: tuple[nn.Module, ...]) -> None:
    for one in modules:
        if state_of(one) is not None:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard has already been "
                f"applied to the following module:\n{one}"
            )


@dataclass
class _Group:
    """Parameters of one call that make up a unit, because they are cut over the same ranks.

    Attributes:
        ranks: these ranks.
        outer_sharded: whether they are cut over the outer ranks, too.
        parameters: the parameters, each with its dimension.
    """

    ranks: ShardingMesh
    outer_sharded: bool
    parameters: list[ManagedParameter] = field(default_factory=list)


def _grouped(
    placed: list[tuple[ManagedParameter, ShardingMesh, int]],
    ranks: ShardingMesh,
    options: ShardingOptions,
    *,
    replicates_uneven: bool,
) -> list[_Group]:
    """Groups the parameters of a call. The first group is that of the call's own ranks, even if it has no parameters.

    Args:
        placed: the parameters, the ranks over which each is cut, and the dimension.
        ranks: the ranks of the call.
        options: the options of the call.
        replicates_uneven: whether parameters that do not divide by all ranks are not cut over the outer ones.
    """
    groups = [_Group(ranks, options.outer_sharded)]
    for parameter, own, dim in placed:
        outer = options.outer_sharded and (not replicates_uneven or divides_by_all(own, parameter.value, dim))
        for group in groups:
            if group.ranks.engine_mesh is own.engine_mesh and group.outer_sharded == outer:
                break
        else:
            group = _Group(own, outer)
            groups.append(group)
        group.parameters.append(parameter._replace(shard_dim=0 if options.is_replicated else dim))
    if len(groups) > 1 and options.spmd is not None:
        raise NotImplementedError("ShardPlacementResult is not supported together with dp_mesh_dims")
    return groups


def _make_states(modules: tuple[nn.Module, ...], groups: list[_Group], options: ShardingOptions) -> None:
    """Makes a state for each group, that of the call's own ranks last, and attaches it to the modules with its hooks."""
    companions: tuple[FSDP2State, ...] = ()
    for group in (*groups[1:], groups[0]):
        check_reshard_after_forward(options.reshard_after_forward, group.ranks)
        of_group = replace(options, outer_sharded=group.outer_sharded)
        is_last = group is groups[0]
        state = FSDP2State(modules, group.ranks, group.parameters, of_group, companions if is_last else ())
        remember(state)
        state.attach()
        ForwardHooks(state).register()
        companions = (*companions, state)


def _managed_modules(roots: tuple[nn.Module, ...], ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Returns the modules whose parameters belong to the unit: those below the roots that belong to no other call."""
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        registry = _get_registry(module)
        if registry is not None and "replicate" in registry:
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
    if not ignored:
        return found
    return [module for module in found if not _is_ignored(module, ignored)]


def _is_ignored(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    """True if all parameters below the module are ignored."""
    return not any(True for _ in module.buffers()) and all(parameter in ignored for parameter in module.parameters())


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


def _move_to_device(
    modules: list[nn.Module],
    parameters: list[ManagedParameter],
    device: torch.device,
    ignored: set[nn.Parameter],
) -> None:
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


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of a sharded module gather its parameters as forward does. Nothing happens for other modules.

    Raises:
        ValueError: if there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    original = getattr(module, method_name)

    @functools.wraps(original)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        assert state is not None
        hooks = ForwardHooks(state)
        args, kwargs = hooks.pre_forward(self, args, kwargs)
        output = None
        try:
            output = original(*args, **kwargs)
        finally:  # This runs even after a method that raised, so that its module is not left with whole parameters.
            output = hooks.post_forward(self, args, output)
        return output

    CALLS.add(wrapped.__code__)  # type: ignore[attr-defined]
    setattr(module, method_name, types.MethodType(wrapped, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Modules of several roots that run together (pipeline stages) share streams and order of communication.

    They always do: streams belong to process groups, which all modules on the same ranks share, and collectives of the
    same ranks have one order. So this only checks its arguments.

    Raises:
        ValueError: if one of the modules is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"share_comm_ctx expects list of FSDPModules but got {module}")
