"""A pytest run of PyTorch's FSDP2 tests on CPU and Gloo. A machine's GPUs are hidden from it.

    python -m peers.on_cpu [pytest's arguments]

The tests start a process per rank, from a fork server that has read this file first: what `prepare` changes is
changed in every process before a file of tests is read there. Environment variables, which all processes inherit:

    PEERS_IMPLEMENTATION   a module whose install() puts itself behind torch.distributed.fsdp's names
    PEERS_RANKS            how many ranks a test gets that takes as many as there are devices
    PEERS_EVENTS           the file to which progress is appended, as lines of JSON
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from peers import private_use

# Before torch looks for them, in this process and in those that it starts.
os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")


def ranks_wanted() -> int:
    """As many ranks as a test that asks for the number of devices is told."""
    return int(os.environ["PEERS_RANKS"])


def prepare() -> None:
    """Makes torch's helpers of tests take the CPU for the device, and installs the implementation."""
    import torch
    import torch.distributed.fsdp
    import torch.testing._internal.common_distributed as common
    import torch.testing._internal.common_utils as common_utils

    if hasattr(torch, "_prepared_for_peers"):
        return  # The fork server has done so.
    torch._prepared_for_peers = True
    if torch.accelerator.is_available():
        sys.exit(f"these tests run on the CPU; hide this machine's accelerator: {torch.accelerator.current_accelerator()}")
    if module := os.environ.get("PEERS_IMPLEMENTATION"):
        importlib.import_module(module).install()

    import torch.testing._internal.common_fsdp as common_fsdp

    common.skip_if_lt_x_gpu = demand_ranks
    for base in (common.MultiProcessTestCase, common.MultiProcContinuousTest, common.MultiThreadedTestCase):
        adapt_world_size(base)
    common.MultiProcessTestCase._spawn_processes = start_ranks
    common_utils._cpu_sleep = lambda cycles: time.sleep(cycles * 1e-9)  # The other ranks need the core.
    torch.nn.functional.scaled_dot_product_attention = by_shard(torch.nn.functional.scaled_dot_product_attention)
    torch.cpu.current_device = lambda: None
    # All that these two add to their base classes is a check that each rank has an accelerator.
    for owner, method in ((common_fsdp.FSDPTest, "_run"), (common_fsdp.FSDPTestContinuous, "_init_pg")):
        if method in vars(owner):
            delattr(owner, method)
    replicate = torch.nn.parallel.DistributedDataParallel
    replicate.__init__ = without_device_ids(replicate.__init__)
    set_device_counts()


def without_device_ids(init: Callable[..., None]) -> Callable[..., None]:
    """DDP, which is a reference of the tests, refuses device numbers on CPU."""

    @functools.wraps(init)
    def wrapper(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **more: Any) -> None:
        init(self, module, None, None, **more)

    return wrapper


def by_shard(attention: Callable[..., Any]) -> Callable[..., Any]:
    """DTensor has no rule for CPU's attention; cut by batch or heads, each shard stands alone."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    @functools.wraps(attention)
    def wrapper(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        if not isinstance(query, DTensor):
            return attention(query, key, value, *rest, **more)
        assert all(p in (Replicate(), Shard(0), Shard(1)) for p in query.placements)
        shard = attention(query.to_local(), key.to_local(), value.to_local(), *rest, **more)
        return DTensor.from_local(shard, query.device_mesh, query.placements)

    return wrapper


def set_device_counts() -> None:
    """The numbers that helpers took when they were imported."""
    import torch.testing._internal.common_fsdp as common_fsdp
    import torch.testing._internal.distributed._tensor.common_dtensor as common_dtensor

    common_fsdp.DEVICE_COUNT = common_dtensor.NUM_DEVICES = ranks_wanted()


def demand_ranks(count: int, **_: object) -> Callable[[Any], Any]:
    """In place of skip_if_lt_x_gpu: the test is not skipped, it gets as many ranks."""

    def decorate(test: Any) -> Any:
        test._peers_ranks = count
        return test

    return decorate


def adapt_world_size(base: type) -> None:
    """A subclass's world_size that is computed from the number of devices gets the number of ranks."""

    def init_subclass(cls: Any, **arguments: Any) -> None:
        super(base, cls).__init_subclass__(**arguments)  # type: ignore[arg-type]
        size = vars(cls).get("world_size")
        if isinstance(size, property) and size.fget and "device_count" in size.fget.__code__.co_names:
            cls.world_size = property(functools.partial(pretended_size, size.fget))

    base.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]


def pretended_size(getter: Callable[[Any], int], test: Any) -> int:
    """What a test makes of the number of ranks; some make 8 of it on CPU whatever it is."""
    import torch

    with contextlib.ExitStack() as stack:
        for module in (torch.cpu, torch.cuda, torch.accelerator):
            stack.enter_context(mock.patch.object(module, "device_count", ranks_wanted))
        return min(getter(test), ranks_wanted())


def start_ranks(test: Any) -> None:
    """Ranks from a fork server start in milliseconds; spawned ones, each of which imports torch, in seconds."""
    context = multiprocessing.get_context("forkserver")
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    context.set_forkserver_preload([__spec__.name, type(test).__module__])

    def process(target: Callable[..., None], name: str, args: Any, kwargs: Any) -> Any:
        return context.Process(target=run_rank, name=name, args=(dict(os.environ), target, args, kwargs))

    test._start_processes(process)


def run_rank(environment: dict[str, str], target: Callable[..., None], args: Any, kwargs: Any) -> None:
    """A child of the fork server has the environment in which that started, not the test's."""
    os.environ.clear()
    os.environ.update(environment)
    set_device_counts()
    target(*args, **kwargs)


class Progress:
    """pytest's side, in the process that collects the tests: what is written to PEERS_EVENTS."""

    def __init__(self) -> None:
        self.least_ranks = ranks_wanted()

    @staticmethod
    def note(**event: object) -> None:
        """One line."""
        with open(os.environ["PEERS_EVENTS"], "a") as file:
            file.write(json.dumps(event) + "\n")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Tests that do not use FSDP2 at all say nothing."""
        import pytest

        for item in items:
            if item.cls and not private_use.use_of(Path(item.path), item.cls.__name__, item.name).fsdp2:
                item.add_marker(pytest.mark.skip(reason="does not use FSDP2"))
        self.note(collected=[item.nodeid for item in items])

    def pytest_runtest_setup(self, item: Any) -> None:
        """The ranks that this test demands, or its whole class, if that starts its ranks once for all tests."""
        self.note(start=item.nodeid)
        demands = [item.cls, item.obj]
        if hasattr(item.cls, "_worker_loop"):
            demands += [getattr(item.cls, name) for name in dir(item.cls) if name.startswith("test")]
        os.environ["PEERS_RANKS"] = str(max(self.least_ranks, *(getattr(d, "_peers_ranks", 0) for d in demands)))
        set_device_counts()

    def pytest_runtest_teardown(self, item: Any) -> None:
        """Where one rank of a class has failed, the others wait for it for ever."""
        if getattr(item.cls, "poison_pill", False):
            for process in getattr(item.cls, "processes", ()):
                process.terminate()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Each phase of a test: set-up, call, tear-down."""
        text = "" if report.outcome == "passed" else report.longreprtext
        if isinstance(report.longrepr, tuple):  # Skipped: file, line, reason.
            text = report.longrepr[2]
        self.note(test=report.nodeid, phase=report.when, outcome=report.outcome, seconds=report.duration, text=text)


def main() -> int:
    """pytest without what the folder of tests has of configuration, from a file that ranks import by its name."""
    import pytest

    options = ["--noconftest", "-p", "no:cacheprovider", "-c", os.devnull]
    return pytest.main([*options, *sys.argv[1:]], plugins=[Progress()])


prepare()  # In every process that reads this file.
if __name__ == "__main__":
    sys.exit(main())
