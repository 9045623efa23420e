"""Buffers of collectives in memory that belongs to a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libfsdp._state import ShardState


def use_memory_of_group(state: ShardState, *, enable: bool) -> None:
    """The buffers of the unit's model come from a process group's allocator, if one of its groups has one.

    Raises:
        AssertionError: if the unit has collectives of the user's own, which bring their memory.
    """
    _refuse_custom(state, "set_allocate_memory_from_process_group_for_comm")
    state.memory_of_group = enable
    if state.model is not None:
        state.model.choose_memory()


def refuse_symmetric_memory(state: ShardState) -> None:
    """Says why the unit's buffers can't lie in symmetric memory."""
    _refuse_custom(state, "set_symm_mem_for_comm")
    device = state.mesh.device
    backend = state.mesh.shard_mesh.get_group()._get_backend(device).name()
    raise NotImplementedError(
        f"set_symm_mem_for_comm: symmetric memory needs NCCL on CUDA, and buffers that libfsdp does not make yet; the unit's "
        f"backend is {backend} on {device.type}; leave the call out"
    )


def _refuse_custom(state: ShardState, method: str) -> None:
    for collectives in state.mesh.collectives:
        custom = collectives.custom_all_gather or collectives.custom_reduce_scatter
        if state.mesh.is_own and custom is not None:
            raise AssertionError(f"cannot call {method}() when a collective is custom: {type(custom).__name__}")
