"""fully_shard_model, fully_shard_optimizer, and both in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libfsdp._comm.mesh import default_mesh
from libfsdp.megatron._class import MegatronFSDP
from libfsdp.megatron._config import DistributedDataParallelConfig, ShardingStrategy, strategy_of
from libfsdp.megatron._index import FSDPDistributedIndex
from libfsdp.megatron._optimizer import complete_state_dicts, exchange_parameters, extend
from libfsdp.megatron._policy import MixedPrecisionPolicy
from libfsdp.megatron.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def fully_shard_model(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    tp_dim: str | None = None,
    hybrid_fsdp_group: dist.ProcessGroup | None = None,
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    fsdp_group_ag: dist.ProcessGroup | None = None,
    expt_fsdp_group_ag: dist.ProcessGroup | None = None,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
    zero_dp_strategy: str | int = 3,
    outer_dp_sharding_strategy: str | int = 0,
    device: torch.device | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # it is frozen
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    sync_model_each_microbatch: bool = True,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    report_nan_in_param_grad: bool = False,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
    disable_symmetric_registration: bool = False,
    fsdp_manual_registration: bool = False,
    enable_fine_grained_param_gather: bool = False,
    use_decoupled_grad: bool = False,
    cuda_graph_mode: bool = False,
    maxpool_double_buffer: bool = False,
) -> MegatronFSDP:
    """Shards a model over the ranks of a mesh.

    Peer: ``megatron_fsdp.fully_shard_model``. Options of the class are described at :class:`MegatronFSDP` and
    :class:`DistributedDataParallelConfig`.

    Args:
        module: a module with ordinary parameters, or tensor-parallel ones.
        device_mesh: the mesh of all ranks, with names; by default, one dimension of all ranks.
        dp_shard_dim: the dimension that shards, which may be a flattened one.
        dp_outer_dim: the dimension that replicates what is sharded (HSDP), or shards optimizer state over it (HFSDP).
        tp_dim: the dimension over which tensor-parallel parameters are cut.
        hybrid_fsdp_group: all ranks of ``dp_outer_dim`` and ``dp_shard_dim``; needed with the former.
        hybrid_fsdp_expt_group: the same for ``expt_device_mesh``.
        expt_device_mesh: the ranks of experts: parameters with ``allreduce=False``.
        fsdp_group_ag: a process group for gathers alone.
        expt_fsdp_group_ag: the same for experts.
        fsdp_unit_modules: classes, or import paths of classes, whose modules are units.
        zero_dp_strategy: 0 to 3, or "no_shard", "optim", "optim_grads", "optim_grads_params".
        outer_dp_sharding_strategy: 0 or 1, or "no_shard", "optim".
        device: the device to which the module is moved first.
        init_model_with_meta_device: parameters on meta get their values by ``reset_parameters``, after sharding.
        mixed_precision_policy: dtypes.
        overlap_grad_reduce: with False, each reduction ends before backward continues.
        overlap_param_gather: with False, no unit is gathered ahead.
        sync_model_each_microbatch: whether parameters have their gradients after each backward.
        preproc_state_dict_for_dcp_ckpt: whether state dicts contain the places of shards, for
            torch.distributed.checkpoint.
        report_nan_in_param_grad: whether each backward raises if gradients have NaN.
        average_in_collective: has no effect: sums are computed in fp32, and then divided.
        disable_bucketing: has no effect: there are no buckets.
        calculate_per_token_loss: whether gradients are added up and not divided.
        keep_fp8_transpose_cache: of TransformerEngine's parameters.
        nccl_ub: buffers from NCCL's allocator; double buffers with it.
        fsdp_double_buffer: buffers stay allocated.
        fsdp_db_use_persist_buf_on_alloc_fail: changes nothing: units of any size share the same slots.
        disable_symmetric_registration: without NCCL's windows.
        fsdp_manual_registration: buffers are registered by ``param_and_grad_buffer.manual_buffer_registration()``.
        enable_fine_grained_param_gather: each module with parameters of its own is a unit.
        use_decoupled_grad: gradients appear as ``decoupled_grad``.
        cuda_graph_mode: parameters and gradients keep their addresses.
        maxpool_double_buffer: double buffers for units of different sizes.

    Returns:
        The module in a :class:`MegatronFSDP`.

    Raises:
        ValueError: for options that do not fit each other, or the mesh.
    """
    if device_mesh is None:
        dp_shard_dim, tp_dim = dp_shard_dim or "fsdp", tp_dim or "tp"
        device_mesh = default_mesh((dp_shard_dim, tp_dim))
        dp_outer_dim, hybrid_fsdp_group = None, None
    strategy = strategy_of("zero_dp_strategy", zero_dp_strategy)
    outer = strategy_of("outer_dp_sharding_strategy", outer_dp_sharding_strategy, outer=True)
    if outer == ShardingStrategy.OPTIM and strategy != ShardingStrategy.OPTIM_GRADS_PARAMS:
        raise ValueError(
            "outer_dp_sharding_strategy='optim' needs zero_dp_strategy 3 ('optim_grads_params'), whose shards it cuts once more, "
            f"not '{strategy.placements}'"
        )
    if outer == ShardingStrategy.OPTIM and dp_outer_dim is None:
        raise ValueError(
            "outer_dp_sharding_strategy='optim' needs dp_outer_dim, a dimension of device_mesh over which it cuts shards once more"
        )
    if (dp_outer_dim is None) != (hybrid_fsdp_group is None):
        raise ValueError(
            f"dp_outer_dim={dp_outer_dim!r} and hybrid_fsdp_group={hybrid_fsdp_group} belong together: give both, or none"
        )
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy.placements,
        outer_dp_sharding_strategy=outer.placements,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        average_in_collective=average_in_collective,
        keep_fp8_transpose_cache=keep_fp8_transpose_cache,
        nccl_ub=nccl_ub,
        fsdp_double_buffer=fsdp_double_buffer,
        fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
        disable_symmetric_registration=disable_symmetric_registration,
        fsdp_manual_registration=fsdp_manual_registration,
        megatron_fsdp_main_params_dtype=mixed_precision_policy.main_params_dtype,
        megatron_fsdp_main_grads_dtype=mixed_precision_policy.main_grads_dtype,
        megatron_fsdp_grad_comm_dtype=mixed_precision_policy.grad_comm_dtype,
        megatron_fsdp_use_decoupled_grad=use_decoupled_grad,
        megatron_fsdp_cuda_graph_mode=cuda_graph_mode,
        megatron_fsdp_enable_fine_grained_param_gather=enable_fine_grained_param_gather,
        megatron_fsdp_max_pool_double_buffer=maxpool_double_buffer,
    )
    model = MegatronFSDP(
        module,
        FSDPDistributedIndex(
            device_mesh,
            dp_shard_dim=dp_shard_dim,
            dp_outer_dim=dp_outer_dim,
            tp_dim=tp_dim,
            hybrid_fsdp_group=hybrid_fsdp_group,
            hybrid_fsdp_expt_group=hybrid_fsdp_expt_group,
            hsdp_outer_dp_shard=outer == ShardingStrategy.OPTIM and dp_outer_dim is not None,
            expt_device_mesh=expt_device_mesh,
            fsdp_group_ag=fsdp_group_ag,
            expt_fsdp_group_ag=expt_fsdp_group_ag,
        ),
        ddp_config=config,
        mixed_precision_policy=mixed_precision_policy,
        fsdp_unit_modules=fsdp_unit_modules,
        disable_bucketing=disable_bucketing,
        device=device,
        calculate_per_token_loss=calculate_per_token_loss,
        init_model_with_meta_device=init_model_with_meta_device,
        sync_model_each_microbatch=sync_model_each_microbatch,
        report_nan_in_param_grad=report_nan_in_param_grad,
    )
    if preproc_state_dict_for_dcp_ckpt and strategy != ShardingStrategy.NO_SHARD:
        model.register_state_dict_post_hook(_tell_where_shards_lie)
    return model


def _tell_where_shards_lie(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    preprocess_state_dict_for_uneven_dtensor(state_dict)


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Extends the step of an optimizer of a MegatronFSDP's parameters, in place.

    Peer: ``megatron_fsdp.fully_shard_optimizer``. ``step`` takes ``sync_grad_before_optimizer_step``: reduce the gradients that backwards
    have left; and ``install_optimized_model_weights``: with False, ``model.install_optimized_model_weights()`` must come before the next
    forward. ``zero_grad`` takes ``zero_grad_buffer``: also drop gradients that are not reduced.

    Args:
        optimizer: an optimizer that was made with ``model.parameters()``.
        preproc_state_dict_for_dcp_ckpt: state dicts are complete, also before the first step, and fit for
            torch.distributed.checkpoint.

    Returns:
        The same object.

    Raises:
        ValueError: if its parameters are not those of one MegatronFSDP.
    """
    model = extend(optimizer)
    if preproc_state_dict_for_dcp_ckpt:
        complete_state_dicts(optimizer, tells_places=model.strategy != ShardingStrategy.NO_SHARD)
    return optimizer


def fully_shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *args: Any,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    **options: Any,
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Runs fully_shard_model and fully_shard_optimizer for an optimizer that was made before with the module's parameters.

    Peer: ``megatron_fsdp.fully_shard``. The optimizer keeps its groups, with the distributed parameters instead of the module's.

    Args:
        module: see :func:`fully_shard_model`.
        optimizer: an optimizer that was made with the module's parameters.
        args: the arguments of :func:`fully_shard_model`, from ``device_mesh`` on.
        preproc_state_dict_for_dcp_ckpt: the option of both functions.
        options: the arguments of :func:`fully_shard_model` by name.

    Returns:
        The model, and the same optimizer.

    Raises:
        ValueError: in the same cases as the two functions, and if the optimizer has parameters that the module does not have, or has
            stepped.
    """
    places = [(inner, name, p) for inner in module.modules() for name, p in inner._parameters.items() if p is not None]
    options["preproc_state_dict_for_dcp_ckpt"] = preproc_state_dict_for_dcp_ckpt
    model = fully_shard_model(module, *args, **options)
    exchange_parameters(optimizer, {id(p): inner.get_parameter(name) for inner, name, p in places})
    fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=preproc_state_dict_for_dcp_ckpt)
    return model, optimizer
