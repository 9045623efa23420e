"""PYTHONPATH=bench hosts_test.py PROGRAM: ranks on several hosts (bench/harness/hosts.py) train what one process would.

They send what they should, and no more.
Ends with 77, and says why, where this machine can't make hosts.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.hosts import DEVICE, Hosts, HostsUnavailable

SKIPPED = 77
MBIT = 1000
LATENCY_MS = 2
LIMIT_S = 120
REPORT = re.compile(r"^rank \d+: the bits of one process; data (\d+) shared (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """How many ranks train where, with which environment variables."""

    hosts: int
    ranks_per_host: int
    variables: dict[str, str] = field(default_factory=dict)
    latency_ms: float = 0

    @property
    def shares(self) -> bool:
        """The ranks of one host read each other's memory."""
        return self.ranks_per_host > 1 and self.variables.get("FSDP_SHARED_MEMORY") != "0"


class Failure(Exception):
    pass


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Failure(what)


def train(program: str, case: Case) -> tuple[int, int, int]:
    """Bytes of gathers and reductions that all ranks sent, how many of them in shared memory, and what crossed the links."""
    with Hosts(case.hosts, MBIT, case.latency_ms) as network, tempfile.TemporaryFile() as output:
        # The variable may turn shared memory off for all other tests.
        ranks = network.start(case.ranks_per_host, (program,), {"FSDP_SHARED_MEMORY": "1", **case.variables}, output)
        deadline = time.monotonic() + LIMIT_S
        codes = [rank.wait(deadline - time.monotonic()) for rank in ranks]
        crossed = sum(network.sent_bytes())
        output.seek(0)
        text = output.read().decode(errors="replace")
        expect(codes == [0] * len(ranks), f"exit codes {codes}:\n{text}")
        reports = REPORT.findall(text)
        expect(len(reports) == len(ranks), f"not every rank has said what it sent:\n{text}")
    return sum(int(data) for data, _ in reports), sum(int(shared) for _, shared in reports), crossed


def check_training(program: str, case: Case) -> None:
    """The ranks compare the model themselves. Here: bytes on the links."""
    ranks = case.hosts * case.ranks_per_host
    data, shared, crossed = train(program, case)
    # By shared memory, every byte crosses once per host. By messages between all pairs, what a rank owns, or owes another one, goes to each
    # of the ranks of other hosts by itself.
    crossings = case.hosts - 1 if case.shares else ranks - case.ranks_per_host
    least = data * crossings // (ranks - 1)
    print(
        f"{case}: {data} bytes of data, {shared} shared, {crossed} crossed the links, of which {least} had to",
        flush=True,
    )
    expect(shared == (data - least if case.shares else 0), f"{case}: the ranks say that they share {shared} bytes")
    # Beside the data: headers of packets and of collectives, how the ranks meet, and what they agree upon.
    expect(
        least <= crossed <= 1.05 * least + 1_000_000,
        f"{case}: {crossed} bytes crossed the links, expected {least} and few more",
    )


def processes_named(name: str) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if name in (folder / "cmdline").read_text().split("\0"):
                yield int(folder.name)
        except OSError:
            continue  # It has ended.


def check_end(sent: signal.Signals) -> None:
    """Whoever made hosts and ends leaves no process behind, however it ends."""
    # Hosts with a sleeper on each; the number of seconds is the sleepers' name.
    seconds = str(100_000 + os.getpid())
    lines = (
        "import subprocess, sys",
        "from harness.hosts import Hosts",
        "with Hosts(2, 100) as hosts:",
        f"    ranks = hosts.start(1, ('sleep', '{seconds}'), {{}}, subprocess.DEVNULL)",
        "    print('started', flush=True)",
        "    ranks[0].wait()",
    )
    command = (sys.executable, "-c", "\n".join(lines))
    maker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert maker.stdout is not None
    expect(maker.stdout.readline() == "started\n", "the hosts were not made")
    deadline = time.monotonic() + 20
    while len([pid for pid in processes_named(seconds) if is_program(pid, "sleep")]) < 2:
        expect(time.monotonic() < deadline, "the hosts' processes have not come")
        time.sleep(0.05)
    maker.send_signal(sent)
    maker.wait(20)
    while left := [*processes_named(seconds)]:
        expect(time.monotonic() < deadline, f"after {sent.name}, processes {left} are still there")
        time.sleep(0.05)
    maker.stdout.close()


def is_program(pid: int, name: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == name
    except OSError:
        return False


def why_not(latency_ms: float = 0) -> str:
    """Why this machine can't make hosts; empty if it can."""
    try:
        with Hosts(2, MBIT, latency_ms):
            return ""
    except HostsUnavailable as reason:
        return str(reason)


def main() -> int:
    (program,) = sys.argv[1:]
    if reason := why_not():
        print(f"skipped: this machine can't make hosts: {reason}")
        return SKIPPED
    try:
        for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            check_end(sent)
        check_training(program, Case(2, 2, {"FSDP_SHARED_MEMORY": "0"}))
        check_training(program, Case(2, 2))
        check_training(program, Case(4, 1, {"GLOO_SOCKET_IFNAME": f"{DEVICE},lo"}))
        if reason := why_not(LATENCY_MS):
            print(f"no training with a latency: {reason}")
        else:
            check_training(program, Case(4, 1, latency_ms=LATENCY_MS))
    except Failure as failure:
        print(failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
