"""Random programs until a time has passed: ``python -m differential --seconds 60``, ``--seed 17``, ``--only quiet --seeds 200``."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time

import support.comparison  # noqa: F401  # MKL's rounding, before the first product
import torch

from differential.features import WITHOUT_FSDP2, features
from differential.generate import generate
from differential.program import readable
from differential.runner import Runner
from differential.shrink import shrink

torch.set_num_threads(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="this one program")
    parser.add_argument("--from", dest="begin", type=int, help="seeds from here on; otherwise random ones")
    parser.add_argument("--seeds", type=int, default=10**9, help="so many programs at most")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--failures", type=int, default=1, help="end after so many kinds of failures")
    parser.add_argument("--only", default="", help="features or profiles, separated by commas")
    parser.add_argument("--without", default="")
    parser.add_argument(
        "--implementation",
        default="libfsdp",
        help="or fsdp2, to check the replicas, without features that it has not",
    )
    parser.add_argument("--shrink", type=float, default=90.0, help="seconds for making a failing program smaller")
    arguments = parser.parse_args()
    left_out = names(arguments.without)
    if arguments.implementation == "fsdp2":
        left_out = (*left_out, *WITHOUT_FSDP2)
    likelihood = features(names(arguments.only), left_out)
    seeds = (
        [arguments.seed]
        if arguments.seed is not None
        else itertools.count(random.randrange(10**6) * 10**3 if arguments.begin is None else arguments.begin)
    )
    runner = Runner(arguments.implementation)
    begin, programs, kinds = time.monotonic(), 0, dict[str, int]()
    try:
        for seed in itertools.islice(seeds, arguments.seeds):
            if time.monotonic() - begin > arguments.seconds or len(kinds) >= arguments.failures:
                break
            program = generate(seed, likelihood)
            programs += 1
            failure = runner.run(program)
            if programs % 100 == 0:
                print(f"{programs} programs in {time.monotonic() - begin:.0f} s, the last with seed {seed}", flush=True)
            if failure is None:
                continue
            kinds[failure.kind] = kinds.get(failure.kind, 0) + 1
            if kinds[failure.kind] > 1:
                continue
            print(f"=== seed {seed} ({programs} programs): {failure.kind}\n{failure.text}", flush=True)
            if arguments.shrink:
                small, smaller = shrink(program, failure, runner, arguments.shrink)
                print(f"--- smaller:\n{readable(small)}\n{smaller.text}", flush=True)
    finally:
        runner.end()
    print(f"{programs} programs in {time.monotonic() - begin:.0f} s, {sum(kinds.values())} failures: {kinds or 'none'}")
    return bool(kinds)


def names(text: str) -> tuple[str, ...]:
    """Of a list with commas."""
    return tuple(filter(None, text.split(",")))


sys.exit(main()) if __name__ == "__main__" else None
