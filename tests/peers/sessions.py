"""Runs a file of a peer's tests in pytest processes, until each test has an outcome."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
NO_TESTS = 5  # pytest's exit code.


@dataclass(frozen=True, kw_only=True)
class Options:
    """How tests are run."""

    tests: Path  # PyTorch's folder test/, or a copy of Megatron-LM's tests.
    module: str = ""  # What takes the peer's place, if anything.
    ranks: int = 2
    runner: str = "peers.on_cpu"  # The module that runs pytest.
    writers: int = 1  # Processes of it that each tell of all tests.
    test_limit: int = 300  # Seconds.
    file_limit: int = 1800


@dataclass
class Outcome:
    """What became of a test: passed, failed or skipped, as pytest says, and the text of its failure."""

    outcome: str
    text: str = ""
    seconds: float = 0.0


@dataclass
class Ended:
    """A pytest process that has ended: what it noted, and why it was killed, if it was."""

    events: list[Event]
    log: str
    exit_code: int
    killed: str = ""  # "test" or "file": whose time was over.
    writers: int = 1
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        phases: dict[str, list[Event]] = {}
        for event in self.events:
            if "phase" in event:
                phases.setdefault(event["test"], []).append(event)
        for test, of_it in phases.items():
            if sum(p["phase"] == "teardown" for p in of_it) == self.writers:
                # A failure of any process counts, the first one's; what one skips and another one passes has passed.
                failed = [p for p in of_it if p["outcome"] == "failed"]
                skipped = [p for p in of_it if p["outcome"] == "skipped"]
                worst = (failed or (skipped if len(skipped) == self.writers else []) or of_it)[0]
                seconds = round(sum(p["seconds"] for p in of_it) / self.writers, 2)
                self.outcomes[test] = Outcome(worst["outcome"], worst["text"], seconds)

    def collected(self) -> list[str]:
        """The tests found, in their order."""
        return next((list(e["collected"]) for e in self.events if "collected" in e), [])

    def last_started(self) -> str:
        """The test that was running when the process ended early. Of several processes, the first test that one has not ended."""
        started = [e["start"] for e in self.events if "start" in e]
        return next((test for test in started if test not in self.outcomes), started[-1] if started else "")


def run_pytest(options: Options, targets: list[str], deadline: float) -> Ended:
    """One process and the ranks it starts, which are all ended with it."""
    scratch = Path(tempfile.mkdtemp(prefix="fsdp-peers-"))
    events, log = scratch / "events", scratch / "log"
    events.touch()
    environment: Mapping[str, str] = {
        **os.environ,
        "PEERS_EVENTS": str(events),
        "PEERS_IMPLEMENTATION": options.module,
        "PEERS_RANKS": str(options.ranks),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(options.test_limit),
        "OMP_NUM_THREADS": "1",
        # Absolute, since the working directory is another there.
        "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p),
        "TMPDIR": str(scratch),
    }
    command = [sys.executable, "-m", options.runner, "-q", "--tb=short", "--rootdir", str(options.tests), *targets]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=options.tests,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        killed = wait(process, events, options.test_limit + 30, deadline)
        lines = events.read_text().splitlines()
        tail = log.read_text(errors="replace")[-3000:]
        return Ended([json.loads(line) for line in lines], tail, process.returncode or 0, killed, options.writers)
    finally:
        with contextlib.suppress(ProcessLookupError):  # None is left, if all went well.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def wait(process: subprocess.Popen[bytes], events: Path, idle_limit: float, deadline: float) -> str:
    """Waits for the end. Says whose time is over if it does not come: the test's or the file's."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = time.monotonic()
        if events.stat().st_size != size:
            size, since = events.stat().st_size, now
        if now > since + idle_limit:
            return "test"
        if now > deadline:
            return "file"
    return ""


def run_file(options: Options, targets: list[str]) -> dict[str, Outcome]:
    """The outcomes of a file's tests, or of some of them, `FILE::CLASS::TEST`.

    Where a process had to be killed, or one failure has stopped the other tests of its class, a new one runs the rest.
    """
    deadline = time.monotonic() + options.file_limit
    outcomes: dict[str, Outcome] = {}
    todo, alone = targets, list[str]()
    while todo:
        ended = run_pytest(options, todo, deadline)
        if not ended.collected():
            nothing = Outcome("failed", "Error: no test can be collected\n" + ended.log)
            if ended.exit_code == NO_TESTS:
                nothing = Outcome("skipped", "has no tests here")
            return outcomes | {test: nothing for test in todo}
        outcomes |= ended.outcomes
        running = ended.last_started()
        if running and running not in outcomes:
            why = f"did not end within {options.test_limit} s" if ended.killed else "ended pytest"
            outcomes[running] = Outcome("failed", f"Error: {why}\n{ended.log}")
        rest = [test for test in ended.collected() if test not in outcomes]
        if ended.killed == "file" or not running:
            late = Outcome("failed", "Error: not run, the file's time was over\n" + ended.log)
            return outcomes | {test: late for test in rest + alone}
        poisoned = [test for test, o in outcomes.items() if "Previous test failed" in o.text]
        for test in poisoned:
            del outcomes[test]
        alone += poisoned
        todo = rest or ([alone.pop(0)] if alone else [])
    return outcomes
