"""Megatron-FSDP's sharding of single modules, as on the peer's main branch: placements determine what is sharded."""

from libfsdp.megatron.experimental.checkpoint import load_checkpoint, save_checkpoint
from libfsdp.megatron.experimental.fully_shard import Placements, fully_shard, fully_shard_context, microbatch
from libfsdp.megatron.experimental.optimizer import fully_shard_optimizer

__all__ = [
    "Placements",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_optimizer",
    "load_checkpoint",
    "microbatch",
    "save_checkpoint",
]
