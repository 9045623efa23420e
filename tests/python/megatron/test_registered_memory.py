"""nccl_ub: buffers in pools of NCCL's memory, registered with the groups. Gloo, with what NCCL's backend has for it, stands in."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.megatron import batch, plain_model, shard
from torch import nn

import libfsdp
from libfsdp._comm import mesh as mesh_module
from libfsdp._comm.registered_memory import RegisteredMemory
from libfsdp._core.model import state_of
from libfsdp.megatron import fully_shard_optimizer

pytestmark = pytest.mark.filterwarnings("ignore:nccl_ub changes nothing here")


class Pool:
    """As torch.cuda.MemPool."""

    made: ClassVar[list[Pool]] = []

    def __init__(self, allocator: str = "ordinary memory") -> None:
        self.allocator = allocator
        self.allocations = 0
        Pool.made.append(self)


@contextmanager
def use_mem_pool(pool: Pool, device: torch.device) -> Iterator[None]:
    pool.allocations += 1
    yield


class Backend:
    """Gloo's, which remembers what is registered with it: (pool's number, whether as windows, allocations so far)."""

    has_memory = True
    all: ClassVar[dict[int, Backend]] = {}
    fails = False

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.registered: list[tuple[int, bool]] = []
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return Backend.has_memory

    @property
    def mem_allocator(self) -> str:
        if not Backend.has_memory:
            raise RuntimeError("NCCL mem allocator is not supported in this NCCL version")
        return "NCCL's allocator"

    def register_mem_pool(self, pool: Pool, symm: bool = False) -> None:
        self.calls += 1
        self.registered.append((Pool.made.index(pool), symm))

    def deregister_mem_pool(self, pool: Pool) -> None:
        if Backend.fails:
            raise RuntimeError("the group has gone")
        self.registered = [entry for entry in self.registered if entry[0] != Pool.made.index(pool)]


@contextmanager
def nccl(version: tuple[int, int, int] = (2, 28, 3)) -> Iterator[None]:
    """Within it, groups have such backends."""
    Pool.made, Backend.all, Backend.fails, Backend.has_memory = [], {}, False, True
    of_group = dist.ProcessGroup._get_backend

    def backend_of(self: Any, device: Any) -> Backend:
        backend = of_group(self, device)
        return Backend.all.setdefault(id(backend), Backend(backend))

    with pytest.MonkeyPatch.context() as patch:
        world = mesh_module._own_world()
        patch.setattr(world, "meshes", {})
        patch.setattr(dist.ProcessGroup, "_get_backend", backend_of)
        patch.setattr(torch.cuda, "MemPool", Pool)
        patch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
        patch.setattr(torch.cuda.nccl, "version", lambda: version)
        yield


def with_calls() -> list[Backend]:
    return [backend for backend in Backend.all.values() if backend.calls > 0]


def train_step(model: Any, optimizer: Any, step: int) -> float:
    loss = model(batch(step, dist.get_rank())).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def trainee(**options: Any) -> tuple[Any, Any]:
    model = shard(plain_model(), **options)
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


@pytest.mark.parametrize(
    ("size", "kind", "options", "version", "windows", "has_memory"),
    [
        (2, "fsdp", {}, (2, 27, 0), True, True),
        (4, "hsdp", {}, (2, 27, 0), True, True),
        # No windows where they are turned off, and where NCCL has none.
        (2, "fsdp", {"disable_symmetric_registration": True}, (2, 28, 3), False, True),
        (2, "fsdp", {}, (2, 26, 5), False, True),
        # Where NCCL has no memory of its own, as on a GPU without multicast.
        (2, "fsdp", {}, (2, 28, 3), False, False),
    ],
)
@on_ranks("size")
def test_pools_are_registered_with_all_groups(
    kind: str, options: dict[str, Any], version: tuple[int, int, int], windows: bool, has_memory: bool
) -> None:
    model, optimizer = trainee(kind=kind)
    expected = [train_step(model, optimizer, step) for step in range(4)]
    with nccl(version):
        Backend.has_memory = has_memory
        model, optimizer = trainee(kind=kind, nccl_ub=True, **options)
        assert Pool.made == [], "nothing is registered before there is an engine"
        losses = [train_step(model, optimizer, 0)]
        assert [pool.allocator for pool in Pool.made] == ["NCCL's allocator" if has_memory else "ordinary memory"] * 2
        assert [backend.registered for backend in with_calls()] == [[(0, windows), (1, False)]] * (
            1 if kind == "fsdp" else 2
        )
        assert all(pool.allocations > 0 for pool in Pool.made)
        losses += [train_step(model, optimizer, step) for step in (1, 2)]
        before = [pool.allocations for pool in Pool.made]
        losses.append(train_step(model, optimizer, 3))
        assert [pool.allocations for pool in Pool.made] == before, "blocks are used again"
        assert losses == expected
        model.param_and_grad_buffer.manual_buffer_registration()
        assert all(backend.calls == 2 for backend in with_calls()), "once"


@pytest.mark.parametrize("early", [False, True])
@on_ranks(2)
def test_manual_registration(early: bool) -> None:
    with nccl():
        model, optimizer = trainee(nccl_ub=True, fsdp_manual_registration=True)
        if early:  # before there is an engine: as soon as there is one
            model.manual_buffer_registration()
        train_step(model, optimizer, 0)
        assert all(pool.allocations > 0 for pool in Pool.made), "buffers lie there from the first step on"
        assert len(with_calls()) == int(early)
        model.manual_buffer_registration()
        train_step(model, optimizer, 1)
        assert [backend.registered for backend in with_calls()] == [[(0, True), (1, False)]]


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2)
def test_pools_go_with_the_model(fails: bool) -> None:
    """Also where their group has gone before."""
    with nccl():
        model = libfsdp.fully_shard(nn.Linear(4, 4))
        state = state_of(model)
        assert state is not None
        state.engine_options.buffers = RegisteredMemory(state.mesh.device, symmetric=True, manually=False)
        model(torch.ones(2, 4)).sum().backward()
        assert [len(backend.registered) for backend in with_calls()] == [2]
        Backend.fails = fails
        del model, state
        gc.collect()
        assert [len(backend.registered) for backend in with_calls()] == [2 if fails else 0]


@on_ranks(2)
def test_only_where_it_is_asked_for() -> None:
    with nccl():
        model, optimizer = trainee(fsdp_double_buffer=True)
        train_step(model, optimizer, 0)
        assert Pool.made == []
