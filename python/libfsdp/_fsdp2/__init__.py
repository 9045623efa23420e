"""FSDP2's interface: fully_shard, the methods of sharded modules, and install()."""
