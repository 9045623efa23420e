"""Process groups without processes, for tests and for measuring: ranks that are threads, and groups that only pretend to communicate.

Both replace parts of torch.distributed for a whole process, so each run has a process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparison import assert_same_runs
from support.models import Case, Transformer, next_token_loss, tokens
from support.training import Options, Run, installed, seeded, train_sharded
from torch.distributed import distributed_c10d
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed import multi_threaded_pg

import libfsdp

CASE = Case(lambda: Transformer(blocks=3), tokens(2, 8), lambda m: list(m.blocks), next_token_loss)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A process that may be spoilt."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool


def train_as_threads(implementation: str, world: int, replicas: int, reshard: bool | int | None) -> list[Run]:
    """The runs of all ranks, each a thread."""
    from torch._C import _distributed_c10d as c10d
    from torch.distributed.device_mesh import init_device_mesh

    c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()
    runs: dict[int, Run] = {}
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            with together, torch.random.fork_rng():  # One generator for all threads: one at a time.
                model: Any = seeded(CASE)
            sizes, names = (
                ((world,), ("shard",)) if replicas == 1 else ((replicas, world // replicas), ("outer", "shard"))
            )
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
            runs[rank] = train_sharded(model, CASE, Options())
        except BaseException as error:
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    together = threading.Lock()
    with installed(implementation):
        from torch.distributed.fsdp import fully_shard

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    multi_threaded_pg._uninstall_threaded_pg()
    c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return [runs[rank] for rank in range(world)]


@pytest.mark.skipif(
    hasattr(distributed_c10d._World, "comms") and not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"),
    reason="this torch's threads have no world of their own that is whole",
)
@pytest.mark.parametrize(("world", "replicas", "reshard"), [(2, 1, None), (4, 1, 2), (4, 2, None)])
def test_ranks_that_are_threads(
    process: ProcessPoolExecutor, world: int, replicas: int, reshard: bool | int | None
) -> None:
    """Sums of more than two ranks have one order here, too: that of the ranks."""
    theirs, ours = (
        process.submit(train_as_threads, implementation, world, replicas, reshard).result(timeout=120)
        for implementation in ("fsdp2", "libfsdp")
    )
    assert_same_runs(ours, theirs)


def counted_on_fake(implementation: str, world: int) -> tuple[list[dict[str, int]], list[Any]]:
    """Collectives of each step, and how gradients lie, of a rank that is alone with a fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=world, store=FakeStore())
    try:
        with installed(implementation):
            from torch.distributed.fsdp import fully_shard

            model: Any = seeded(CASE)
            for module in (*model.blocks, model):
                fully_shard(module)
            counts = []
            for _ in range(3):
                with CommDebugMode() as mode:
                    model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
                counts.append({str(name): count for name, count in mode.get_comm_counts().items()})
            lie = [
                (name, p.grad.shape, p.grad.placements, p.grad.to_local().shape) for name, p in model.named_parameters()
            ]
            return counts, lie
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [8, 1024])
def test_fake_process_groups(process: ProcessPoolExecutor, world: int) -> None:
    theirs, ours = (
        process.submit(counted_on_fake, implementation, world).result(timeout=120)
        for implementation in ("fsdp2", "libfsdp")
    )
    assert ours[1] == theirs[1]
    for mine, other in zip(ours[0], theirs[0], strict=True):
        # One more, and a small one: at the end of a backward ranks tell each other which parameters they have used.
        told = mine["c10d._allgather_base_"] - other["c10d._allgather_base_"]
        assert told in (0, 1)
        assert mine == {**other, "c10d._allgather_base_": other["c10d._allgather_base_"] + told}


def trained_on_fake(world: int) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """This rank's rows of gradients, those of a plain model divided by the ranks, and bytes that gathers would have sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = 1
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        torch.manual_seed(0)
        plain, sharded = torch.nn.Linear(5, 16), torch.nn.Linear(5, 16)
        sharded.load_state_dict(plain.state_dict())
        libfsdp.fully_shard(sharded)
        x = torch.arange(15.0).view(3, 5)
        outputs = []
        for model in (plain, sharded):
            output = model(x)
            output.sum().backward()
            outputs.append(output.detach())
        rows = slice(rank * 16 // world, (rank + 1) * 16 // world)
        assert torch.equal(outputs[1][:, rows], outputs[0][:, rows]), (
            "this rank's rows are there when they are computed with"
        )
        expected = [p.grad[rows] / world for p in plain.parameters()]
        sent = libfsdp.wire_stats(sharded)["all_gather_bytes"]
        return [p.grad.to_local() for p in sharded.parameters()], expected, sent
    finally:
        dist.destroy_process_group()


def test_a_fake_group_has_this_ranks_rows_and_terms(process: ProcessPoolExecutor) -> None:
    """Where nobody counts collectives, none goes through torch.distributed: gathers and sums are this rank's own."""
    gradients, expected, sent = process.submit(trained_on_fake, 8).result(timeout=120)
    assert all(map(torch.equal, gradients, expected))
    assert sent == 7 * (2 * 5 + 2) * 4
