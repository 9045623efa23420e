"""What all Python tests share. ctest runs them (label python), with the build's package on PYTHONPATH."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch
from support.ranks import Ranks

if importlib.util.find_spec("libfsdp") is None:
    pytest.exit("no libfsdp: run ctest -L python, or PYTHONPATH=build/python python -m pytest", returncode=2)

torch.set_num_threads(1)  # As the ranks: sums of matrix products depend on it.


def kept_ranks(attempts: int) -> Iterator[Callable[[int], Ranks]]:
    """Ranks by their number; started when they are first used, and kept."""
    started: dict[int, Ranks] = {}
    yield lambda size: started.setdefault(size, Ranks(size, attempts))
    for group in started.values():
        group.end()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Ranks for anything."""
    yield from kept_ranks(attempts=1)


@pytest.fixture(scope="session")
def peer_ranks() -> Iterator[Callable[[int], Ranks]]:
    """Ranks that run torch's FSDP2 and nothing of libfsdp.

    They are processes of their own, so that a fault of the peer cannot end a rank of libfsdp. Only they get a second attempt: a peer that
    had not loaded libfsdp has died on Gloo of "malloc(): unaligned tcache chunk detected".
    """
    yield from kept_ranks(attempts=2)
