"""Random programs of fixed seeds, against plain replicas. `make soak` goes on with others.

A failure prints its program. ``PYTHONPATH=build/python:tests/python python -m differential --seed N`` repeats it and makes it smaller.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import support.comparison  # noqa: F401  # MKL's rounding
from differential.features import features
from differential.generate import generate
from differential.program import readable
from differential.runner import Runner

PER_TEST = 20


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.end()


@pytest.mark.parametrize("begin", range(0, 160, PER_TEST))
def test_random_programs_follow_plain_replicas(runner: Runner, begin: int) -> None:
    for seed in range(begin, begin + PER_TEST):
        program = generate(seed, features())
        failure = runner.run(program)
        assert failure is None, f"seed {seed}: {failure.text}\n{readable(program)}"
