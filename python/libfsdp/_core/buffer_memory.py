"""Chooses where the buffers of collectives lie: in memory of the process groups, or in symmetric memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch.distributed._symmetric_memory as symmetric_memory

from libfsdp._C import BufferMemory
from libfsdp._comm import mesh as mesh_module

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from libfsdp._core.model import MemberState

_ASKED_BY = {
    BufferMemory.GROUP: "set_allocate_memory_from_process_group_for_comm",
    BufferMemory.SYMMETRIC: "set_symm_mem_for_comm",
}


def use_memory_of_group(state: MemberState, *, enable: bool) -> None:
    """Takes the buffers of the unit's model from a process group's allocator, if one of its groups has one.

    Raises:
        AssertionError: if the unit has collectives of the user's own, which bring their memory, or symmetric memory.
    """
    _refuse_other(state, BufferMemory.GROUP)
    _use(state, BufferMemory.GROUP if enable else BufferMemory.PROCESS)


def use_symmetric_memory(state: MemberState, backend: Literal["NCCL"]) -> None:
    """Makes the gathers of the unit's model go into the symmetric memory of this backend.

    Raises:
        AssertionError: if the unit has collectives of the user's own, or memory of its process group.
        RuntimeError: where there is no such memory: it needs NCCL, on CUDA.
    """
    _refuse_other(state, BufferMemory.SYMMETRIC)
    require_symmetric_memory(state.mesh.mesh, "set_symm_mem_for_comm")
    symmetric_memory.set_backend(backend)
    _use(state, BufferMemory.SYMMETRIC)


def require_symmetric_memory(mesh: DeviceMesh, asked_by: str) -> None:
    """Raises RuntimeError if the ranks along the last dimension, which shards, can't have it."""
    group = mesh.get_group(mesh.ndim - 1)
    if not mesh_module.is_of(group, "ProcessGroupNCCL", mesh):
        backend = group._get_backend(mesh_module.device_of(mesh)).name()
        raise RuntimeError(
            f"{asked_by}: symmetric memory needs torch's own groups of NCCL on CUDA, but the ranks have a {type(group).__name__} of "
            f"{backend} on {mesh.device_type}; leave it out"
        )


def refuse_custom_collectives(state: MemberState, method: str) -> None:
    """Raises AssertionError if the unit's buffers lie in memory that was asked for."""
    if state.buffer_memory in _ASKED_BY:
        raise AssertionError(f"cannot call {method}() when {_ASKED_BY[state.buffer_memory]}() is in effect")


def _use(state: MemberState, memory: BufferMemory) -> None:
    state.buffer_memory = memory
    if state.model is not None:
        state.model.choose_memory()


def _refuse_other(state: MemberState, memory: BufferMemory) -> None:
    if state.buffer_memory not in (BufferMemory.PROCESS, memory):
        raise AssertionError(f"cannot call {_ASKED_BY[memory]}() when {_ASKED_BY[state.buffer_memory]}() is in effect")
    for collectives in state.mesh.collectives:
        custom = collectives.custom_all_gather or collectives.custom_reduce_scatter
        if state.mesh.is_own and custom is not None:
            raise AssertionError(
                f"cannot call {_ASKED_BY[memory]}() when a collective is custom: {type(custom).__name__}"
            )
