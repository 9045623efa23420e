"""Breaks the library on purpose, one small change at a time, and looks whether a test notices.

    mutants.py check ROOT                          every mutant still fits the sources, and its tests are there
    mutants.py run ROOT WORK [--only NAME] [--workshops N]
                                                   builds and tests them in WORK, a folder of their own

The mutants of a folder are in one file, e.g. tests/mutants/src/comm.diff, ordered by the source and the place that they change:

    @@ each_value_is_rounded                               the name, which no other mutant of that source has
    file: src/comm/rank_order_sum.cpp                      the source
    promise: docs/develop/design.md, Reduce in full precision    what it breaks
    test: test_comm RankOrderSum.IsBitExact                who must notice: a test program and a filter, or `adversaries`
                                                           and a name (tests/adversaries), or `pytest` and a file in a
                                                           folder of tests/python with the name of a test; one or more
     a line that stays
    -a line that goes
    +a line that comes

The lines that stay or go occur exactly once in the source. Empty lines between two mutants count for neither.

`run` skips mutants that do not fit, and then fails. It first sees that the named tests pass as the library is. A mutant
is killed when one of its tests fails, or runs into its time-out; it survived when all pass, and that makes `run` fail.
WORK/results.json keeps what came out, so that a run that was stopped goes on; a result stands until the mutant, the file
that it changes or its tests change.
"""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue

TEST = re.compile(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)", re.MULTILINE)
# Tests with parameters have a prefix and a suffix, each with a slash.
FILTER = re.compile(r"^\*?(?:\w*/)?(\w+\.(?:\w+|\*))(?:/\w+)?/?\*?$")
ADVERSARIES = "adversaries"
PYTEST = "pytest"
PYTHON_TEST = re.compile(r"^def (test_\w+)\(", re.MULTILINE)
ADVERSARY = re.compile(r'^    \{"(\w+)", \w+\},$', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: tuple[tuple[str, str], ...]  # program, filter


class MutantError(Exception):
    pass


def read_mutant(block: str) -> Mutant:
    name, *lines = block.rstrip("\n").split("\n")
    fields: dict[str, list[str]] = {"file": [], "promise": [], "test": []}
    while lines and (line := re.match(r"(file|promise|test): (.+)", lines[0])):
        fields[line[1]].append(line[2])
        del lines[0]
    if len(fields["file"]) != 1 or len(fields["promise"]) != 1 or not fields["test"] or not lines:
        raise MutantError(f"{name}: needs one `file`, one `promise`, `test`s, then the lines that it changes")
    # An editor may have taken the blank of an empty line that stays.
    marked = [line or " " for line in lines]
    if strange := [line for line in marked if line[0] not in " -+"]:
        raise MutantError(f"{name}: a line neither stays, goes nor comes: {strange[0]}")
    old, new = ("".join(f"{line[1:]}\n" for line in marked if line[0] in marks) for marks in (" -", " +"))
    ((file,), (promise,)) = fields["file"], fields["promise"]
    tests = tuple((program, pattern) for program, _, pattern in (test.partition(" ") for test in fields["test"]))
    return Mutant(f"{file}:{name}", promise, file, old, new, tests)


def read_mutants(root: Path) -> list[Mutant]:
    found: dict[str, Mutant] = {}
    for path in sorted((root / "tests" / "mutants").rglob("*.diff")):
        before, *blocks = re.split(r"^@@ ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if before or not blocks:
            raise MutantError(f"{path.relative_to(root)} does not begin with a mutant (@@)")
        for mutant in map(read_mutant, blocks):
            if mutant.name in found:
                raise MutantError(f"{mutant.name} is there twice")
            found[mutant.name] = mutant
    return list(found.values())


def mutated(root: Path, mutant: Mutant) -> str:
    """The mutant's file, changed."""
    if not (root / mutant.file).is_file():
        raise MutantError(f"{mutant.name}: there is no {mutant.file}")
    text = (root / mutant.file).read_text(encoding="utf-8")
    count = ("\n" + text).count("\n" + mutant.old)
    if count != 1:
        raise MutantError(f"{mutant.name}: its old text occurs {count} times in {mutant.file}, not once")
    if mutant.old == mutant.new:
        raise MutantError(f"{mutant.name}: changes nothing")
    return ("\n" + text).replace("\n" + mutant.old, "\n" + mutant.new)[1:]


def sources_of(root: Path, program: str) -> list[Path]:
    """The sources of a test program."""
    if program == PYTEST:
        folder = root / "tests" / "python"
        return sorted({*folder.glob("*/test_*.py"), *folder.glob("support/*.py")})
    folder = root / "tests" / (ADVERSARIES if program == ADVERSARIES else "cpp/" + program.removeprefix("test_"))
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])


@functools.cache
def test_names(root: Path, program: str) -> set[str]:
    """`Suite.Name` of every test of a program; the name of every adversary; `file::name` of every test in Python."""
    names: set[str] = set()
    for path in sources_of(root, program):
        text = path.read_text(encoding="utf-8")
        if program == PYTEST:
            names.update(f"{path.name}::{name}" for name in PYTHON_TEST.findall(text))
            continue
        names.update(".".join(match) for match in TEST.findall(text))
        if program == ADVERSARIES:
            names.update(ADVERSARY.findall(text))
    return names


def faults(root: Path, mutant: Mutant) -> list[str]:
    """Why a mutant can't be tried."""
    found = []
    try:
        mutated(root, mutant)
    except MutantError as error:
        found.append(str(error))
    for program, pattern in mutant.tests:
        names = test_names(root, program)
        if program == PYTEST:
            if pattern.partition("[")[0] not in names:
                found.append(f"{mutant.name}: tests/python has no test {pattern}")
            continue
        for part in pattern.split(":"):
            named = FILTER.match(part)
            wanted = part if named is None else named.group(1)
            suite = wanted.removesuffix("*") if wanted.endswith(".*") else None
            if wanted not in names and not (suite and any(name.startswith(suite) for name in names)):
                found.append(f"{mutant.name}: {program} has no test {part}")
    return found


def tracked_files(root: Path) -> list[str]:
    listing = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [name for name in listing.split("\0") if name and (root / name).is_file()]


def copy_tree(root: Path, copy: Path) -> None:
    """Makes `copy` hold what `root` holds; files that are the same keep their time, so that little is built anew."""
    wanted = set(tracked_files(root))
    for name in wanted:
        content = (root / name).read_bytes()
        target = copy / name
        if target.exists() and target.read_bytes() == content:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    for path in copy.rglob("*"):
        name = str(path.relative_to(copy))
        if path.is_file() and not name.startswith("build/") and name not in wanted:
            path.unlink()


class Workshop:
    """A copy of the sources and its build: clang without optimization, each source compiled by itself."""

    def __init__(self, root: Path, work: Path, jobs: int) -> None:
        self.root = root
        self.tree = work / "tree"
        self.build_dir = self.tree / "build"
        self.jobs = jobs

    def prepare(self) -> None:
        copy_tree(self.root, self.tree)
        torch = subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.utils.cmake_prefix_path)"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        settings = {
            "CMAKE_PREFIX_PATH": torch,
            "CMAKE_CXX_COMPILER": "clang++",
            "CMAKE_CXX_FLAGS_RELEASE": "-O0 -DNDEBUG",
            "CMAKE_LINK_DEPENDS_NO_SHARED": "ON",
            "CMAKE_PROJECT_libfsdp_INCLUDE": str(self.tree / "tests" / "mutants" / "quick.cmake"),
            "FSDP_BUILD_EXAMPLES": "OFF",
            "FSDP_BUILD_TOOLS": "OFF",
            "FSDP_BUILD_BENCH": "OFF",
            "FSDP_BUILD_PYTHON": "ON",
        }
        options = [f"-D{name}={value}" for name, value in settings.items()]
        command = ["cmake", "--preset", "release", "-B", str(self.build_dir), "--log-level=WARNING", *options]
        subprocess.run(command, check=True, cwd=self.tree)

    def build(self, programs: Iterable[str]) -> str:
        """Empty, or what the compiler said."""
        chosen = set(programs)
        targets = (chosen - {PYTEST}) | ({"fsdp_python", "fsdp_sim_python"} if PYTEST in chosen else set())
        command = ["ninja", "-C", str(self.build_dir), "-j", str(self.jobs), "fsdp", *sorted(targets)]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        return "" if result.returncode == 0 else (result.stdout + result.stderr)[-3000:]

    def test(self, program: str, pattern: str, limit: float) -> str:
        """ "passed", "failed" or "timed out"."""
        environment = dict(os.environ)
        if program == PYTEST:
            # The package there has links to the tree's modules.
            environment["PYTHONPATH"] = f"{self.build_dir / 'python'}:{self.build_dir / 'tests' / 'device'}"
            if pattern.startswith(("test_simulated_", "test_captured_")):
                environment["FSDP_TEST_DEVICE"] = "sim"
            file, mark, name = pattern.partition("::")
            (path,) = (self.tree / "tests" / "python").glob(f"*/{file}")
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"{path}{mark}{name}"]
        else:
            folder = self.build_dir / "tests" / (ADVERSARIES if program == ADVERSARIES else "cpp")
            # A test with parameters has more around its name.
            tests = ":".join(f"{part}:*/{part}/*" for part in pattern.split(":"))
            argument = [pattern] if program == ADVERSARIES else [f"--gtest_filter={tests}", "--gtest_fail_fast"]
            command = [str(folder / program), *argument]
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return "timed out"
        if re.search(r"^\[==========\] Running 0 tests|^(?:no tests ran|\d+ (?:skipped|deselected)) in", output, re.MULTILINE):
            raise MutantError(f"{program} has no test {pattern}")
        return "passed" if process.returncode == 0 else "failed"


def key_of(root: Path, mutant: Mutant) -> str:
    """Changes with all that a mutant's result depends on."""
    digest = hashlib.sha256(repr(mutant).encode())
    digest.update((root / mutant.file).read_bytes())
    paths = set((root / "tests" / "cpp" / "support").glob("*.h"))
    for program, pattern in mutant.tests:
        sources = sources_of(root, program)
        if program == PYTEST:  # Of the files of tests, the one that is named.
            named = pattern.partition("::")[0]
            sources = [path for path in sources if path.parent.name == "support" or path.name == named]
        paths.update(sources)
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Results:
    """What came out for each mutant, in a file that a stopped run goes on from. Two workshops may write at once."""

    def __init__(self, root: Path, record: Path, mutants: list[Mutant]) -> None:
        self.record = record
        self.keys = {mutant.name: key_of(root, mutant) for mutant in mutants}
        self.known: dict[str, dict[str, str]] = json.loads(record.read_text()) if record.exists() else {}
        self.lock = threading.Lock()

    def verdict(self, mutant: Mutant) -> str:
        known = self.known.get(mutant.name, {})
        return known.get("verdict", "") if known.get("key") == self.keys[mutant.name] else ""

    def add(self, mutant: Mutant, verdict: str, seconds: float) -> None:
        with self.lock:
            self.known[mutant.name] = {"key": self.keys[mutant.name], "verdict": verdict}
            self.record.write_text(json.dumps(self.known, indent=1, sort_keys=True))
            print(f"{mutant.name}: {verdict} ({seconds:.0f} s)", flush=True)


def try_mutant(workshop: Workshop, mutant: Mutant, limits: dict[tuple[str, str], float]) -> str:
    source = workshop.tree / mutant.file
    original = source.read_text(encoding="utf-8")
    source.write_text(mutated(workshop.tree, mutant), encoding="utf-8")
    try:
        complaint = workshop.build(program for program, _ in mutant.tests)
        if complaint:
            print(complaint)
            return "does not compile"
        for program, pattern in mutant.tests:
            seen = workshop.test(program, pattern, limits[program, pattern])
            if seen != "passed":
                return f"killed by {program} {pattern}" + (" (time-out)" if seen == "timed out" else "")
        return "survived"
    finally:
        source.write_text(original, encoding="utf-8")


def work_on(workshop: Workshop, programs: set[str], batches: "Queue[list[Mutant]]", results: Results) -> None:
    """Builds the library as it is, then tries mutants until none is left."""
    workshop.prepare()
    complaint = workshop.build(programs)
    if complaint:
        raise MutantError(complaint)
    # As the library is, all tests pass, and take so long; a busy machine may make that several times as much.
    limits: dict[tuple[str, str], float] = {}
    while True:
        try:
            batch = batches.get_nowait()
        except Empty:
            return
        new = sorted({test for mutant in batch for test in mutant.tests} - limits.keys())
        # The files are as they are in ROOT, but the last mutant is still in what was built.
        if new and (complaint := workshop.build(program for program, _ in new)):
            raise MutantError(complaint)
        for test in new:
            began = time.monotonic()
            if workshop.test(*test, limit=600) == "passed":
                limits[test] = 30 + 8 * (time.monotonic() - began)
        for mutant in batch:
            started = time.monotonic()
            can_tell = limits.keys() >= set(mutant.tests)
            verdict = try_mutant(workshop, mutant, limits) if can_tell else "not tried: its tests fail without it, too"
            results.add(mutant, verdict, time.monotonic() - started)


def run(root: Path, work: Path, mutants: list[Mutant], workshops: int) -> int:
    work.mkdir(parents=True, exist_ok=True)
    results = Results(root, work / "results.json", mutants)
    todo = [mutant for mutant in mutants if not results.verdict(mutant).startswith("killed")]
    print(f"{len(todo)} of {len(mutants)} mutants to try; building", flush=True)
    # Mutants of one file go to one workshop: restoring the file and changing it again is then one compilation.
    by_file: dict[str, list[Mutant]] = {}
    for mutant in todo:
        by_file.setdefault(mutant.file, []).append(mutant)
    batches: Queue[list[Mutant]] = Queue()
    for batch in sorted(by_file.values(), key=len, reverse=True):
        batches.put(batch)
    programs = {program for mutant in todo for program, _ in mutant.tests}
    jobs = max(1, (os.cpu_count() or 1) // workshops)
    with ThreadPoolExecutor(workshops) as pool:
        running = [
            pool.submit(work_on, Workshop(root, work / str(index), jobs), programs, batches, results)
            for index in range(workshops)
        ]
    for future in running:
        future.result()

    alive = [mutant for mutant in mutants if not results.verdict(mutant).startswith("killed")]
    print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants killed")
    for mutant in alive:
        print(f"  {mutant.name} {results.verdict(mutant) or 'was not tried'}: {mutant.promise}")
    return 1 if alive else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check")
    check.add_argument("root", type=Path)
    runner = commands.add_parser("run")
    runner.add_argument("root", type=Path)
    runner.add_argument("work", type=Path)
    runner.add_argument("--only", action="append", default=[], help="mutants whose source or name begins so")
    runner.add_argument(
        "--workshops", type=int, default=os.cpu_count() or 1, help="copies of the tree to work in at once"
    )
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    try:
        mutants = read_mutants(root)
    except MutantError as error:
        print(error)
        return 1
    if arguments.command == "run" and (begins := tuple(arguments.only)):
        mutants = [m for m in mutants if m.name.startswith(begins) or m.name.partition(":")[2].startswith(begins)]
    found = {mutant: faults(root, mutant) for mutant in mutants}
    fitting = [mutant for mutant in mutants if not found[mutant]]
    print(f"{len(fitting)} of {len(mutants)} mutants fit")
    for fault in itertools.chain(*found.values()):
        print(f"  {fault}")
    failed = run(root, arguments.work.resolve(), fitting, arguments.workshops) if arguments.command == "run" else 0
    return 1 if failed or len(fitting) < len(mutants) else 0


if __name__ == "__main__":
    sys.exit(main())
