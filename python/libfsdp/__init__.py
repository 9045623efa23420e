"""Fully Sharded Data Parallel training for PyTorch, with its engine in C++."""

import os

import torch

from libfsdp import _build_info, _torch_version

# This check comes before anything loads the extension, which fails with undefined symbols, or crashes, beside another
# torch.
_torch_version.require_same_binaries(
    _build_info.torch_version, torch.__version__, os.path.dirname(os.path.abspath(torch.__file__))
)

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy  # noqa: E402

from libfsdp import _C, optim  # noqa: E402
from libfsdp._C import CommError, Error  # noqa: E402
from libfsdp._checkpoint.folder import best, latest  # noqa: E402
from libfsdp._checkpoint.load import Loaded, load, load_latest, read_rank_extra  # noqa: E402
from libfsdp._checkpoint.phases import PhaseReport  # noqa: E402
from libfsdp._checkpoint.save import AsyncSaver, save  # noqa: E402
from libfsdp._core.gradient_reduction import GradientReductionHandle  # noqa: E402
from libfsdp._core.memory_budget import MemoryBudget  # noqa: E402
from libfsdp._core.placement import ShardPlacementResult  # noqa: E402
from libfsdp._core.precision import MixedPrecisionPolicy  # noqa: E402
from libfsdp._core.sharding_options import Float8Blocks, GradCommFormat, Int4Differences  # noqa: E402
from libfsdp._core.warnings import may_miss_backward_hooks  # noqa: E402
from libfsdp._fsdp2.attend import attend  # noqa: E402
from libfsdp._fsdp2.fsdp_module import FSDPModule, UnshardHandle  # noqa: E402
from libfsdp._fsdp2.fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx  # noqa: E402
from libfsdp._fsdp2.install import install, installed, uninstall  # noqa: E402
from libfsdp._observe.replay_check import ReplayCheck  # noqa: E402
from libfsdp._observe.statistics import (  # noqa: E402
    UnitInfo,
    explain,
    memory_stats,
    reset_peak_memory_stats,
    unit_info,
    wire_stats,
)
from libfsdp._observe.step_report import ExposedWaits, StepReport, step_report  # noqa: E402
from libfsdp._observe.stop_requested import stop_requested  # noqa: E402
from libfsdp._plan.budget_adjustment import adjust_memory_budget  # noqa: E402
from libfsdp._plan.plan import Plan, PlannedUnit, plan  # noqa: E402
from libfsdp._plan.planned_mesh import PlannedMesh  # noqa: E402
from libfsdp._plan.simulation import (  # noqa: E402
    Goodput,
    LinkRate,
    Simulation,
    UnitTime,
    best_checkpoint_interval,
    simulate_failures,
)
from libfsdp._weights.apply_changes import apply_changes  # noqa: E402
from libfsdp._weights.changed_weights import ChangeBucket, ChangedWeights, WeightChange, WeightSnapshot  # noqa: E402
from libfsdp._weights.full_weights import FullWeights, WeightBucket, full_weights  # noqa: E402
from libfsdp._weights.load_weights import load_weights  # noqa: E402
from libfsdp._weights.local_shards import LocalShard, LocalShards, local_shards  # noqa: E402
from libfsdp._weights.transfer import TransferPlan, WantedBox, transfer_plan  # noqa: E402
from libfsdp._weights.weight_source import WeightMetadata, WeightSource  # noqa: E402
from libfsdp.megatron._install import install_megatron, uninstall_megatron  # noqa: E402
from libfsdp.optim._clip_grad_norm import clip_grad_norm_  # noqa: E402
from libfsdp.optim._fused import fuse  # noqa: E402

__version__: str = _C.version

__all__ = [
    "AsyncSaver",
    "CPUOffloadPolicy",
    "ChangeBucket",
    "ChangedWeights",
    "CommError",
    "Error",
    "ExposedWaits",
    "FSDPModule",
    "Float8Blocks",
    "FullWeights",
    "Goodput",
    "GradCommFormat",
    "GradientReductionHandle",
    "Int4Differences",
    "LinkRate",
    "Loaded",
    "LocalShard",
    "LocalShards",
    "MemoryBudget",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PhaseReport",
    "Plan",
    "PlannedMesh",
    "PlannedUnit",
    "ReplayCheck",
    "ShardPlacementResult",
    "Simulation",
    "StepReport",
    "TransferPlan",
    "UnitInfo",
    "UnitTime",
    "UnshardHandle",
    "WantedBox",
    "WeightBucket",
    "WeightChange",
    "WeightMetadata",
    "WeightSnapshot",
    "WeightSource",
    "__version__",
    "adjust_memory_budget",
    "apply_changes",
    "attend",
    "best",
    "best_checkpoint_interval",
    "clip_grad_norm_",
    "explain",
    "full_weights",
    "fully_shard",
    "fuse",
    "install",
    "install_megatron",
    "installed",
    "latest",
    "load",
    "load_latest",
    "load_weights",
    "local_shards",
    "may_miss_backward_hooks",
    "memory_stats",
    "optim",
    "plan",
    "read_rank_extra",
    "register_fsdp_forward_method",
    "reset_peak_memory_stats",
    "save",
    "share_comm_ctx",
    "simulate_failures",
    "step_report",
    "stop_requested",
    "transfer_plan",
    "uninstall",
    "uninstall_megatron",
    "unit_info",
    "wire_stats",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "megatron"])
