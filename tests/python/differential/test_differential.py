"""Random programs of fixed seeds, against plain replicas. `make soak` goes on with others.

A failure prints its program. ``PYTHONPATH=build/python:tests/python python -m differential --only KIND --seed N`` repeats it and makes it
smaller.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import support.comparison  # noqa: F401  # MKL's rounding

from differential.features import PROFILES, features
from differential.generate import generate
from differential.program import readable
from differential.runner import Runner

PROGRAMS = 8  # Of each kind, and of those with all features.


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
