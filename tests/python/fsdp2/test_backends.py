"""The engine over the backends of torch.distributed's groups, as over NCCL: Gloo stands in for it. And memory that a backend gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from support.collectives import all_gather, reduce_scatter
from support.comparison import assert_follows_replica, assert_same_runs
from support.hosts import can_pretend_hosts, pretended_host
from support.marks import on_ranks
from support.ranks import StartRanks
from support.training import Options, Run, train
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import libfsdp
from libfsdp._comm import mesh as mesh_module

bf16, fp32 = torch.bfloat16, torch.float32


def forget_meshes(patch: pytest.MonkeyPatch) -> None:
    """Of this world, for as long as the patch lasts."""
    world = mesh_module._own_world()
    patch.setattr(world, "meshes", {})
    patch.setattr(world, "groups", {})


@contextmanager
def meshes_made_by(make: Any) -> Iterator[None]:
    """Within it, meshes are made anew, and in this way."""
    with pytest.MonkeyPatch.context() as patch:
        forget_meshes(patch)
        patch.setattr(mesh_module, "_make", make)
        yield


def train_over_backends(case: str, options: Options) -> Run:
    with meshes_made_by(mesh_module._over_backends):
        return train(case, "libfsdp", options)


def train_over_messages(case: str, options: Options) -> Run:
    return train(case, "libfsdp", options)


# Sums of two terms have one order, and sums of bf16 are the engine's own: equal to the last bit.
SAME = [
    (2, "transformer", Options()),
    (2, "odd_shapes", Options(reshard=False)),
    (2, "unused", Options(microbatches=2, sync="last")),
    (2, "transformer", Options(compute=bf16, reduce=fp32)),
    (2, "transformer", Options(clip=0.01)),
    (4, "odd_shapes", Options(replicas=2)),
    (4, "transformer", Options(compute=bf16)),
]


@pytest.mark.parametrize(("world", "case", "options"), SAME)
def test_backends_give_the_same_bits(ranks: StartRanks, world: int, case: str, options: Options) -> None:
    ours = ranks(world).run(train_over_backends, case, options)
    assert_same_runs(ours, ranks(world).run(train_over_messages, case, options))


@pytest.mark.parametrize("options", [Options(), Options(reshard=2)])
def test_backends_follow_the_replica_on_four_ranks(ranks: StartRanks, options: Options) -> None:
    """The backend adds four terms in an order of its own. A number for `reshard_after_forward` asks for new groups."""
    assert_follows_replica("mlp", options, ranks(4).run(train_over_backends, "mlp", options))


def model(**options: Any) -> Any:
    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    libfsdp.fully_shard(sharded[0], **options)
    return libfsdp.fully_shard(sharded, **options)


def step(sharded: Any) -> torch.Tensor:
    loss: torch.Tensor = sharded(torch.ones(3, 64) * (1 + dist.get_rank())).square().mean()
    loss.backward()
    return loss.detach()


@on_ranks(2)
def test_backends_move_the_tensors() -> None:
    """Not the engine's own connections, nor memory that ranks share; and who counts collectives sees them."""
    with pytest.MonkeyPatch.context() as patch:
        forget_meshes(patch)
        patch.delenv("FSDP_SHARED_MEMORY", raising=False)  # Which turns it off for all other tests.
        own = model()
    step(own)
    before = libfsdp.wire_stats(own)
    step(own)
    sent = {name: count - before[name] for name, count in libfsdp.wire_stats(own).items()}
    assert sent["shared_memory_bytes"] > 0
    with meshes_made_by(mesh_module._over_backends):
        theirs = model()
        theirs.set_separate_reduce_scatter_group()
        step(theirs)
        stats = libfsdp.wire_stats(theirs)
        assert stats["shared_memory_bytes"] == 0
        assert stats["all_gather_bytes"] == sent["all_gather_bytes"]
        assert stats["reduce_scatter_bytes"] == sent["reduce_scatter_bytes"]
        with CommDebugMode() as counted:
            step(theirs)
        assert counted.get_total_counts() > 0
    for a, b in zip(own.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())  # Of two steps each.


def step_of_a_rank_alone(calls_itself: str, dtype: torch.dtype | None) -> tuple[set[str], list[torch.Tensor]]:
    """What its backend did, as the profiler saw it, and the gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SINGLE_RANK_COLLECTIVES", calls_itself)
        with meshes_made_by(mesh_module._over_backends):
            alone = model(mp_policy=libfsdp.MixedPrecisionPolicy(param_dtype=dtype))
            gradients_of(alone)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
                gradients = gradients_of(alone)
    return {event.name for event in recorded.events() if event.name.startswith("gloo:")}, gradients


@pytest.mark.parametrize(("dtype", "reduction"), [(None, {"gloo:all_reduce"}), (bf16, set())])
def test_a_rank_alone_calls_its_backend_if_told_to(
    ranks: StartRanks, dtype: torch.dtype | None, reduction: set[str]
) -> None:
    """The backend's sums (Gloo has them by an all-reduce), but not those of the engine: a rank sends itself nothing."""
    (silent, expected), *_ = ranks(1).run(step_of_a_rank_alone, "0", dtype)
    assert silent == set()
    (called, gradients), *_ = ranks(1).run(step_of_a_rank_alone, "1", dtype)
    assert called == {"gloo:all_gather"} | reduction
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.skipif(not can_pretend_hosts(), reason="this system refuses mount namespaces")
@on_ranks(8)
def test_backends_reduce_in_two_levels_between_hosts() -> None:
    """Gradients in bf16, on two hosts with four ranks each."""
    policy = libfsdp.MixedPrecisionPolicy(param_dtype=bf16)
    own = model(mp_policy=policy)
    with pretended_host(dist.get_rank() // 4), meshes_made_by(mesh_module._over_backends):
        theirs = model(mp_policy=policy)
        losses = [step(theirs), step(theirs)]
    assert losses[0] == step(own)
    before = libfsdp.wire_stats(own)["reduce_scatter_bytes"]  # Of other models on this mesh, too.
    assert losses[1] == step(own)
    for a, b in zip(own.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())
    # Of each of a shard's elements, seven bf16 values; or, in two levels, two such values to each neighbour and a sum in fp32.
    of_one_level = libfsdp.wire_stats(own)["reduce_scatter_bytes"] - before
    assert 2 * of_one_level * (3 * 4 + 4) == libfsdp.wire_stats(theirs)["reduce_scatter_bytes"] * 14


class WithMemory:
    """A backend with an allocator of its own, which counts its calls."""

    calls = 0

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        WithMemory.calls += 1
        return torch.empty(size, dtype=dtype, device=device)


def gradients_of(sharded: Any) -> list[torch.Tensor]:
    """Of one step."""
    sharded.zero_grad()
    step(sharded)
    return [p.grad.to_local().clone() for p in sharded.parameters()]


@pytest.mark.parametrize("bound", [False, True])
@on_ranks(4)
def test_units_and_models_share_groups(bound: bool) -> None:
    """A GPU's group takes seconds and hundreds of MB: the units and models of a mesh share one for each purpose."""
    made: list[int] = []
    new_group = dist.new_group

    def count(ranks: list[int], **options: Any) -> Any:
        made.append(len(ranks))
        return new_group(ranks, **options)

    default = dist.distributed_c10d._get_default_group()
    with meshes_made_by(mesh_module._over_backends), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", count)
        if bound:
            # As by init_process_group(device_id=): torch splits the default group, which some of its ranks alone can't.
            patch.setattr(default, "bound_device_id", torch.device("cpu", 0))
        for _ in range(2):
            sharded = model(reshard_after_forward=2)
            sharded.set_separate_reduce_scatter_group()
            step(sharded)
        assert made == [2, 4]
        assert default.bound_device_id == (torch.device("cpu", 0) if bound else None)


def keywords_to(name: str, use: Any) -> dict[str, Any]:
    """What `use` gives to a function or class of C++ by keywords."""
    given: dict[str, Any] = {}
    original = getattr(libfsdp._C, name)

    def keep(*arguments: Any, **options: Any) -> Any:
        given.update(options)
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libfsdp._C, name, keep)
        use()
    return given


@on_ranks(2)
def test_time_outs_and_pinned_memory_reach_the_engine() -> None:
    """Messages have less time than the watchdog of NCCL, which ends the process: so an error names the rank that is late. And what shows on
    a CPU in no other way: whether memory of the host is to be pinned."""
    for make, seconds in ((mesh_module._over_store, 120), (mesh_module._over_backends, 108)):
        with meshes_made_by(make):
            assert keywords_to("make_mesh", model)["timeout"] == seconds
    for pinned in (True, False):
        policy = libfsdp.CPUOffloadPolicy(pin_memory=pinned)
        given = keywords_to("ShownUnit", lambda policy=policy: step(model(offload_policy=policy)))
        assert given["pin_memory"] == pinned


@on_ranks(2)
def test_symmetric_memory_is_asked_for() -> None:
    """On a CPU torch has none, so that buffers stay where they are: what the engine and torch are told."""
    expected = gradients_of(model())
    told: list[Any] = []
    symmetric = libfsdp._C.BufferMemory.SYMMETRIC
    set_buffer_memory = libfsdp._C.HookedModel.set_buffer_memory

    def tell(engine: Any, memory: Any) -> None:
        told.append(memory)
        set_buffer_memory(engine, memory)

    with meshes_made_by(mesh_module._over_backends), pytest.MonkeyPatch.context() as patch:
        sharded, early = model(), model()
        step(sharded)
        patch.setattr(libfsdp._C.HookedModel, "set_buffer_memory", tell)
        patch.setattr(symmetric_memory, "set_backend", told.append)
        with pytest.MonkeyPatch.context() as as_nccl:
            as_nccl.setattr(mesh_module, "is_of", lambda group, backend, mesh: backend == "ProcessGroupNCCL")
            sharded.set_symm_mem_for_comm()
            assert told == ["NCCL", symmetric]
            early[0].set_symm_mem_for_comm("NCCL")  # Before the engine is there.
            assert told == ["NCCL", symmetric, "NCCL"]
        for refused in (
            lambda: sharded.set_allocate_memory_from_process_group_for_comm(True),
            lambda: sharded.set_custom_reduce_scatter(reduce_scatter),
        ):
            with pytest.raises(AssertionError, match=r"when set_symm_mem_for_comm\(\) is in effect"):
                refused()
        assert all(map(torch.equal, gradients_of(sharded), expected))
        assert all(map(torch.equal, gradients_of(early), expected))
        assert told[3:] == [symmetric]


@on_ranks(2)
def test_memory_of_a_backend() -> None:
    reference = model()
    expected, gradients = step(reference), gradients_of(reference)
    of_group = dist.ProcessGroup._get_backend
    with pytest.MonkeyPatch.context() as patch:
        forget_meshes(patch)
        patch.setattr(dist.ProcessGroup, "_get_backend", lambda self, device: WithMemory(of_group(self, device)))
        sharded = model()
        losses = [step(sharded)]
        assert WithMemory.calls == 0
        pool = libfsdp.memory_stats(sharded)["slots.live"]
        sharded.set_allocate_memory_from_process_group_for_comm(True)
        assert libfsdp.memory_stats(sharded)["slots.live"] < pool  # What it had is given back.
        losses.append(step(sharded))
        assert all(map(torch.equal, gradients_of(sharded), gradients))
        of_first = WithMemory.calls
        assert of_first > 2
        step(sharded)
        assert WithMemory.calls - of_first < of_first  # Blocks are kept; only what collectives need themselves is not.
        sharded.set_allocate_memory_from_process_group_for_comm(False)
        calls = WithMemory.calls
        losses.append(step(sharded))
        assert WithMemory.calls == calls
        early = model()
        early.set_allocate_memory_from_process_group_for_comm(True)  # Before the engine is there.
        with pytest.raises(AssertionError, match=r"cannot call set_custom_all_gather\(\)"):
            early.set_custom_all_gather(all_gather)
        losses.append(step(early))
        assert WithMemory.calls > calls
    assert losses == [expected] * 4
