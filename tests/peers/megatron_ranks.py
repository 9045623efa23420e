"""A pytest run of Megatron-FSDP's tests on CPU and Gloo: one pytest in each rank.

    python -m peers.megatron_ranks [pytest's arguments]

Forks once for each rank, so that torch is loaded once, and waits for them. Before a rank's pytest reads a file of tests, what the
tests import is put in place: the implementation, and stand-ins for Megatron-LM's own helpers of tests. Environment variables:

    PEERS_IMPLEMENTATION   a module whose install_megatron() puts itself behind Megatron-FSDP's names; empty: the peer itself
    PEERS_RANKS            how many ranks
    PEERS_EVENTS           the file to which all ranks append progress, as lines of JSON
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "megatron.core.distributed.fsdp.src.megatron_fsdp"
LOADED_ONCE = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor")
COLLECTIVE_LIMIT = datetime.timedelta(seconds=60)
RANKS_THAT_COMPILE = 4  # More of them get graphs and derivatives from torch.compile, but no C++: that would take minutes a test.
TEXT = 4000  # Characters of a failure that are kept.
# What a test names that measures or uses an accelerator.
ABOUT_DEVICES = {
    "memory_allocated": "measures CUDA's memory",
    "collect_linked_kernels": "counts CUDA's kernels",
    "CUDAGraph": "captures a CUDA graph",
    "mem_pool": "needs NCCL's memory",
    "test_release_and_reallocate_storage_preserves_buffer_views": "expects the addresses of CUDA's allocator",
}


def make_module(name: str, path: list[str] | None = None, **contents: Any) -> types.ModuleType:
    """A module, or with a path a package, of which no file is run."""
    made = types.ModuleType(name)
    if path is not None:
        made.__path__ = path
    vars(made).update(contents)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, made)
    return made


def make_packages(name: str, root: Path | None) -> None:
    """A package and those above it, whose own files are not run: those of Megatron-LM import all of Megatron-Core."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        make_module(".".join(parts[:end]), [str(root.joinpath(*parts[:end]))] if root else [])


def prepare(rank: int, ranks: int) -> None:
    """What tests import."""
    import torch
    import torch.distributed as dist

    store = dist.FileStore(str(Path(os.environ["PEERS_EVENTS"]).with_name("store")), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=COLLECTIVE_LIMIT)
    Utils.rank, Utils.world_size = rank, ranks
    if ranks > RANKS_THAT_COMPILE:
        compile_model: Any = functools.partial(torch.compile, backend="aot_eager")
        torch.compile = compile_model
    above = PACKAGE.rpartition(".")[0]
    if implementation := os.environ["PEERS_IMPLEMENTATION"]:
        make_packages(above, None)  # What it lacks is not to be found elsewhere.
        importlib.import_module(implementation).install_megatron()
    else:
        from peers import megatron_itself

        megatron_itself.stand_in_for_cuda()
        make_packages(above, Path.cwd())
        megatron_itself.send_to_cpu(PACKAGE)
    stand_in_for_helpers()


def needs(what: str) -> type:
    """A class that skips the test that makes one."""

    def skip(*_: object, **__: object) -> None:
        pytest.skip(f"needs {what}")

    return type("Missing", (), {"__init__": skip})


class Utils:
    """In place of test_utilities.Utils: the process group is there already."""

    rank = 0
    world_size = 1
    inited = True

    @staticmethod
    def initialize_distributed() -> None:
        """Nothing is left to do."""

    @staticmethod
    def initialize_model_parallel(*sizes: int | None, **more: Any) -> None:
        """Skips what is about model parallelism."""
        if any(size not in (1, None) for size in (*sizes, *more.values())):
            pytest.skip("needs Megatron-Core's parallel_state")

    @staticmethod
    def destroy_model_parallel() -> None:
        """Nothing was made."""


@contextlib.contextmanager
def folder_of_all_ranks(name: str, sync: bool = True) -> Iterator[Path]:
    """In place of TempNamedDir."""
    import torch.distributed as dist

    path = Path(name)
    path.mkdir(parents=True, exist_ok=True)
    if sync:
        dist.barrier()
    yield path
    if sync:
        dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)


def stand_in_for_helpers() -> None:
    """Of Megatron-LM's tests, and TransformerEngine's names."""
    make_packages("tests.unit_tests.distributed", Path.cwd())
    make_module("tests.unit_tests.test_utilities", Utils=Utils)
    make_module("tests.unit_tests.dist_checkpointing", TempNamedDir=folder_of_all_ranks)
    missing = needs("TransformerEngine")
    layers = ("TransformerLayer", "Linear", "autocast", "quantized_model_init")
    recipes = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")
    make_module("transformer_engine", [])
    vars(make_module("transformer_engine.pytorch", [])).update(dict.fromkeys(layers, missing))
    make_module("transformer_engine.pytorch.optimizers", FusedAdam=missing)
    make_module("transformer_engine.common", [])
    vars(make_module("transformer_engine.common.recipe")).update(dict.fromkeys(recipes, missing))


class Progress:
    """What a rank's pytest tells."""

    @staticmethod
    def note(**event: object) -> None:
        """One line, by one write: all ranks append to the file."""
        line = (json.dumps(event) + "\n").encode()
        file = os.open(os.environ["PEERS_EVENTS"], os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Tests about an accelerator are skipped, whoever implements what they test."""
        import inspect

        for item in items:
            source = inspect.getsource(item.obj)
            for word, reason in ABOUT_DEVICES.items():
                if word in source:
                    item.add_marker(pytest.mark.skip(reason=reason))
        self.note(collected=[item.nodeid for item in items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.note(start=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Each phase of a test."""
        text = "" if report.outcome == "passed" else report.longreprtext[-TEXT:]
        if isinstance(report.longrepr, tuple):  # Skipped: file, line, reason.
            text = report.longrepr[2]
        self.note(test=report.nodeid, phase=report.when, outcome=report.outcome, seconds=report.duration, text=text)


class SharedFolder:
    """The fixture of Megatron-LM's conftest.py that the tests use."""

    @pytest.fixture(scope="session")
    def tmp_path_dist_ckpt(self) -> Path:
        """One folder for all ranks."""
        return Path.cwd() / "checkpoints"


def run_rank(rank: int, ranks: int, arguments: list[str]) -> None:
    """pytest, without what the checkout has of configuration but each folder's conftest.py."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), CUDA_VISIBLE_DEVICES="")
    prepare(rank, ranks)
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--import-mode=importlib", *arguments]
    sys.exit(pytest.main(options, plugins=[Progress(), SharedFolder()]))


def start_ranks(arguments: list[str]) -> int:
    """All of them, in this process's group, so that they are ended with it. The first exit code that is not 0."""
    for name in LOADED_ONCE:
        importlib.import_module(name)
    ranks = int(os.environ["PEERS_RANKS"])
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(rank, ranks, arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return next((process.exitcode for process in processes if process.exitcode), 0)


if __name__ == "__main__":
    sys.exit(start_ranks(sys.argv[1:]))
