"""fully_shard of single modules, with a strategy by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libfsdp._comm.mesh import default_mesh, device_of
from libfsdp._core.shard import shard
from libfsdp._core.sharded_parameter import identity_of
from libfsdp.megatron._config import strategy_of
from libfsdp.megatron._mixin import own_parameters, require_quiet
from libfsdp.megatron._parameter_groups import groups_of
from libfsdp.megatron._policy import MixedPrecisionPolicy
from libfsdp.megatron.v2._fsdp_module import FSDPModule
from libfsdp.megatron.v2._meta import materialize

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    sharding_strategy: str | int = "optim_grads_params",
    gradient_scaling_factor: float | None = None,
    enable_unshard_prefetch: bool = True,
    enable_async_reduce_grad: bool = True,
    reshard_after_forward: bool = True,
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shards a module's parameters, except for those of modules below it that were sharded before. In place.

    Peer: ``megatron_fsdp.v2.fully_shard``. Called on inner modules first, and on the root last. Modules on the meta device get
    their values here, by ``reset_parameters``: those of the first rank count.

    Args:
        module: the module that becomes a unit.
        mesh: one dimension to shard over, or two: the first replicates. By default all ranks.
        mp_policy: dtypes; by default the weights that are trained are fp32.
        sharding_strategy: "no_shard", "optim", "optim_grads", "optim_grads_params", or 0 to 3.
        gradient_scaling_factor: the factor of the sums of the ranks' gradients. None: one over the number of ranks.
        enable_unshard_prefetch: whether the next module's parameters are gathered while one computes. The value of the root's call counts.
        enable_async_reduce_grad: whether reductions overlap with backward. Otherwise each ends before backward continues. The value of the
            root's call counts.
        reshard_after_forward: False keeps parameters gathered until backward has used them.
        ignored_params: parameters that stay as they are.

    Returns:
        The module, whose class is an :class:`FSDPModule`, too.

    Raises:
        ValueError: for a module that is sharded already, an unknown strategy, a factor that is not positive, and modules on meta
            without ``reset_parameters``.
        RuntimeError: if modules below it are in use: gathered, or with gradients that are not reduced.
    """
    if isinstance(module, FSDPModule):
        raise ValueError(f"{type(module).__name__} is sharded already: call fully_shard once for each module")
    if gradient_scaling_factor is not None and not gradient_scaling_factor > 0:
        raise ValueError(
            f"gradient_scaling_factor is {gradient_scaling_factor}: give a positive number, or None for the mean"
        )
    strategy = strategy_of("sharding_strategy", sharding_strategy)
    require_quiet(module, "fully_shard")
    mesh = mesh or default_mesh()
    policy = mp_policy or MixedPrecisionPolicy()
    materialize(module, mesh, device_of(mesh))
    ignored = ignored_params or set()
    named = {name: p for name, p in own_parameters(module).items() if p not in ignored}
    policy.warn_of_low_gradients(named.values())
    names = {name: identity_of(p) for name, p in named.items()}
    options = policy.sharding_options(reshard_after_forward=reshard_after_forward, placements=strategy.placements)
    shard(module, mesh, options, FSDPModule, ignored_params=ignored_params)
    assert isinstance(module, FSDPModule)
    for state in module._states(recurse=False):
        state.engine_options.prefetch_depth = 1 if enable_unshard_prefetch else 0
        state.engine_options.overlaps_reductions = enable_async_reduce_grad
        if state.unit is not None and gradient_scaling_factor is not None:
            state.unit.gradient_divide_factor = 1 / gradient_scaling_factor
    module._fsdp_param_groups = groups_of(module, names)
    return module
