"""Weights of a sharded model for other programs: streams, shards by address, transfers, and loads into ordinary modules."""
