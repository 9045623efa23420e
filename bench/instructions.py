"""Counts the instructions that sharding adds to forward and backward, by function: as many on a busy machine as on a quiet one.

    python bench/instructions.py --world 1024 --top 40
    python bench/instructions.py --contender libfsdp_python     # or empty_hooks

Runs a contender below valgrind's callgrind, once for the steps of the sharded model and once for those of the same
model unsharded, and prints the difference per unit and step. Takes about a minute on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness.cases import host
from harness.fleet import BenchError
from harness.measure import LONE_RANKS, WARM_UP_STEPS, ModelCase, Pace, Programs

ROOT = Path(__file__).resolve().parent.parent
SHARDED, PLAIN = "sharded", "plain"
LISTED = re.compile(r"^\s*([\d,]+) \([^)]*\)\s+[^:]*:(.*?)(?: \[[^\]]*\])?$")  # 1,234 ( 5.6%)  FILE:FUNCTION [OBJECT]


def count(command: Sequence[str], case: ModelCase, steps: int, model: str) -> Counter[str]:
    """Instructions by function, of `steps` steps of the SHARDED or the PLAIN model after the warm-up."""
    in_cpp = len(command) == 2
    # C++ steps are functions of contender.cpp. From Python, all counts that is done for a line of the protocol.
    watched = ("valgrind", "--tool=callgrind", "--instr-atstart=no", *([f"--toggle-collect=*::{model}_step*"] if in_cpp else []))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "counts")
        contender = (*command, *case.arguments(), "--fake-world", str(case.world))
        with subprocess.Popen(
            (*watched, f"--callgrind-out-file={out}", *contender),
            env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": f"{ROOT}/build/python:{ROOT}/bench"},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdin
            assert process.stdout
            stdin, stdout = process.stdin, process.stdout

            def ask(verb: str, number: int) -> None:
                stdin.write(f"{verb} {number}\n")
                stdin.flush()
                replies.append(stdout.readline())

            def watch(switch: str) -> None:  # Counting makes the program fifty times as slow.
                subprocess.run(("callgrind_control", "-i", switch, str(process.pid)), check=True, capture_output=True)

            replies = [stdout.readline()]
            ask("host", WARM_UP_STEPS)
            for _ in range(1 if in_cpp else steps):
                watch("on")
                ask(*(("host", steps) if in_cpp else (model, 1)))
                watch("off")
                ask("host", 1)  # It drops the gradients.
            stdin.close()
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
    parser.add_argument("--contender", choices=LONE_RANKS, default="libfsdp")
    parser.add_argument("--binary", type=Path, default=ROOT / "build/bench/bench_contender", help="the C++ contenders")
    parser.add_argument("--world", type=int, default=8, help="ranks, of which one is there")
    parser.add_argument("--units", type=int, default=48)
    parser.add_argument("--steps", type=int, default=4, help="that are counted")
    parser.add_argument("--top", type=int, default=20, help="functions to list")
    args = parser.parse_args()
    case = host("instructions", args.world, args.units, Pace(1, 1)).model
    try:
        (launch,) = Programs(sys.executable, args.binary, frozenset((args.contender,))).launches(LONE_RANKS, (), ranks=1)
        sharded, plain = (count(launch.command, case, args.steps, model) for model in (SHARDED, PLAIN))
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
