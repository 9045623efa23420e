"""fully_shard and related functions."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.distributed.fsdp import OffloadPolicy

from libfsdp._core.forward_hooks import CALLS, ForwardHooks
from libfsdp._core.model import state_of
from libfsdp._core.precision import MixedPrecisionPolicy
from libfsdp._core.shard import shard
from libfsdp._core.sharding_options import make_options
from libfsdp._fsdp2.fsdp_module import FSDPModule

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.tensor import Shard

    from libfsdp._core.memory_budget import MemoryBudget
    from libfsdp._core.placement import ShardPlacementResult
    from libfsdp._core.sharding_options import GatherFormat, GradCommFormat


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
    gather_format: Callable[[nn.Parameter], GatherFormat | None] | None = None,
    grad_comm_format: GradCommFormat | None = None,
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
            other than the first must be divisible by the number of ranks. A :class:`ShardPlacementResult` defines over which
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
        gather_format: the format in which gathers send a parameter: :class:`Float8Blocks`, :class:`Int4Differences`, or None
            for the dtype of the computation.
        grad_comm_format: the format in which messages send gradients, in 8 or 4 bits: :class:`GradCommFormat`, or None for
            the policy's dtype.
        keep_gathered_bytes: the number of bytes of unsharded parameters that stay gathered from forward into backward, in
            the units that forward used first. The value of the root's call counts.
        memory_budget: how many bytes of its device each rank may use, as a number, a size such as "60GiB" (60 * 2**30) or
            "60GB" (60 * 10**9), or a :class:`MemoryBudget`. At the first
            forward, it is chosen from a plan which units stay gathered between forward and backward (those that save most
            communication), and, only if nothing else fits, which units recompute, of those that the budget names, and that
            fewer units are gathered ahead. :func:`explain` returns the choice. If nothing fits, that forward raises ``Error``
            on all ranks, with the missing bytes and an option that would help. Not together with ``keep_gathered_bytes``. The
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
        check_initial_values: whether ranks compare the initial values of all parameters, and raise ``Error`` if they
            differ. By default, before the first forward they compare 64 elements of each parameter that has not been
            written until then (loaded, broadcast), and warn if these differ.

    Returns:
        The given module or modules, whose class has been changed to one that is also an :class:`FSDPModule`.

    Raises:
        Error: for a ``grad_comm_format`` of gradients in float64.
        ValueError: for containers without a forward, meshes of other than one or two dimensions, scalar parameters, a
            ``reshard_after_forward`` that does not divide the ranks, options that do not fit each other, a module around which
            another one was sharded before, and without a mesh, if no process group can be initialised.
        NotImplementedError: for uneven cuts along another dimension than the first, parameters that are not contiguous, and
            options that parameters with ``fsdp_pre_all_gather`` can't have.
        AssertionError: if fully_shard was called on the module before.
        TypeError: if an argument is of another type; it is named.
    """
    options = make_options(
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        placements=placements,
        outer_placements=outer_placements,
        gather_format=gather_format,
        grad_comm_format=grad_comm_format,
        keep_gathered_bytes=keep_gathered_bytes,
        memory_budget=memory_budget,
        report_nan_in_param_grad=report_nan_in_param_grad,
        follow_grad_dtype=follow_grad_dtype,
        main_params_dtype=main_params_dtype,
        main_grads_dtype=main_grads_dtype,
        check_initial_values=check_initial_values,
    )
    return shard(
        module,
        mesh,
        options,
        FSDPModule,
        shard_placement_fn=shard_placement_fn,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
    )


fully_shard.state = state_of  # type: ignore[attr-defined]


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
        finally:  # This runs even after a method that raised, so that its module is not left with unsharded parameters.
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
