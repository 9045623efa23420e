"""Counts the instructions that sharding adds to forward and backward, by function: as many on a busy machine as on a quiet one.

    python bench/instructions.py --world 1024 --top 40

Runs the C++ contender below valgrind's callgrind, once for the steps of the sharded model and once for those of the
same model unsharded, and prints the difference per unit and step. Takes about a minute on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from harness.cases import host
from harness.fleet import BenchError
from harness.measure import WARM_UP_STEPS, ModelCase, Pace

ROOT = Path(__file__).resolve().parent.parent
SHARDED, PLAIN = "*::sharded_step*", "*::plain_step*"  # Of contender.cpp.
LISTED = re.compile(r"^\s*([\d,]+) \([^)]*\)\s+[^:]*:(.*?)(?: \[[^\]]*\])?$")  # 1,234 ( 5.6%)  FILE:FUNCTION [OBJECT]


def count(binary: Path, case: ModelCase, steps: int, function: str) -> Counter[str]:
    """Instructions by function, of `steps` steps after the warm-up, within those functions whose names match."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "counts")
        watched = ("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--toggle-collect={function}")
        contender = (str(binary), "libfsdp", *case.arguments(), "--fake-world", str(case.world))
        with subprocess.Popen(
            (*watched, f"--callgrind-out-file={out}", *contender),
            env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdin
            assert process.stdout
            replies = [process.stdout.readline()]
            for verb, number in (("host", WARM_UP_STEPS), ("host", steps)):
                process.stdin.write(f"{verb} {number}\n")
                process.stdin.flush()
                replies.append(process.stdout.readline())
                if number == WARM_UP_STEPS:  # Only from here on, as what is watched takes fifty times as long.
                    subprocess.run(("callgrind_control", "-i", "on", str(process.pid)), check=True, capture_output=True)
            process.stdin.close()
        if process.returncode != 0 or not all(replies):
            raise BenchError(f"valgrind ended with {process.returncode}: {' '.join(contender)}")
        listing = ("callgrind_annotate", "--threshold=100", "--auto=no", str(out))
        return parse(subprocess.run(listing, text=True, capture_output=True, check=True).stdout)


def parse(listing: str) -> Counter[str]:
    """Instructions by function, of what callgrind_annotate prints."""
    counts: Counter[str] = Counter()
    for line in listing.splitlines():
        if found := LISTED.match(line):
            counts[found[2]] += int(found[1].replace(",", ""))
    return counts


def added(sharded: Counter[str], plain: Counter[str], times: int) -> dict[str, float]:
    """By function, how many more the sharded model needs each time, or fewer; those that matter most first."""
    differences = {name: (sharded[name] - plain[name]) / times for name in sharded | plain}
    return dict(sorted(differences.items(), key=lambda item: -abs(item[1])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--binary", type=Path, default=ROOT / "build/bench/bench_contender", help="the C++ contender")
    parser.add_argument("--world", type=int, default=8, help="ranks, of which one is there")
    parser.add_argument("--units", type=int, default=48)
    parser.add_argument("--steps", type=int, default=4, help="that are counted")
    parser.add_argument("--top", type=int, default=20, help="functions to list")
    args = parser.parse_args()
    case = host("instructions", args.world, args.units, Pace(1, 1)).model
    try:
        sharded, plain = (count(args.binary, case, args.steps, function) for function in (SHARDED, PLAIN))
    except (BenchError, OSError, subprocess.CalledProcessError) as error:
        print(f"instructions: {error}", file=sys.stderr)
        return 1
    by_function = added(sharded, plain, args.steps * args.units)
    print(f"{sum(by_function.values()):,.0f} instructions per unit and step: {args.units} units, world size {args.world}")
    for name, number in list(by_function.items())[: args.top]:
        print(f"{number:>10,.0f}  {name[:120]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
