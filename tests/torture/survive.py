"""Kills ranks of a training run on two hosts at random moments, and starts all again: it goes on from the memory of hosts.

    survive.py --train-gpt PATH --fsdp-ckpt PATH [--kills 200] [--hosts 50] [--seed N] [--network] [--wait]

`--kills` SIGKILLs hit one rank; `--hosts` hit all ranks of a host, whose folder in memory is removed, too. Ranks with
folders of their own stand for hosts; with --network, so do network and process namespaces (bench/harness/hosts.py).
Nothing is saved to the disk before the end of a run, so each restart that goes on has read from memory only. Each restart
takes the newest step that was complete in memory when the last rank had ended, and nothing hangs. As a save waits for the
one before, no more steps are repeated than lie between three saves. With --wait, training waits for each save, and no more
are repeated than lie between two. When a run is through, its checkpoint must have the bits of a run without kills, and no
folder may be left in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))  # its support
from support.ports import reserved_port

HOSTS, RANKS_PER_HOST = 2, 2
RANKS = HOSTS * RANKS_PER_HOST
STEPS, EVERY = 60, 2
# As in torture.py: a small model, so that most of the time is saves and restarts.
OPTIONS: dict[str, object] = {"dim": 16, "layers": 2, "heads": 2, "context": 16, "batch": 4, "warmup": 2, "lr": 0.01}
OPTIONS |= {"eval-every": 1000000, "eval-sequences": 2, "sample-tokens": 0, "steps": STEPS, "save-every": 1000000}
OPTIONS |= {"memory-every": EVERY, "resume": "auto"}
MOST_STEPS_BEFORE_KILL = 12
PATIENCE = 300.0


if TYPE_CHECKING:
    from harness.hosts import Hosts


class Violation(Exception):
    pass


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Attempt:
    """The ranks of one start."""

    def __init__(self, survive: Survive, run: Path) -> None:
        self.run = run
        self.output = run.parent / f"{run.name}.out"
        self.ranks = []
        with self.output.open("a") as output:
            for rank in range(RANKS):
                host = rank // RANKS_PER_HOST
                options = OPTIONS | {"data": survive.text, "run": run, "memory": survive.memory(run, host)}
                options |= {"memory-wait": "true"} if survive.waits else {}
                command = [str(survive.train_gpt), *(f"--{name}={value}" for name, value in options.items())]
                where = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": survive.port}
                environment = {name: str(value) for name, value in where.items()}
                if survive.network is not None:
                    command = [*survive.network.hosts[host].prefix, *command]
                    environment = survive.network.environments(RANKS_PER_HOST)[rank]
                self.ranks.append(
                    subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
                )

    def seen(self) -> tuple[int, int, int]:
        """How often the run has begun, the step from which it went on the last time, and the last step since then."""
        begins = resumed = last = 0
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            for line in (self.run / "log.jsonl").read_text().splitlines():
                row = json.loads(line)
                if "ranks" in row:
                    begins, resumed, last = begins + 1, 0, 0
                resumed = int(row.get("resumed", resumed))
                last = int(row["step"]) if "loss" in row else last
        return begins, resumed, last

    def wait_for_step(self, begins: int, step: int) -> bool:
        """Waits for a step of the last start. False if the ranks ended first."""
        deadline = time.monotonic() + PATIENCE
        while self.seen()[0] < begins or self.seen()[2] < step:
            if any(rank.poll() is not None for rank in self.ranks):
                return False
            require(time.monotonic() < deadline, f"nothing happens any more; see {self.output}")
            time.sleep(0.002)
        return True

    def kill(self, ranks: range) -> None:
        for rank in ranks:
            process = self.ranks[rank]
            for pid in [*children_of(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def wait(self) -> list[int]:
        deadline = time.monotonic() + PATIENCE
        try:
            return [rank.wait(max(0.0, deadline - time.monotonic())) for rank in self.ranks]
        except subprocess.TimeoutExpired:
            raise Violation(f"a rank hangs; see {self.output}") from None


class Survive:
    def __init__(self, arguments: argparse.Namespace, port: int, folder: Path, shm: Path) -> None:
        self.port = port
        self.train_gpt, self.fsdp_ckpt = arguments.train_gpt, arguments.fsdp_ckpt
        self.folder, self.shm = folder, shm
        self.random = random.Random(arguments.seed)
        self.text = folder / "text.txt"
        self.text.write_text("".join(f"the quick brown fox {i % 7}\n" for i in range(2000)))
        self.network: Hosts | None = None
        self.waits = arguments.wait
        self.seconds: list[float] = []
        self.repeated: list[int] = []
        self.runs = self.from_the_beginning = self.under_way = 0

    def memory(self, run: Path, host: int) -> Path:
        return self.shm / f"host{host}" / run.name

    def newest_in_memory(self, run: Path) -> int:
        """The newest step that a host holds, which then has the files of both; 0 if there is none."""
        steps = [path for host in range(HOSTS) for path in self.memory(run, host).glob("step-*")]
        return max((int(path.name.removeprefix("step-")) for path in steps), default=0)

    def checkpoint(self, run: Path) -> Path:
        return run / "checkpoints" / f"step-{STEPS}"

    def train(self, name: str, kills: list[bool]) -> list[bool]:
        """A run to its end, with kills of hosts (True) and of ranks. Returns the kills that are left."""
        run = self.folder / name
        attempt, begins = Attempt(self, run), 1
        has_copies = True
        while kills:
            _, resumed, last = attempt.seen()
            of_host = kills[0]
            # After the loss of a host, the other one has the only files, until the next step in memory is complete.
            least = 1 if has_copies or not of_host else 2 * EVERY + 1
            if not attempt.wait_for_step(
                begins, max(resumed, last) + self.random.randrange(least, MOST_STEPS_BEFORE_KILL)
            ):
                break
            time.sleep(self.random.uniform(0, 0.02))
            has_copies = has_copies or attempt.seen()[2] > attempt.seen()[1] + 2 * EVERY
            host = self.random.randrange(HOSTS)
            one = self.random.randrange(RANKS)
            first = host * RANKS_PER_HOST
            attempt.kill(range(first, first + RANKS_PER_HOST) if of_host else range(one, one + 1))
            killed_at = time.monotonic()
            if attempt.wait() == [0] * RANKS:
                break  # it was through
            reached = attempt.seen()[2]
            if self.checkpoint(run).exists():  # only its last collectives were missing
                attempt, begins = Attempt(self, run), begins + 1
                break
            del kills[0]
            if of_host:
                has_copies = False
                shutil.rmtree(self.memory(run, host), ignore_errors=True)
            newest = self.newest_in_memory(run)
            attempt, begins = Attempt(self, run), begins + 1
            made = attempt.wait_for_step(begins, 1)
            self.seconds.append(time.monotonic() - killed_at)
            seen, resumed, _ = attempt.seen()
            require(made or seen == begins, f"a restart failed; see {attempt.output}")
            require(resumed == newest, f"went on from {resumed}, and {newest} was complete; see {attempt.output}")
            self.from_the_beginning += resumed == 0
            self.under_way += reached // EVERY * EVERY > resumed
            self.repeated.append(reached - resumed)
            most = EVERY if self.waits else 2 * EVERY
            require(reached - resumed <= most, f"{reached - resumed} steps are repeated; see {attempt.output}")
        codes = attempt.wait()
        require(codes == [0] * RANKS, f"exit codes {codes}; see {attempt.output}")
        left = [str(path) for host in range(HOSTS) for path in (self.shm / f"host{host}").glob("*")]
        require(not left, f"left in memory: {left}")
        self.runs += 1
        return kills

    def compare(self, name: str) -> None:
        paths = [self.checkpoint(self.folder / one) for one in ("whole", name)]
        command = [self.fsdp_ckpt, "diff", *paths, "--ignore", "extra.", "--ignore", "fsdp.rng"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        require(done.returncode == 0, f"{name} is another run than one without kills:\n{done.stdout}{done.stderr}")

    def all(self, kills: list[bool]) -> None:
        self.train("whole", [])
        self.random.shuffle(kills)
        for number in range(1000000):
            if not kills:
                return
            kills = self.train(f"run-{number}", kills)
            self.compare(f"run-{number}")
            shutil.rmtree(self.folder / f"run-{number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-gpt", type=Path, required=True)
    parser.add_argument("--fsdp-ckpt", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--network", action="store_true")
    parser.add_argument("--wait", action="store_true")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as shm, contextlib.ExitStack() as stack:
        survive = Survive(arguments, stack.enter_context(reserved_port()), Path(folder), Path(shm))
        if arguments.network:
            sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
            from harness.hosts import Hosts

            survive.network = stack.enter_context(Hosts(HOSTS, mbit=10000))
        try:
            survive.all([False] * arguments.kills + [True] * arguments.hosts)
        except Violation as violation:
            print(violation)
            for output in Path(folder).glob("*.out"):
                print(f"{output}:\n{output.read_text()[-4000:]}")
            sys.exit(1)
    times = sorted(survive.seconds)
    print(
        f"all well: {arguments.kills} kills of a rank, {arguments.hosts} of a host with its memory, {survive.runs} runs with the bits of "
        f"one without kills; {statistics.mean(survive.repeated):.1f} steps repeated (mean), {max(survive.repeated)} at most, with a save "
        f"every {EVERY}; {survive.under_way} kills while a save was under way, {survive.from_the_beginning} restarts from the beginning; "
        f"from the kill to the next step {statistics.median(times):.1f} s (median), {times[-1]:.1f} s at most"
    )


if __name__ == "__main__":
    main()
