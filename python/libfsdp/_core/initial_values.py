"""Checks that the initial values, of which each rank takes its own rows, were the same on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from libfsdp import _C
from libfsdp._core.sharded_parameter import local_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from libfsdp._comm.mesh import ShardingMesh
    from libfsdp._core.sharded_parameter import ShardedParameter

_SAMPLED = 64  # the number of elements of each parameter, spread over it, that are compared


class InitialValues:
    """Samples of the unsharded values that a rank had when a unit was sharded."""

    def __init__(self, values: Sequence[nn.Parameter], parameters: Sequence[ShardedParameter]) -> None:
        """Takes the samples."""
        # By identity: the checksum of the sample, the parameter that got this rank's rows, and its version then.
        self._taken = {
            parameter.identity: (
                _C.checksum(local_of(value), _SAMPLED),
                parameter.sharded,
                _version_of(parameter.sharded),
            )
            for value, parameter in zip(values, parameters, strict=True)
            if not value.is_meta and not parameter.extended and type(local_of(value)) in (torch.Tensor, nn.Parameter)
        }

    def untouched(self, parameters: Sequence[ShardedParameter]) -> list[int]:
        """Returns a checksum for each parameter; 0 for those that had no values, or were written since (loaded, broadcast, trained)."""
        found = []
        for parameter in parameters:
            checksum, sharded, version = self._taken.get(parameter.identity, (0, None, 0))
            is_untouched = parameter.sharded is sharded and _version_of(sharded) == version
            found.append(checksum if is_untouched else 0)
        return found

    def forget(self) -> None:
        """Drops the samples after they were compared."""
        self._taken = {}


def compare(ranks: ShardingMesh, values: Sequence[nn.Parameter], parameters: Sequence[ShardedParameter]) -> None:
    """Raises Error on all ranks if their values differ. Collective."""
    lines = [
        f"parameter '{parameter.name}' is not compared"
        if value.is_meta or parameter.extended
        else f"parameter '{parameter.name}' with the checksum {_C.checksum(local_of(value), 0):x}"
        for value, parameter in zip(values, parameters, strict=True)
    ]
    ranks.engine_mesh.compare("\n".join(lines), of_values=True)


def _version_of(parameter: nn.Parameter) -> int:
    return parameter._version + local_of(parameter)._version
