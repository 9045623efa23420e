"""PyTorch's own tests of FSDP2 against FSDP2 and against libfsdp, on CPU and Gloo; see docs/develop/building.md.

    PYTHONPATH=tests:build/python python -m peers.run --tests DIR [--implementation fsdp2 libfsdp] [--subset FILE]

Outcomes are kept in the folder of --results, one file per implementation; a test that runs again replaces its own. The
table compares all that is there.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peers.private_use import use_of
from peers.sessions import Options, Outcome, run_file

IMPLEMENTATIONS = {"fsdp2": "", "libfsdp": "libfsdp"}  # The module whose install() is called.
FOLDER = "distributed/_composable/fsdp/test_fully_shard_"
NAMES = (
    "autograd clip_grad_norm_ comm compile dtensor extensions frozen grad_scaler ignore_params init logging memory "
    "mixed_precision overlap state state_dict training"
)
FILES = (
    *(f"{FOLDER}{name}.py" for name in NAMES.split()),
    "distributed/_composable/test_composability/test_2d_composability.py",
    "distributed/_composable/test_replicate_with_fsdp.py",
    "distributed/_tools/test_fsdp2_mem_tracker.py",
    "distributed/checkpoint/e2e/test_e2e_save_and_load.py",
    "distributed/checkpoint/e2e/test_fine_tuning.py",
    "distributed/checkpoint/e2e/test_fsdp_ep.py",
    "distributed/checkpoint/fsdp/test_fsdp_dsd.py",
    "distributed/checkpoint/test_fsdp_model_state.py",
    "distributed/checkpoint/test_fsdp_optim_state.py",
    "distributed/checkpoint/test_fsdp_tp_checkpoint_conversion.py",
    "distributed/checkpoint/test_state_dict.py",
)
# What FSDP2's own failure says where the test is about an accelerator.
NEEDS = (
    (r"Torch not compiled with CUDA enabled", "needs CUDA"),
    (r"FSDP needs a non-CPU accelerator", "uses FSDP1, which needs an accelerator"),
    (r"Cannot access accelerator device when none", "needs an accelerator"),
    (r"Cannot use ReduceOp\.(\w+) with Gloo", r"Gloo has no \1"),
    (r"already be moved to device cpu:0", "numbers its device: cpu:0"),
    (r"module 'torch\.cpu' has no attribute '(\w+)'", r"needs the device's \1"),
    (r"CPU's batch_norm|mixed dtype \(CPU\)", "CPU's batch_norm takes no mixed types"),
)
NEEDS_BY_NAME = {
    "test_gradient_scaler": "takes the device's number for the rank",
    "test_move_states_to_device_dtensor_invalid": "needs two kinds of device",
    "test_setting_meta_device_model_broadcasting_and_memory": "needs memory statistics",
    "test_norm_modules_bf16": "CPU's batch_norm takes no mixed types",
    "test_norm_modules_fp16": "CPU's batch_norm takes no mixed types",
}


@dataclass(frozen=True)
class Verdict:
    """A cell of the table."""

    word: str  # passed, failed, not applicable, not run
    reason: str = ""


class Results:
    """The outcomes of an implementation, kept in a file."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.path = folder / f"{name}.json"
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.outcomes = {test: Outcome(**fields) for test, fields in known.items()}

    def add(self, targets: Sequence[str], outcomes: dict[str, Outcome]) -> None:
        """Keeps the outcomes of targets at once, so that a run that is stopped has not run in vain."""
        self.outcomes = {test: o for test, o in self.outcomes.items() if test not in targets} | outcomes
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({t: asdict(o) for t, o in self.outcomes.items()}, indent=1) + "\n")


def last_error(text: str) -> str:
    """The error of the first traceback, which is of the rank that failed first."""
    lines = re.findall(r"^(?:E +)?((?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*)", text, re.M)
    lines = [line for line in lines if not re.match(r"RuntimeError: (Process|Thread) \d", line)]
    return (lines[0] if lines else text.strip()[-200:])[:200]


def without_failure(outcome: Outcome | None) -> Verdict:
    """Of a test that did not run, passed, or was skipped."""
    if outcome is None:
        return Verdict("not run")
    if outcome.outcome == "passed":
        return Verdict("passed")
    return Verdict("not applicable", outcome.text.removeprefix("Skipped: "))


def judge_fsdp2(test: str, outcome: Outcome | None) -> Verdict:
    """Where FSDP2 itself fails for want of an accelerator, the test is not applicable."""
    if outcome is None or outcome.outcome in ("passed", "skipped"):
        return without_failure(outcome)
    for pattern, reason in NEEDS:
        if found := re.search(pattern, outcome.text):
            return Verdict("not applicable", found.expand(reason))
    if reason := NEEDS_BY_NAME.get(test.rpartition("::")[2], ""):
        return Verdict("not applicable", reason)
    return Verdict("failed", last_error(outcome.text))


def judge(test: str, outcome: Outcome | None, fsdp2: Verdict, private: Iterable[str]) -> Verdict:
    """Another implementation has the excuses of FSDP2, and one more: it lacks FSDP2's private classes."""
    if outcome is None or outcome.outcome in ("passed", "skipped"):
        return without_failure(outcome)
    if fsdp2.word == "not applicable":
        return fsdp2
    if private:
        return Verdict("not applicable", "private to FSDP2: " + ", ".join(sorted(private)))
    return Verdict("failed", last_error(outcome.text))


def private_use(tests: Path, test: str) -> set[str]:
    """FSDP2's private things in a test, by its id."""
    file, _, rest = test.partition("::")
    owner, _, method = rest.partition("::")
    return use_of(tests / file, owner, method.split("[")[0]).private if method else set()


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A markdown table."""

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join((line(head), "|" + " --- |" * len(head), *map(line, lines))) + "\n"


def compare(tests: Path, folder: Path) -> tuple[str, list[str]]:
    """The table of all outcomes, and the tests that FSDP2 passes and libfsdp fails."""
    fsdp2, ours = (Results(name, folder).outcomes for name in IMPLEMENTATIONS)
    verdicts: dict[str, tuple[Verdict, Verdict]] = {}
    for test in sorted({*fsdp2, *ours}):
        reference = judge_fsdp2(test, fsdp2.get(test))
        verdicts[test] = reference, judge(test, ours.get(test), reference, private_use(tests, test))
    words = ("passed", "failed", "not applicable", "not run")
    counts = [
        (name, *(sum(pair[side].word == word for pair in verdicts.values()) for word in words))
        for side, name in enumerate(IMPLEMENTATIONS)
    ]
    rows = [
        (test, a.word, b.word, b.reason or a.reason) if b.word != "not run" else (test, a.word, b.word, a.reason)
        for test, (a, b) in verdicts.items()
    ]
    text = f"# PyTorch's FSDP2 tests on CPU and Gloo\n\n{table(('', *words), counts)}\n"
    text += table(("test", *IMPLEMENTATIONS, "reason"), rows)
    lost = [f"{test}: {b.reason}" for test, (a, b) in verdicts.items() if (a.word, b.word) == ("passed", "failed")]
    return text, lost


def read_subset(path: Path) -> list[str]:
    """Ids of tests, one a line; `#` begins a comment."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def by_file(targets: Iterable[str]) -> dict[str, list[str]]:
    """Targets of the same file are run by one pytest process."""
    files: dict[str, list[str]] = {}
    for target in targets:
        files.setdefault(target.partition("::")[0], []).append(target)
    return files


def parse_arguments() -> argparse.Namespace:
    """Options of `make peers`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="files, or FILE::CLASS::TEST, relative to --tests")
    parser.add_argument("--tests", type=Path, required=True, help="the folder test/ of PyTorch's sources")
    parser.add_argument("--implementation", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--subset", type=Path, help="a file of test ids, to run no others")
    parser.add_argument("--results", type=Path, default=Path("build/peers"), help="folder of outcomes and of the table")
    parser.add_argument("--ranks", type=int, default=2, help="of a test that takes as many as there are")
    parser.add_argument("--test-limit", type=int, default=300, help="seconds")
    parser.add_argument("--file-limit", type=int, default=1800, help="seconds")
    return parser.parse_args()


def main() -> int:
    """Runs, writes the table, and fails if FSDP2 passes what libfsdp does not."""
    args = parse_arguments()
    tests = args.tests.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the ranks are ended, too.
    targets = read_subset(args.subset) if args.subset else args.targets or FILES
    for name in args.implementation:
        results = Results(name, args.results)
        options = Options(
            tests=tests,
            module=IMPLEMENTATIONS[name],
            ranks=args.ranks,
            test_limit=args.test_limit,
            file_limit=args.file_limit,
        )
        for file, of_it in by_file(targets).items():
            outcomes = run_file(options, of_it)
            results.add(of_it, outcomes)
            passed = sum(o.outcome == "passed" for o in outcomes.values())
            print(f"{name} {file}: {passed} of {len(outcomes)} passed", flush=True)
    text, lost = compare(tests, args.results)
    (args.results / "table.md").write_text(text)
    print(*text.split("\n")[2:6], *lost, sep="\n")
    print(f"{len(lost)} tests pass with FSDP2 and fail with libfsdp; all outcomes: {args.results / 'table.md'}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
