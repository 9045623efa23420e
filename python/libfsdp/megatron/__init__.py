"""The names of NVIDIA's Megatron-FSDP over libfsdp's engine, on CPU and GPU."""

import torch.distributed.checkpoint  # noqa: F401  # programs find it in torch.distributed after the peer's import

from libfsdp.megatron._class import MegatronFSDP
from libfsdp.megatron._config import DistributedDataParallelConfig, ShardingStrategy
from libfsdp.megatron._functions import fully_shard, fully_shard_model, fully_shard_optimizer
from libfsdp.megatron._index import FSDPDistributedIndex
from libfsdp.megatron._policy import MixedPrecisionPolicy

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "ShardingStrategy",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
]
