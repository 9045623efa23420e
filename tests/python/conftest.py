"""What all Python tests share. ctest runs them (label python), with the build's package on PYTHONPATH."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.ranks import ComparedRanks, Ranks, StartRanks

if importlib.util.find_spec("libfsdp") is None:
    pytest.exit("no libfsdp: run ctest -L python, or PYTHONPATH=build/python python -m pytest", returncode=2)

# In ranks, and in all other processes that tests start: users are to see no warning of torch's that libfsdp's calls bring about.
# But torch itself scripts functions for jvp, of which torch 2.15 warns.
os.environ["PYTHONWARNINGS"] = "error:`torch.:FutureWarning,ignore:`torch.jit.:FutureWarning"

torch.set_num_threads(1)  # As the ranks: sums of matrix products depend on it.


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what has the mark ``nightly``, unless FSDP_NIGHTLY is set."""
    if "FSDP_NIGHTLY" not in os.environ:
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs tests with the mark ``on_ranks`` on ranks, which have no fixtures of their own."""
    if (mark := pyfuncitem.get_closest_marker("on_ranks")) is None:
        return None
    given: dict[str, Any] = pyfuncitem.funcargs
    arguments = [given[name] for name in inspect.signature(pyfuncitem.obj).parameters]
    ranks, *sizes = mark.args
    for size in sizes:
        given[ranks](given.get(size, size)).run(pyfuncitem.obj, *arguments)
    return True


@contextmanager
def kept_ranks(attempts: int) -> Iterator[StartRanks]:
    """Ranks that are started when they are first used, and kept."""
    started: dict[int, Ranks] = {}
    yield lambda size: started.setdefault(size, Ranks(size, attempts))
    for group in started.values():
        group.end()


@pytest.fixture(scope="module")
def ranks() -> Iterator[StartRanks]:
    """Ranks for anything.

    Each file has its own: process groups stay until their process ends, and some hundred of them, each with threads, make ranks slow. What
    takes long is to import torch, which is done once for all files of a process of pytest's.
    """
    with kept_ranks(attempts=1) as start_ranks:
        yield start_ranks


@pytest.fixture
def fresh_ranks() -> Iterator[StartRanks]:
    """Ranks for a test that ends their collectives, or sets what is read when connections are made."""
    with kept_ranks(attempts=1) as start_ranks:
        yield start_ranks


@pytest.fixture(scope="module")
def compared_ranks(ranks: StartRanks) -> Iterator[ComparedRanks]:
    """Ranks for runs that are compared: of "libfsdp", and of its peer, "fsdp2".

    The peer's are processes of their own, so that a fault of the peer cannot end a rank of libfsdp. Only they get a second attempt: a peer
    that had not loaded libfsdp has died on Gloo of "malloc(): unaligned tcache chunk detected".
    """
    with kept_ranks(attempts=2) as peer_ranks:
        yield {"libfsdp": ranks, "fsdp2": peer_ranks}
