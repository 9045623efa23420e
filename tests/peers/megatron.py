"""Megatron-FSDP's own tests against Megatron-FSDP and against libfsdp, on CPU and Gloo; see docs/develop/building.md.

    PYTHONPATH=tests:build/python python -m peers.megatron --checkout DIR [--implementation megatron libfsdp] [FILE ...]

DIR is a checkout of NVIDIA/Megatron-LM, of which megatron/core/distributed/fsdp and tests/unit_tests/distributed are enough.
Outcomes are kept in the folder of --results, one file per implementation; a test that runs again replaces its own. The
table compares all that is there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from peers.megatron_ranks import PACKAGE
from peers.run import Results, Verdict, by_file, last_error, table, without_failure
from peers.sessions import Options, Outcome, run_file

IMPLEMENTATIONS = {"megatron": "", "libfsdp": "libfsdp"}  # The module whose install_megatron() is called.
FOLDER = "tests/unit_tests/distributed"
VERSIONS = ("mfsdp_v1", "mfsdp_v2")
# The tests of version 1 name their device.
TO_CPU = (
    ('torch.device("cuda", torch.cuda.current_device())', 'torch.device("cpu")'),
    ('"cuda"', '"cpu"'),
    (".cuda()", ".cpu()"),
)
OURS_TO_PROVIDE = re.escape(PACKAGE.rpartition(".")[0])
# What a failure says where the test is about something else than the implementation.
NEEDS = (
    (rf"No module named '((?!{OURS_TO_PROVIDE})[\w.]+)'", r"needs \1"),
    (rf"cannot import name '(\w+)' from '((?!{OURS_TO_PROVIDE})megatron\b[\w.]*)'", r"needs \2.\1"),
    (r"Torch not compiled with CUDA enabled", "needs CUDA"),
    (r"Cannot use ReduceOp\.(\w+) with Gloo", r"Gloo has no \1"),
)
PRIVATE = (
    (r"No module named '[\w.]+\.experimental\.dbuffer'", "private to Megatron-FSDP: DBuffer, the memory of its units"),
    (r"has no attribute '(_\w+)'", r"private to Megatron-FSDP: \1"),
    (rf"cannot import name '(_\w+)' from '{OURS_TO_PROVIDE}", r"private to Megatron-FSDP: \1"),
)
# Tests leave process groups behind, whose threads slow down those that follow: the thirtieth on eight ranks takes a minute.
MANY_RANKS = 4
MOST_TOGETHER = 10
FEW_RANKS = re.compile(r"\branks\b|world.?size|\bGPUs?\b|\bmesh\b", re.I)


def copy_tests(checkout: Path) -> Path:
    """The tests, those of version 1 for the CPU, beside a link to the peer's package."""
    copy = Path(tempfile.mkdtemp(prefix="fsdp-megatron-"))
    package = Path(*PACKAGE.split(".")[:4])
    (copy / package).parent.mkdir(parents=True)
    (copy / package).symlink_to(checkout / package)
    for version in VERSIONS:
        shutil.copytree(
            checkout / FOLDER / version, copy / FOLDER / version, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path in (copy / FOLDER / "mfsdp_v1").glob("test_mfsdp_*.py"):
        text = path.read_text()
        for old, new in TO_CPU:
            text = text.replace(old, new)
        path.write_text(text)
    return copy


def judge(outcome: Outcome | None, *, itself: bool) -> Verdict:
    """What another implementation lacks of the peer's private names is no failure of it."""
    if outcome is None or outcome.outcome in ("passed", "skipped"):
        return without_failure(outcome)
    for pattern, reason in NEEDS if itself else (*NEEDS, *PRIVATE):
        if found := re.search(pattern, outcome.text):
            return Verdict("not applicable", found.expand(reason))
    return Verdict("failed", last_error(outcome.text))


def run_on_more_ranks(options: Options, targets: list[str], most: int) -> Iterator[dict[str, Outcome]]:
    """A file's tests on two ranks; what was skipped there for want of ranks, on four, and then on eight."""
    ranks = options.ranks
    while targets and ranks <= most:
        on_so_many = Options(**{**vars(options), "ranks": ranks, "writers": ranks})
        together = MOST_TOGETHER if ranks > MANY_RANKS else len(targets)
        lacking_ranks = []
        for first in range(0, len(targets), together):
            outcomes = run_file(on_so_many, targets[first : first + together])
            yield outcomes
            lacking_ranks += [t for t, o in outcomes.items() if o.outcome == "skipped" and FEW_RANKS.search(o.text)]
        targets = lacking_ranks
        ranks *= 2


def compare(folder: Path) -> tuple[str, list[str]]:
    """The table of all outcomes, and the tests that Megatron-FSDP passes and libfsdp fails."""
    theirs, ours = (Results(name, folder).outcomes for name in IMPLEMENTATIONS)
    verdicts: dict[str, tuple[Verdict, Verdict]] = {}
    for test in sorted({*theirs, *ours}):
        file = test.partition("::")[0]  # An implementation that a file cannot import has one outcome for all of it.
        reference = judge(theirs.get(test) or theirs.get(file), itself=True)
        found = judge(ours.get(test) or ours.get(file), itself=False)
        excused = reference.word == "not applicable" and found.word == "failed"
        verdicts[test] = reference, reference if excused else found
    whole = {test for test in verdicts if "::" not in test and any(t.startswith(f"{test}::") for t in verdicts)}
    verdicts = {test: pair for test, pair in verdicts.items() if test not in whole}
    words = ("passed", "failed", "not applicable", "not run")
    counts = []
    for side, name in enumerate(IMPLEMENTATIONS):
        number = Counter(pair[side].word for pair in verdicts.values())
        counts.append((name, *(number[word] for word in words)))
    rows = [(t.removeprefix(f"{FOLDER}/"), a.word, b.word, b.reason or a.reason) for t, (a, b) in verdicts.items()]
    text = f"# Megatron-FSDP's tests on CPU and Gloo\n\n{table(('', *words), counts)}\n"
    text += table(("test", *IMPLEMENTATIONS, "reason"), rows)
    lost = [f"{test}: {b.reason}" for test, (a, b) in verdicts.items() if (a.word, b.word) == ("passed", "failed")]
    return text, lost


def parse_arguments() -> argparse.Namespace:
    """Options of `make peers MEGATRON=`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"files, or FILE::TEST, relative to {FOLDER}")
    parser.add_argument("--checkout", type=Path, required=True, help="of NVIDIA/Megatron-LM")
    parser.add_argument("--implementation", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument(
        "--results", type=Path, default=Path("build/peers/megatron"), help="folder of outcomes and of the table"
    )
    parser.add_argument("--most-ranks", type=int, default=4, help="for tests that ask for more than two")
    parser.add_argument("--test-limit", type=int, default=120, help="seconds")
    parser.add_argument("--file-limit", type=int, default=1800, help="seconds")
    return parser.parse_args()


def main() -> int:
    """Runs, writes the table, and fails if Megatron-FSDP passes what libfsdp does not."""
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the ranks are ended, too.
    tests = copy_tests(args.checkout.resolve())
    try:
        every = sorted(path.relative_to(tests / FOLDER) for path in (tests / FOLDER).glob("mfsdp_v*/test_*.py"))
        targets = [f"{FOLDER}/{target}" for target in args.targets or every]
        for name in args.implementation:
            results = Results(name, args.results)
            options = Options(
                tests=tests,
                module=IMPLEMENTATIONS[name],
                runner="peers.megatron_ranks",
                test_limit=args.test_limit,
                file_limit=args.file_limit,
            )
            for file, of_it in by_file(targets).items():
                found: dict[str, Outcome] = {}
                for outcomes in run_on_more_ranks(options, of_it, args.most_ranks):
                    found |= outcomes
                    results.add([*of_it, *found], found)
                passed = sum(o.outcome == "passed" for o in found.values())
                print(f"{name} {file}: {passed} of {len(found)} passed", flush=True)
    finally:
        shutil.rmtree(tests, ignore_errors=True)
    text, lost = compare(args.results)
    (args.results / "table.md").write_text(text)
    print(*text.split("\n")[2:6], *lost, sep="\n")
    print(f"{len(lost)} tests pass with Megatron-FSDP and fail with libfsdp; all outcomes: {args.results / 'table.md'}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
