"""Runs that hang or die, and what `fsdp why` and `fsdp timeline` say of them: while they live, after SIGKILL, and without some files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.marks import at_night
from support.ports import reserved_port

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("hanging_run.py")
COMMAND = os.environ.get("FSDP_COMMAND", "")
GUILTY = 1
SIZE = 3
PATIENCE_S = 90.0

pytestmark = pytest.mark.skipif(not COMMAND, reason="ctest says where the command is: FSDP_COMMAND")


@dataclass(frozen=True)
class Case:
    """What the command says of a run that went wrong, and what of it without the guilty rank's file."""

    expected: tuple[str, ...]
    without_file: tuple[str, ...] = ()  # Empty: the same is said of any such run.
    guilty: int | None = GUILTY  # None: no rank is to blame.
    size: int = SIZE


WAITS = "Ranks 0 and 2 have waited "
NO_FILE = ("There is no file of rank 1: it is the one that the others wait for.",)
LINE = f'File "{PROGRAM}", line '
DIFFERENT = ("the ranks make different calls: ", "There is no file of rank 1.")
FAILED = ("has failed first", "There is no file of rank 1.")
CASES = {
    "data_loader": Case(("Rank 1 is in the data loader", WAITS, "It is between steps", LINE), NO_FILE),
    "deadlock": Case(("Rank 1 has not arrived.", WAITS, "It is in forward of 'blocks.1'", LINE, "sleeps"), NO_FILE),
    "sleeps_in_backward": Case(("Rank 1 has not arrived.", WAITS, "It is in backward of 'blocks.2'", LINE), NO_FILE),
    "stopped": Case(("Rank 1 is stopped", WAITS, "It is in forward of 'blocks.1'"), NO_FILE),
    "killed": Case(("Rank 1 is dead", "It was in forward of 'blocks.1'"), ("rank 1", "There is no file of rank 1.")),
    "killed_in_gather": Case(("Rank 1 is dead", "It was in forward of 'blocks.")),
    "exit_code": Case(("Rank 1 has ended its program, which is too early",)),
    "exits_at_once": Case(("Rank 1 is dead", "It was in forward of 'blocks.1'")),
    "too_few_steps": Case(("Rank 1 has ended its program, which is too early",)),
    "no_file": Case(("There is no file of rank 1: it is the one that the others wait for.",), guilty=None),
    "chain": Case(("Rank 3 has not arrived.", "It is in forward of 'blocks.1'"), guilty=3, size=4),
    "earlier_run": Case(("Rank 1 has not arrived.", WAITS, "Not read: files of rank 5, which an earlier run has left")),
    "exception": Case(("Rank 1 has failed first", "ValueError: this batch is bad", LINE), ("no file of rank 1",)),
    "caught_exception": Case(("Rank 1 is in another call than the others",), DIFFERENT),
    "skips_a_block": Case(("Rank 1 is in another call than the others", "called the reduce-scatter of 'blocks.2'"), DIFFERENT),
    "other_order": Case(("Rank 1 is in another call than the others", "'blocks.1'"), DIFFERENT),
    "extra_collective": Case(("Rank 1 is in another call than the others",), DIFFERENT),
    "other_shapes": Case(("rank 1", "blocks.2"), ("rank 1", "blocks.2"), guilty=None),
    "full_disk": Case(("has failed first", "No space left on device", LINE), FAILED, guilty=None),
    "store_gone": Case(("has failed first", "DistNetworkError", LINE), FAILED, guilty=None),
}
QUICK = ("killed", "skips_a_block", "chain")
assert set(QUICK) <= CASES.keys()


@dataclass
class Run:
    events: Path
    errors: Path
    ranks: subprocess.Popen[bytes] | None = None  # The process that has forked them, with a session of its own.

    def why(self, *arguments: str) -> tuple[int, str]:
        begin = time.monotonic()
        done = subprocess.run([COMMAND, "why", str(self.events), *arguments], capture_output=True, text=True, check=False)
        print(f"fsdp why: {time.monotonic() - begin:.2f} s: {done.stdout}{done.stderr}")
        return done.returncode, done.stdout + done.stderr

    def wait_until(self, *expected: str, files: int = SIZE) -> str:
        """What it says, asked until all of that is in it: a run takes a while to come to its third step."""
        end = time.monotonic() + PATIENCE_S
        text = ""
        while time.monotonic() < end:
            time.sleep(0.5)
            if len(list(self.events.glob("*.events"))) < files:
                continue
            _, text = self.why()
            if all(part in text for part in expected):
                return text
        raise AssertionError(f"{expected} are not in: {text}\n{self.errors.read_text(errors='replace')}")

    def timeline(self) -> tuple[str, list[dict[str, Any]]]:
        """What `fsdp timeline` says first, and the waits that did not end, the longest first."""
        file = self.errors.with_name("trace.json")
        done = subprocess.run(
            [COMMAND, "timeline", str(self.events), "--json", str(file)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        events = json.loads(file.read_text())["traceEvents"]
        waits = [event for event in events if event.get("cat") == "wait" and "state" in event["args"]]
        return done.stdout.split("\n", 1)[1], sorted(waits, key=lambda wait: -float(wait["dur"]))

    def kill(self) -> None:
        """Ends all ranks at once."""
        assert self.ranks is not None
        processes = children_of(self.ranks.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.ranks.pid, signal.SIGKILL)
        self.ranks.wait()
        while any(lives(process) for process in processes):
            time.sleep(0.01)


@contextmanager
def started(how: str, folder: Path, *store: str, **variables: str) -> Iterator[Run]:
    """Three ranks."""
    run = Run(folder / "events", folder / "errors")
    with reserved_port() as port, run.errors.open("wb") as errors:
        settings = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(CASES[how].size if how in CASES else SIZE),
            "FSDP_EVENTS": str(run.events),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        environment = {name: value for name, value in os.environ.items() if name != "RANK"} | settings
        command = [sys.executable, str(PROGRAM), how, str(folder / "saved"), *store]
        run.ranks = subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True)
        try:
            yield run
        finally:
            run.kill()


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def children_of(process: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(process), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(child) for child in found.stdout.split()]


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A file system without room."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], check=False).returncode != 0:
        pytest.skip("this system does not let the tests mount")
    try:
        with suppress(OSError):
            (folder / "filling").write_bytes(bytes(1 << 20))
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def store_of_its_own() -> Iterator[tuple[int, int]]:
    """The process of a store, as torchrun's agent has one, and its port."""
    lines = (
        "import torch.distributed as dist, time",
        "store = dist.TCPStore('localhost', 0, is_master=True, wait_for_workers=False)",
        "print(store.port, flush=True)",
        "time.sleep(1000)",
    )
    with subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def leave_file_of_earlier_run(run: Run) -> None:
    """A file of rank 5 of 8, as a larger run has left it a while ago."""
    old = bytearray((run.events / "rank-0.events").read_bytes())
    rank, made = 16, 64  # bytes; see EventWriter: the number of ranks follows the rank
    struct.pack_into("=qq", old, rank, 5, 8)
    struct.pack_into("=q", old, made, struct.unpack_from("=q", old, made)[0] - 100 * 10**9)
    (run.events / "rank-5.events").write_bytes(old)


def check(run: Run, case: Case) -> None:
    text = run.wait_until(*case.expected, files=case.size - (case.expected == NO_FILE))
    code, _ = run.why()
    assert code == 1, text
    check_without_files(run, case)
    same_first_cause(run, case)
    run.kill()
    same_first_cause(run, case)
    _, before = run.why()
    time.sleep(0.5)
    assert run.why()[1] == before, "nobody waits any more"
    assert {file.suffix for file in run.events.iterdir()} == {".events"}, "nothing else is left"


def same_first_cause(run: Run, case: Case) -> None:
    """Both commands say the same, and the waits that did not end are all for that rank."""
    _, why = run.why()
    said, waits = run.timeline()
    first = why.partition(".")[0]
    assert said.startswith(first), (why, said)
    if case.guilty is not None:
        assert f"ank {case.guilty} " in first, why
        others = [wait for wait in waits if wait["pid"] != case.guilty]
        assert others, said
        assert {wait["args"].get("late_rank") for wait in others} == {case.guilty}, others
        assert re.search(rf"^longest wait: .*: rank {case.guilty} was ", said, re.MULTILINE), said


def check_without_files(run: Run, case: Case) -> None:
    """Whichever file is missing. That of a rank which only waits changes nothing."""
    for rank in (0, 2, GUILTY) if case.without_file else ():
        file = run.events / f"rank-{rank}.events"
        away = file.with_suffix(".away")
        file.rename(away)
        _, text = run.why()
        if rank == GUILTY:
            expected = case.without_file
        else:
            expected = tuple(re.sub(r"^Ranks 0 and 2 have waited", f"Rank {2 - rank} has waited", part) for part in case.expected)
            if case.expected[0].startswith("Rank 1 is in another call"):  # Of two that differ, none is the odd one.
                expected = ("The ranks make different calls: ", "rank 1 has called ", *case.expected[1:])
            expected = (*expected, f"There is no file of rank {rank}.")
        for part in expected:
            assert part in text, (rank, text)
        away.rename(file)


@pytest.mark.parametrize("how", [how if how in QUICK else at_night(how) for how in CASES])
def test_the_rank_and_the_reason_are_told(how: str, tmp_path: Path) -> None:
    if how == "full_disk":
        with full_disk(tmp_path / "saved"), started(how, tmp_path) as run:
            check(run, CASES[how])
    elif how == "store_gone":
        with store_of_its_own() as (process, port):
            agent = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            with started(how, tmp_path, str(process), **agent) as run:
                check(run, CASES[how])
    else:
        with started("deadlock" if how == "earlier_run" else how, tmp_path) as run:
            if how == "earlier_run":
                run.wait_until("Rank 1 has not arrived.")
                leave_file_of_earlier_run(run)
            check(run, CASES[how])


@pytest.mark.parametrize("has_addr2line", [True, False])
def test_the_line_of_a_program_in_cpp_is_told(has_addr2line: bool, tmp_path: Path) -> None:
    source = Path(__file__).with_suffix("").with_name("hanging_run.cpp")
    lines = source.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if "the line that is looked for" in line)
    run = Run(tmp_path / "events", tmp_path / "errors")
    program = os.environ["FSDP_HANGING_RUN"]
    settings = {"FSDP_EVENTS": str(run.events)}
    with run.errors.open("wb") as errors:
        ranks = subprocess.Popen([program], env=os.environ | settings, stderr=errors, start_new_session=True)
    try:
        run.wait_until("Rank 1 has not arrived.", files=2)
        path = os.environ["PATH"] if has_addr2line else ""
        done = subprocess.run([COMMAND, "why", str(run.events)], capture_output=True, text=True, env={"PATH": path})
    finally:
        for child in children_of(ranks.pid):
            os.kill(child, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    if not has_addr2line:  # The function is not exported, so that only its place in the program is known.
        assert re.search(rf"It is at \+0x[0-9a-f]+ \({re.escape(program)}\), in .*nanosleep", done.stdout), done.stdout
    elif shutil.which("addr2line"):
        assert re.search(
            rf'It is at File ".*/hanging_run\.cpp", line {number} in .*wait_for_ever\(\), in .*nanosleep', done.stdout
        ), done.stdout


@pytest.mark.nightly
def test_a_waiting_rank_says_for_whom(tmp_path: Path) -> None:
    with started("deadlock", tmp_path, FSDP_WAIT_NOTICE="1") as run:
        run.wait_until("Rank 1 has not arrived.")
        time.sleep(2.5)
        lines = run.errors.read_text().splitlines()
    for rank in (0, 2):
        (line,) = [line for line in lines if line.startswith(f"libfsdp: rank {rank} ")]
        assert re.match(
            rf"libfsdp: rank {rank} has been waiting for rank 1 for \d+ s, in the all-gather of '.*'; rank 1 was last seen in "
            r"forward of 'blocks\.1'\. `fsdp why .*events` prints more\.",
            line,
        ), line


def analysed(run: Run, folder: Path) -> str:
    """What torch's analyser says of the calls, in the format of c10d's flight recorder."""
    run.why("--flight-recorder", str(folder))
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.mark.nightly
def test_torchs_analyser_names_the_rank_that_has_not_come(tmp_path: Path) -> None:
    with started("deadlock", tmp_path) as run:
        run.wait_until("Rank 1 has not arrived.")
        text = analysed(run, tmp_path / "calls")
    assert re.search(r"collective: gloo:all_gather blocks\.\d\nmissing ranks: \{1\}", text), text


@pytest.mark.nightly
def test_torchs_analyser_names_the_rank_that_makes_another_call(tmp_path: Path) -> None:
    with started("skips_a_block", tmp_path) as run:
        run.wait_until("Rank 1 is in another call")
        text = analysed(run, tmp_path / "calls")
    assert "Culprit rank 1; Error type: COLLECTIVE_DTYPE_MISMATCH" in text, text
    assert "reduce-scatter of blocks.2" in text, text


@pytest.mark.nightly
@pytest.mark.parametrize("shared_memory", ["0", "1"])
def test_without_files_it_says_as_much_as_it_knows(shared_memory: str, tmp_path: Path) -> None:
    settings = {"FSDP_WAIT_NOTICE": "1", "FSDP_EVENTS": "", "FSDP_SHARED_MEMORY": shared_memory}
    with started("deadlock", tmp_path, **settings) as run:
        end = time.monotonic() + PATIENCE_S
        while run.errors.read_text().count("libfsdp: rank ") < SIZE - 1 and time.monotonic() < end:
            time.sleep(0.2)
        text = run.errors.read_text()
    assert re.search(r"has been waiting for rank 1 for [123] s", text), text
    if shared_memory == "1":
        assert "; the last call of rank 1 was the all-gather of 'blocks." in text, text
        assert "With FSDP_EVENTS=FOLDER, `fsdp why FOLDER` prints what it is doing." in text, text
    else:  # Ranks that share no memory may be on several hosts, and ask each other by the store.
        assert "; rank 1 was last seen in forward of 'blocks.1'. With FSDP_EVENTS=FOLDER" in text, text


@pytest.mark.nightly
def test_a_run_that_moves_is_no_hang(tmp_path: Path) -> None:
    with started("slow", tmp_path) as run:
        run.wait_until("Rank 1 is slow: it moves on")
        assert run.why()[0] == 0


@pytest.mark.nightly
def test_a_link_that_is_cut_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from harness import hosts

    run = Run(tmp_path / "events", tmp_path / "errors")
    command = (sys.executable, str(PROGRAM), "link_cut", str(tmp_path))
    try:
        network = hosts.Hosts(2, 1000)
    except hosts.HostsUnavailable as reason:
        pytest.skip(f"this machine can't make hosts: {reason}")
    with network, run.errors.open("wb") as errors:
        network.start(2, command, {"FSDP_EVENTS": str(run.events)}, errors)
        end = time.monotonic() + PATIENCE_S
        while len(list(run.events.glob("*.events"))) < 4 and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(3)
        hosts.run(*network.switch.enter("--net"), "ip", "link", "set", "port1", "down")
        time.sleep(2)
        text = run.wait_until("The link is slow or cut: all ranks of ", " for data.")
        for rank in range(4):
            file = run.events / f"rank-{rank}.events"
            file.rename(file.with_suffix(".away"))
            _, without = run.why()
            assert f"There is no file of rank {rank}" in without, (text, without)
            file.with_suffix(".away").rename(file)


def test_the_example_of_the_document_and_its_answers(tmp_path: Path) -> None:
    document = (ROOT / "docs/run/hangs.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(# late\.py\n.*?)^```$", document, re.DOTALL | re.MULTILINE)
    answer, notice = (
        text.replace("\n", " ").strip() for text in re.findall(r"^```text\n(.*?)^```$", document, re.DOTALL | re.MULTILINE)
    )
    (tmp_path / "late.py").write_text(program, encoding="utf-8")
    run = Run(tmp_path / "events", tmp_path / "errors")
    settings = {"FSDP_EVENTS": str(run.events), "FSDP_WAIT_NOTICE": "1", "OMP_NUM_THREADS": "1"}
    with run.errors.open("wb") as errors:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "late.py"]
        ranks = subprocess.Popen(
            command, env=os.environ | settings, cwd=tmp_path, stderr=errors, start_new_session=True
        )
    try:
        run.wait_until("Rank 1 has not arrived.", files=2)
        time.sleep(2.5)
        _, told = run.why()
        errors_said = run.errors.read_text()
        (said,) = [line for line in errors_said.splitlines() if line.startswith("libfsdp: rank 0 ")]
        assert "Warning" not in errors_said, errors_said
    finally:
        for child in children_of(ranks.pid):
            os.kill(child, signal.SIGKILL)
        os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()

    def without_numbers(text: str) -> str:
        text = text.replace(str(run.events), "/dev/shm/late").replace(str(tmp_path), "/home/me")
        return re.sub(r"[\d.]+ s\b", "N s", text).strip()

    assert without_numbers(told) == without_numbers(answer)
    assert without_numbers(said) == without_numbers(notice)


def test_what_is_no_file_of_events_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path, tmp_path / "errors")
    code, text = run.why()
    assert code == 2
    assert "there are no files of events: start the ranks with FSDP_EVENTS=FOLDER" in text
    (tmp_path / "rank-0.events").write_bytes(b"something else")
    code, text = run.why()
    assert code == 2
    assert "rank-0.events: no file of events" in text
    code, text = Run(tmp_path / "missing", tmp_path / "errors").why()
    assert code == 2
    assert "missing: No such file or directory" in text
