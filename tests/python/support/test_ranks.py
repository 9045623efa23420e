"""The ranks that the other tests run on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.ranks import RankError, Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks of this module, which has some of them end."""
    group = Ranks(2)
    yield group
    group.end()


def add_ranks(start: int) -> int:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def process() -> int:
    return os.getpid()


def fail_on_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("as this test wants it")
    dist.barrier()


def die_on_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(60)


def abort_on_1_at_first(mark: Path) -> int:
    if dist.get_rank() == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGABRT)
    return add_ranks(0)


def test_results_come_by_rank_and_processes_stay(two: Ranks) -> None:
    assert two.run(add_ranks, 10) == [21, 21]
    before = two.run(process)
    assert len(set(before)) == 2
    assert two.run(process) == before


def test_the_traceback_of_a_rank_is_the_error_and_new_ranks_start(two: Ranks) -> None:
    before = two.run(process)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2: Traceback.*in fail_on_1.*ValueError: as this test wants it"):
        two.run(fail_on_1)
    assert not set(two.run(process)) & set(before)
    assert two.run(add_ranks, 0) == [1, 1]


def test_a_rank_that_dies_is_named(two: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 of 2: no answer after .*rank 1 of 2: died with exit code 3"):
        two.run(die_on_1)


def die_after_the_answer() -> None:
    threading.Timer(0.5, os._exit, [4]).start()


def test_a_rank_that_dies_between_calls_is_named_and_new_ranks_start(two: Ranks) -> None:
    """What the next call to these ranks says, so that only one test of all that share them fails."""
    two.run(die_after_the_answer)
    time.sleep(2)
    with pytest.raises(RankError, match=r"rank 0 of 2: died with exit code 4\nrank 1 of 2: died with exit code 4"):
        two.run(add_ranks, 0)
    assert two.run(add_ranks, 0) == [1, 1]


def test_a_rank_that_hangs_is_an_error(two: Ranks) -> None:
    with pytest.raises(RankError, match="rank 0 of 2: no answer in time\nrank 1 of 2: no answer in time"):
        two.run(time.sleep, 60, limit=10.0)


def test_a_second_attempt_is_for_ranks_that_a_signal_has_killed(two: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 of 2: died with exit code -6"):
        two.run(abort_on_1_at_first, tmp_path / "one attempt")
    patient = Ranks(2, attempts=2)
    try:
        assert patient.run(abort_on_1_at_first, tmp_path / "two attempts") == [1, 1]
        with pytest.raises(RankError, match="died with exit code 3"):
            patient.run(die_on_1)
    finally:
        patient.end()
