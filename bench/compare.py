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
from dataclasses import dataclass
from pathlib import Path

from fleet import BenchError, Fleet, Launch
from gpt import GPTConfig
from measure import RANKS, ModelCase, Pace, Turn, check_losses, flat, interleave, paired, warm_up

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Comparison:
    """A model, what to ask for, and at which pace."""

    model: ModelCase
    verb: str
    pace: Pace


def step(dim: int, layers: int, pace: Pace) -> Comparison:
    return Comparison(ModelCase(f"d{dim}", GPTConfig(4096, dim, layers, heads=8, context=128), 4), "step", pace)


def host(name: str, world: int, layers: int, pace: Pace) -> Comparison:
    return Comparison(ModelCase(name, GPTConfig(64, 16, layers, heads=2, context=4), 1, world), "host", pace)


CASES = {
    "d256": step(256, 8, Pace(rounds=12, turn=3)),
    "d512": step(512, 12, Pace(rounds=8, turn=2)),
    "world8": host("world8", 8, 48, Pace(rounds=12, turn=5)),
    "world1024": host("world1024", 1024, 48, Pace(rounds=10, turn=3)),
    "units4000": host("units4000", 8, 4000, Pace(rounds=5, turn=2)),
}


def spread(values: Sequence[float], unit: str) -> str:
    return f"{statistics.median(values):.3g}{unit} ({min(values):.3g} to {max(values):.3g})"


def compare(case: Comparison, before: Path, now: Path) -> None:
    """Prints the case's rows."""
    model = case.model
    lone = ["--fake-world", str(model.world)] if model.world else []
    ranks = 1 if model.world else RANKS
    binaries = {"before": before, "now": now}
    launches = [Launch(n, (str(path), "libfsdp", *model.arguments(), *lone), ranks) for n, path in binaries.items()]
    with Fleet(launches) as contenders:
        losses = warm_up(contenders, case.verb)
        if not model.world:
            check_losses(model.name, losses, steps=1)
        rounds = interleave(model.name, [Turn(contender, case.verb) for contender in contenders], case.pace)
        ratios = paired(rounds[1], rounds[0], lambda a, b: a / b)
        print(f"{model.name}: {case.verb} before {spread(flat(rounds[0]), ' ms')}, now {spread(ratios, ' x')}")
        if model.world:
            return
        memory = [contender.ask("memory") for contender in contenders]
        for key, what in (("engine_peak_kib", "engine's peak"), ("high_water_kib", "largest resident set")):
            old, new = ([reply[key] / 1024 for reply in replies] for replies in memory)
            print(f"{model.name}: {what} before {spread(old, ' MiB')}, now {spread(new, ' MiB')}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, required=True, help="the earlier build's C++ contender")
    parser.add_argument("--now", type=Path, default=ROOT / "build/bench/bench_contender", help="this build's")
    parser.add_argument("--case", action="append", choices=CASES, help="this case only; may be repeated")
    arguments = parser.parse_args()
    try:
        for name in arguments.case or CASES:
            compare(CASES[name], arguments.before, arguments.now)
    except BenchError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
