"""The options of Megatron-FSDP, and their effects here."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import torch

from libfsdp.megatron._policy import MixedPrecisionPolicy, dtype_of


class ShardingStrategy(IntEnum):
    """The strategies by number. The names are those of libfsdp's placements in capitals."""

    NO_SHARD = 0
    OPTIM = 1
    OPTIM_GRADS = 2
    OPTIM_GRADS_PARAMS = 3

    @property
    def placements(self) -> str:
        """The name of the strategy in libfsdp.fully_shard."""
        return self.name.lower()


def strategy_of(option: str, value: str | int, *, outer: bool = False) -> ShardingStrategy:
    """Returns a strategy by its number or name.

    Raises:
        ValueError: for others, and for an outer strategy that shards more than optimizer state.
    """
    allowed = list(ShardingStrategy)[: 2 if outer else 4]
    for strategy in allowed:
        if value == strategy or value == strategy.placements:
            return strategy
    known = ", ".join(f"{one.value} ('{one.placements}')" for one in allowed)
    raise ValueError(f"{option} is {value!r}: give one of {known}")


@dataclass
class DistributedDataParallelConfig:
    """The options of a :class:`MegatronFSDP`, by the names of Megatron-Core's dataclass.

    Those of Megatron-Core's own DDP, which have no meaning for sharded models, are accepted and have no effect:
    ``gradient_reduce_div_fusion``, ``bucket_size``, ``fp8_param_gather`` and ``fsdp_db_use_persist_buf_on_alloc_fail``.

    Attributes:
        overlap_grad_reduce: with False, each reduction ends before backward continues.
        overlap_param_gather: with False, no parameter is gathered before it is needed.
        check_for_nan_in_grad: whether ``start_grad_sync`` raises if a gradient has NaN or infinity.
        average_in_collective: where the division takes place. It has no effect here: sums are always computed first, and divided in fp32.
        data_parallel_sharding_strategy: a name of :class:`ShardingStrategy`.
        outer_dp_sharding_strategy: "no_shard" or "optim", over the outer dimension.
        suggested_communication_unit_size: the number of elements that may be gathered ahead of their use; None: one unit.
        keep_fp8_transpose_cache: of TransformerEngine's parameters.
        nccl_ub: whether buffers of collectives come from NCCL's allocator. Sets ``fsdp_double_buffer``.
        fsdp_double_buffer: whether buffers stay allocated.
        fsdp_manual_registration: whether ``param_and_grad_buffer.manual_buffer_registration()`` registers them.
        disable_symmetric_registration: without NCCL's windows.
        fsdp_all_gather_in_start_param_sync: whether ``start_param_sync`` gathers the first unit at once.
        megatron_fsdp_main_params_dtype: see :class:`MixedPrecisionPolicy`, also for the next two.
        megatron_fsdp_use_decoupled_grad: whether gradients appear as ``decoupled_grad``, in the dtype in which they add up.
        megatron_fsdp_cuda_graph_mode: whether gathered parameters and gradients keep their addresses.
        megatron_fsdp_enable_fine_grained_param_gather: whether each module with parameters of its own is a unit.
        megatron_fsdp_max_pool_double_buffer: whether units of different sizes share double buffers. Sets ``fsdp_double_buffer``.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    preserve_fp32_weights: bool = True
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    delay_wgrad_compute: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False

    def __post_init__(self) -> None:
        strategy_of("data_parallel_sharding_strategy", self.data_parallel_sharding_strategy)
        strategy_of("outer_dp_sharding_strategy", self.outer_dp_sharding_strategy, outer=True)
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype"):
            option = f"megatron_fsdp_{name}"
            setattr(self, option, dtype_of(option, getattr(self, option)))
        if self.nccl_ub or self.megatron_fsdp_max_pool_double_buffer:
            self.fsdp_double_buffer = True


def adopt(config: Any) -> DistributedDataParallelConfig:
    """Converts the options of another dataclass with these names, such as that of Megatron-Core. Missing options have their defaults."""
    if isinstance(config, DistributedDataParallelConfig):
        return config
    names = [field.name for field in fields(DistributedDataParallelConfig) if hasattr(config, field.name)]
    return DistributedDataParallelConfig(**{name: getattr(config, name) for name in names})


def policy_of(config: Any) -> MixedPrecisionPolicy:
    """Returns the policy for options without ``megatron_fsdp_main_params_dtype``, as older versions of Megatron-Core have them."""
    return MixedPrecisionPolicy(
        main_params_dtype=torch.float32 if config.preserve_fp32_weights else None,
        main_grads_dtype=torch.float32 if config.grad_reduce_in_fp32 else None,
    )


_told: set[str] = set()


def tell_once(option: str, reason: str) -> None:
    """Warns, once per process and option, that an option has no effect here."""
    if option not in _told:
        _told.add(option)
        warnings.warn(f"{option} changes nothing here: {reason}", stacklevel=4)


def tell_of_options_without_effect(
    config: DistributedDataParallelConfig,
    device: torch.device,
    *,
    disable_bucketing: bool,
    quantized: bool,
    groups: dict[str, Any],
) -> None:
    """Warns of options that make only the peer faster, and have no effect here.

    Args:
        quantized: whether parameters are, or may become, TransformerEngine's.
        groups: the groups for gathers alone, by their options.
    """
    reasons = {
        "average_in_collective": "sums are made in fp32 and divided then, which is no less exact",
        "fsdp_db_use_persist_buf_on_alloc_fail": "units of any size share the same slots",
    }
    if device.type == "cpu":
        reasons["nccl_ub"] = "the parameters lie in host memory, where there is no NCCL"
    if not config.nccl_ub:
        reasons |= dict.fromkeys(("fsdp_manual_registration", "disable_symmetric_registration"), "it needs nccl_ub")
    if not quantized:
        reasons["keep_fp8_transpose_cache"] = "no parameter is quantized"
    reasons = {option: reason for option, reason in reasons.items() if getattr(config, option)}
    if disable_bucketing:
        reasons["disable_bucketing"] = "there are no buckets: a unit travels as a whole"
    for option, group in groups.items():
        if group is not None and device.type == "cpu":
            reasons[option] = "on Gloo, gathers and reductions have connections of libfsdp's own"
    for option, reason in reasons.items():
        tell_once(option, reason)
