"""Megatron-FSDP's sharding of single modules, as in the peer's pull request 4435: the name of a strategy determines what is sharded."""

from libfsdp.megatron._policy import MixedPrecisionPolicy
from libfsdp.megatron.v2._fsdp_module import FSDPModule, ParameterNorms
from libfsdp.megatron.v2._fully_shard import fully_shard

FullyShardMixedPrecisionPolicy = MixedPrecisionPolicy

__all__ = ["FSDPModule", "FullyShardMixedPrecisionPolicy", "MixedPrecisionPolicy", "ParameterNorms", "fully_shard"]
