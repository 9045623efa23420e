"""Random programs of fixed seeds, against plain replicas. `make soak` goes on with others.

A failure prints its program. ``PYTHONPATH=build/python:tests/python python -m differential --only KIND --seed N`` repeats it and makes it
smaller.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import support.comparison  # noqa: F401  # MKL's rounding
from support.marks import at_night
from support.ranks import RankError, StartRanks

from differential.exports import live_with_exports
from differential.features import PROFILES, features
from differential.generate import generate
from differential.program import readable
from differential.runner import Runner

PROGRAMS = 8 if "FSDP_NIGHTLY" in os.environ else 2  # Of each kind, and of those with all features.


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.end()


@pytest.mark.parametrize("profile", ["", *PROFILES])
def test_random_programs_follow_plain_replicas(runner: Runner, profile: str) -> None:
    for seed in range(5000, 5000 + PROGRAMS):
        program = generate(seed, features(only=filter(None, [profile])))
        failure = runner.run(program)
        assert failure is None, f"--only '{profile}' --seed {seed}: {failure.text}\n{readable(program)}"


@pytest.mark.parametrize(
    ("first", "count"), [(6000, 2), at_night(6002, 8), *(at_night(n, 10) for n in range(6010, 6100, 10))]
)
def test_weights_out_of_random_programs(ranks: StartRanks, first: int, count: int) -> None:
    """Of models of all kinds, in all forms, at any moment between microbatches; and what comes after is as it would be without."""
    for seed in range(first, first + count):
        program = generate(seed, features())
        try:
            ranks(program.world).run(live_with_exports, program)
        except RankError as error:
            pytest.fail(f"seed {seed}: {error}\n{readable(program)}")
