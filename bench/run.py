"""Measures this library against FSDP2, DDP and c10d, interleaved; docs/develop/benchmarks.md says how and what rows mean."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from harness import report
from harness.cases import MODELS, VARIANTS_OF_STEPS
from harness.fleet import BenchError
from harness.machine import describe_machine
from harness.measure import (
    RANKS,
    Pace,
    Programs,
    Row,
    measure_collectives,
    measure_host,
    measure_hosts,
    measure_optimizers,
    measure_steps,
)

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """What to measure, and at which pace."""

    measure: Callable[[Pace, Programs], list[Row]]
    full: Pace
    quick: Pace


def step_case(name: str) -> Case:
    """Steps of a model of cases.py."""
    paced = MODELS[name]
    return Case(lambda pace, programs: measure_steps(paced.model, pace, programs), paced.pace, Pace(rounds=2, turn=1))


def hosts_case(name: str) -> Case:
    """Steps of a model of cases.py on two hosts."""
    paced = MODELS[name]
    return Case(lambda pace, programs: measure_hosts(paced.model, pace, programs), paced.pace, Pace(rounds=2, turn=1))


def host_case(name: str, only: frozenset[str] = frozenset()) -> Case:
    """Host time of a model of cases.py. `only`: the contenders that take part, if not all do."""
    paced = MODELS[name]

    def measure(pace: Pace, programs: Programs) -> list[Row]:
        return measure_host(paced.model, pace, replace(programs, only=programs.only or only))

    return Case(measure, paced.pace, Pace(rounds=3, turn=5))


def collectives_case(name: str, ranks: int) -> Case:
    """Collectives of so many ranks."""
    return Case(lambda pace, programs: measure_collectives(name, ranks, pace, programs), Pace(rounds=12, turn=3), Pace(rounds=3, turn=2))


CASES = {
    "d256": step_case("d256"),
    "d512": step_case("d512"),
    **{name: step_case(name) for name in VARIANTS_OF_STEPS},
    "hosts": hosts_case("hosts"),
    "hosts_bf16": hosts_case("hosts_bf16"),
    "hosts_rounded": hosts_case("hosts_rounded"),
    "world8": host_case("world8"),
    "world1024": host_case("world1024"),
    # FSDP2 would take ten seconds a step.
    "units4000": host_case("units4000", frozenset({"libfsdp"})),
    "optimizer2000": Case(measure_optimizers, Pace(rounds=12, turn=3), Pace(rounds=3, turn=2)),
    "collectives": collectives_case("collectives", RANKS),
    "collectives4": collectives_case("collectives4", 4),
}


def parse_arguments() -> argparse.Namespace:
    """Options of `make bench`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="measure this case only; may be repeated")
    parser.add_argument("--contender", action="append", help="start this contender only; may be repeated")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--quick", action="store_true", help="about 20 minutes: few rounds, to see that all works")
    parser.add_argument("--binary", type=Path, default=ROOT / "build/bench/bench_contender", help="the C++ contender")
    parser.add_argument("--package", type=Path, default=ROOT / "build/python", help="the folder of libfsdp's package")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench/results/latest.json", help="JSON; .md and .png beside it"
    )
    return parser.parse_args()


def pace_of(case: Case, args: argparse.Namespace) -> Pace:
    """The case's pace, as the options change it."""
    pace = case.quick if args.quick else case.full
    return Pace(args.rounds or pace.rounds, pace.turn)


def measure_all(args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Every case that was asked for, one after the other; the names of those that failed, which cost the others nothing."""
    programs = Programs(sys.executable, args.binary, frozenset(args.contender or ()))
    rows: list[Row] = []
    failed: list[str] = []
    for name in args.case or CASES:
        start = time.monotonic()
        try:
            rows += CASES[name].measure(pace_of(CASES[name], args), programs)
        except BenchError as error:
            failed.append(name)
            print(f"bench: {error}", file=sys.stderr)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return rows, failed


def main() -> int:
    """Measures, writes the files, prints the page."""
    args = parse_arguments()
    torch.set_num_threads(1)
    path = (str(args.package.resolve()), str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))  # All contenders inherit it.
    machine = describe_machine()
    rows, failed = measure_all(args)
    if not rows:
        return 1
    result = report.Result(shlex.join(("python", "bench/run.py", *sys.argv[1:])), machine, rows)
    report.write(result, args.out)
    if not failed and not args.quick and not machine["commit"].endswith("-dirty"):
        report.remember(result, args.out.parent)
    print(report.markdown(result))
    if failed:
        print(f"bench: not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
