"""Measures this build against an earlier one, interleaved in one run.

    python bench/compare.py --before OLD/build/bench/bench_contender

Prints, for each case, the median and the range of what the earlier build took, and of the ratio of this one to it,
paired by round: steps and memory of a GPT on 2 ranks, and host time of a lone rank whose collectives move nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.cases import MODELS, PacedModel
from harness.fleet import BenchError, Fleet, Launch
from harness.measure import RANKS, Turn, check_losses, flat, interleave, paired, warm_up

ROOT = Path(__file__).resolve().parent.parent
CASES = {name: case for name, case in MODELS.items() if case.model.takes("libfsdp")}
"""The C++ contender takes part in these; it knows neither options nor other models."""


def spread(values: Sequence[float], unit: str) -> str:
    return f"{statistics.median(values):.3g}{unit} ({min(values):.3g} to {max(values):.3g})"


def compare(case: PacedModel, before: Path, now: Path) -> None:
    """Prints the case's rows."""
    model = case.model
    verb = "host" if model.world else "step"
    lone = ["--fake-world", str(model.world)] if model.world else []
    ranks = 1 if model.world else RANKS
    binaries = {"before": before, "now": now}
    launches = [Launch(n, (str(path), "libfsdp", *model.arguments(), *lone), ranks) for n, path in binaries.items()]
    with Fleet(launches) as contenders:
        losses = warm_up(contenders, verb)
        if not model.world:
            check_losses(model.name, losses, steps=1)
        rounds = interleave(model.name, [Turn(contender, verb) for contender in contenders], case.pace)
        ratios = paired(rounds[1], rounds[0], lambda a, b: a / b)
        print(f"{model.name}: {verb} before {spread(flat(rounds[0]), ' ms')}, now {spread(ratios, ' x')}")
        if model.world:
            return
        memory = [contender.ask("memory") for contender in contenders]
        for key, what in (("engine_peak_kib", "engine's peak"), ("high_water_kib", "largest resident set")):
            old, new = ([reply[key] / 1024 for reply in replies] for replies in memory)
            print(f"{model.name}: {what} before {spread(old, ' MiB')}, now {spread(new, ' MiB')}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, required=True, help="the earlier build's C++ contender")
    parser.add_argument("--now", type=Path, default=ROOT / "build/bench/bench_contender", help="this build's")
    parser.add_argument("--case", action="append", choices=CASES, help="this case only; may be repeated")
    arguments = parser.parse_args(words)
    try:
        for name in arguments.case or CASES:
            compare(CASES[name], arguments.before, arguments.now)
    except BenchError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
