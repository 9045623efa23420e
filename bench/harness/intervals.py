"""How sure a median is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

RESAMPLES = 1000
LEVEL = 0.95


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which values the median lies at LEVEL, by the bootstrap: medians of samples drawn from the values, with repetition.

    The draws are the same in each run. One value is its own interval.
    """
    if len(values) < 2:
        return values[0], values[0]
    draw = random.Random(len(values))
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    outside = (1 - LEVEL) / 2
    return medians[int(outside * RESAMPLES)], medians[int((1 - outside) * RESAMPLES) - 1]


def is_below_resolution(low: float, high: float) -> bool:
    """The interval of a difference, or of a ratio of one, has 0 in it: the noise is larger than what was to be measured."""
    return low <= 0 <= high
