"""Ranks take their rows of their own first values: were those the same on all of them?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from libfsdp import _C
from libfsdp._sharded_parameter import local_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from libfsdp._mesh import ShardingMesh
    from libfsdp._sharded_parameter import ShardedParameter

_SAMPLED = 64  # elements of each parameter, spread over it


@dataclass
class _Taken:
    """Of one parameter.

    Attributes:
        checksum: of the sample.
        sharded: the parameter that got this rank's rows.
        version: of it, and of its memory, at that time.
    """

    checksum: int
    sharded: nn.Parameter
    version: int


class FirstValues:
    """Samples of the whole values that a rank had when a unit was sharded."""

    def __init__(self, values: Sequence[nn.Parameter], parameters: Sequence[ShardedParameter]) -> None:
        """Takes them.

        Args:
            values: whole, before sharding.
            parameters: that have this rank's rows of them.
        """
        self._taken = {
            parameter.identity: _Taken(
                _C.checksum(local_of(value), _SAMPLED), parameter.sharded, _version_of(parameter.sharded)
            )
            for value, parameter in zip(values, parameters, strict=True)
            if not value.is_meta and not parameter.extended and type(local_of(value)) in (torch.Tensor, nn.Parameter)
        }

    def untouched(self, parameters: Sequence[ShardedParameter]) -> list[int]:
        """A checksum for each parameter; 0 for those that had no values, or that were written since (loaded, broadcast, trained)."""
        taken_of = [self._taken.get(parameter.identity) for parameter in parameters]
        return [
            taken.checksum
            if taken is not None and parameter.sharded is taken.sharded and _version_of(taken.sharded) == taken.version
            else 0
            for taken, parameter in zip(taken_of, parameters, strict=True)
        ]

    def forget(self) -> None:
        """They were compared."""
        self._taken = {}


def compare(ranks: ShardingMesh, values: Sequence[nn.Parameter], parameters: Sequence[ShardedParameter]) -> None:
    """Raises Error on all ranks if they have other values. Collective."""
    lines = [
        f"parameter '{parameter.name}' is not compared"
        if value.is_meta or parameter.extended
        else f"parameter '{parameter.name}' with the checksum {_C.checksum(local_of(value), 0):x}"
        for value, parameter in zip(values, parameters, strict=True)
    ]
    ranks.engine_mesh.compare("\n".join(lines), of_values=True)


def _version_of(parameter: nn.Parameter) -> int:
    return parameter._version + local_of(parameter)._version
