"""The ranks that save or load a checkpoint together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from libfsdp import _C
from libfsdp._comm.mesh import new_host_mesh, sharding_mesh
from libfsdp._core.model import states_in

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

_T = TypeVar("_T")


def device_of_model(model: nn.Module) -> torch.device:
    """Returns the device on which a sharded model computes.

    Raises:
        ValueError: if it is not sharded.
    """
    for _, state, _ in states_in(model):
        return state.mesh.device
    raise ValueError(f"{type(model).__name__} is not sharded; call fully_shard on it first")


class CheckpointRanks:
    """All ranks of a process group. Its methods are collective."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, *, own: bool) -> None:
        """Connects them.

        Args:
            model: sharded.
            group: None for all ranks.
            own: make connections of its own, for a thread beside training. Collective.
        """
        device = device_of_model(model)
        group = group or dist.distributed_c10d._get_default_group()
        mesh = DeviceMesh.from_group(group, device.type)
        self._ranks = _C.CheckpointRanks(new_host_mesh(mesh) if own else sharding_mesh(mesh).engine_mesh)

    @property
    def ranks(self) -> _C.CheckpointRanks:
        return self._ranks

    @property
    def size(self) -> int:
        return self._ranks.size

    @property
    def index(self) -> int:
        return self._ranks.index

    def run(self, what: str, work: Callable[[], _T]) -> _T:
        """Does the work on each rank, and raises on all ranks if it fails on one.

        Raises:
            Error: on all ranks if the work has raised on one; the message has `what`, and every rank's message.
        """
        result: list[_T] = []
        failure: Exception | None = None
        try:
            result.append(work())
        except _C.CommError:
            raise
        except Exception as error:
            failure = error
        text = None if failure is None else str(failure) or type(failure).__name__
        try:
            self._ranks.agree(text, isinstance(failure, _C.DamageError), what)
        except _C.Error as error:
            raise error from failure
        return result[0]

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Returns every rank's value, which may consist of lists, dictionaries, strings and numbers."""
        return [json.loads(text) for text in self._ranks.exchange(json.dumps(value).encode(), what)]
