"""Meshes for plans, whose ranks need not exist."""

from __future__ import annotations

from dataclasses import dataclass

from libfsdp import _C
from libfsdp._core.arguments import refuse


@dataclass(frozen=True)
class PlannedMesh:
    """Ranks that need not exist.

    Attributes:
        ranks: the number of ranks that shard.
        replicas: the size of the mesh's first dimension, if it has two (HSDP, HFSDP).
        ranks_per_host: the number of consecutive ranks on each host; 0 if all are on one.
        device_type: "cuda" (NCCL) or "cpu" (Gloo).
        shared_memory: on CPUs, whether ranks of a host read each other's memory.
        rank: the rank that is planned. Where rows do not divide by the ranks, the last ones have less.
    """

    ranks: int
    replicas: int = 1
    ranks_per_host: int = 0
    device_type: str = "cuda"
    shared_memory: bool = True
    rank: int = 0

    def __post_init__(self) -> None:
        """Raises TypeError and ValueError for numbers of ranks that can't be."""
        for name, least in (("ranks", 1), ("replicas", 1), ("ranks_per_host", 0), ("rank", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                refuse(f"PlannedMesh: {name}", value, "a whole number")
            if value < least:
                raise ValueError(f"PlannedMesh: {name} is {value}: give {least} or more")
        if self.rank >= self.ranks * self.replicas:
            raise ValueError(f"PlannedMesh: there is no rank {self.rank} of {self.ranks * self.replicas}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of its dimensions: those that replicate, if there are replicas, and those that shard."""
        return (self.ranks,) if self.replicas == 1 else (self.replicas, self.ranks)

    def of_engine(self) -> _C.DeviceMesh:
        """Returns it as the engine's mesh."""
        return _C.planned_mesh(
            self.device_type,
            ["shard"] if self.replicas == 1 else ["replicate", "shard"],
            list(self.sizes),
            ranks_per_host=self.ranks_per_host,
            shared_memory=self.shared_memory,
            rank=self.rank,
        )


class Sizes(tuple[int, ...]):
    """The sizes of a mesh, where options are checked against one that need not exist."""

    @property
    def ndim(self) -> int:
        return len(self)

    def size(self, dim: int) -> int:
        return self[dim]
