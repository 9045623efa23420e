"""Kills training runs (SIGKILL) at random moments, during saves above all, and restarts them, as a scheduler would.

    torture.py --train-gpt PATH --fsdp-ckpt PATH [--kills 200] [--seed N] [--folder DIR]

After each kill: the newest checkpoint is whole and not older than any that was seen before, nothing hangs, and the
restart goes on from it. When a run is through, its last checkpoint must have the bits of a run without kills. Exits
with 1 at the first violation, and keeps the folder then.
"""

import argparse
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RANKS = 2
STEPS = 60
# Small enough that most of a step is its save.
OPTIONS: dict[str, object] = {"dim": 16, "layers": 2, "heads": 2, "context": 16, "batch": 4, "warmup": 2, "lr": 0.01}
OPTIONS |= {"eval-every": 1000000, "eval-sequences": 2, "sample-tokens": 0}
OPTIONS |= {"nproc": RANKS, "steps": STEPS, "save-every": 1, "keep-last": 2, "resume": "auto"}
SHARE_DURING_SAVES = 0.8
SHARE_OF_ALL_RANKS = 0.5
MOST_OF_A_SAVE = 0.8
"""Of the time that one typically takes: after its first sign, when to kill."""
LONGEST_RUN = 2.0
"""Seconds after the start within which to kill, otherwise: starting and loading included."""
PATIENCE = 120.0
"""Seconds after which something hangs. A rank that has lost the others knows at once; a loaded machine may be slow."""
POLL = 0.0005


class Violation(Exception):
    pass


@dataclass
class Summary:
    kills: int = 0
    during_saves: int = 0
    unfinished: int = 0
    """Saves that were not completed by the ranks that lived on."""
    of_all_ranks: int = 0
    restarts: int = 0
    runs: int = 0
    most_steps_lost: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.during_saves} during a save, {self.unfinished} of which it ended; "
            f"{self.of_all_ranks} of all ranks at once), {self.restarts} restarts, {self.runs} runs to the end, "
            f"at most {self.most_steps_lost} steps lost"
        )


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def steps_in(folder: Path) -> list[int]:
    """Of the checkpoints that have their names."""
    try:
        return sorted(int(name.removeprefix("step-")) for name in os.listdir(folder) if name.startswith("step-"))
    except FileNotFoundError:
        return []


def temporary_in(folder: Path) -> set[str]:
    try:
        return {name for name in os.listdir(folder) if name.startswith(".")}
    except FileNotFoundError:
        return set()


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


class Run:
    """A process of train_gpt with its ranks, which goes on from the newest checkpoint."""

    def __init__(self, train_gpt: Path, folder: Path, name: str, text: Path) -> None:
        self.saves = folder / "saves"
        self.log = folder / f"{name}.jsonl"
        self.output = folder / f"{name}.out"
        options = OPTIONS | {"data": text, "log": self.log, "save": self.saves}
        command = [str(train_gpt), *(f"--{name}={value}" for name, value in options.items())]
        self.left_before = temporary_in(self.saves)
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def is_saving(self) -> bool:
        """It has made something temporary."""
        return not temporary_in(self.saves) <= self.left_before

    def rows(self) -> list[dict[str, float]]:
        """What it has logged; its last line may be half written."""
        rows = []
        for line in self.log.read_text().splitlines() if self.log.exists() else []:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def resumed_from(self) -> int:
        """The step, or 0 if it began anew."""
        return int(next((row["resumed"] for row in self.rows() if "resumed" in row), 0))

    def last_step(self) -> int:
        return int(max((row["step"] for row in self.rows() if "loss" in row), default=0))

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """False if the run ended first."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise Violation(f"nothing happens any more; see {self.output}")
            time.sleep(POLL)
        return True

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise Violation(f"process {self.process.pid} hangs; see {self.output}") from None

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Whatever is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Torture:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.random = random.Random(arguments.seed)
        self.summary = Summary()
        self.text = folder / "text.txt"
        self.text.write_text("".join(f"the quick brown fox {i % 7}\n" for i in range(2000)))
        self.newest_seen = 0
        self.starts = 0
        self.typical_save = 0.0
        """Seconds; measured in the run without kills."""

    def tool(self, *arguments: str | Path) -> None:
        done = subprocess.run([self.arguments.fsdp_ckpt, *arguments], capture_output=True, text=True, timeout=PATIENCE)
        require(done.returncode == 0, f"fsdp-ckpt {' '.join(map(str, arguments))}:\n{done.stdout}{done.stderr}")

    def start(self, folder: Path) -> Run:
        self.starts += 1
        return Run(self.arguments.train_gpt, folder, f"run-{self.starts}", self.text)

    def see(self, saves: Path) -> bool:
        """Notes the newest checkpoint. Always true, to be part of a condition."""
        self.newest_seen = max([self.newest_seen, *steps_in(saves)])
        return True

    def measure_saves(self, run: Run) -> None:
        """Watches a run until its end."""
        times = []
        while run.wait_for(run.is_saving):
            begin = time.monotonic()
            run.wait_for(lambda: not run.is_saving())
            times.append(time.monotonic() - begin)
        self.typical_save = statistics.median(times) if times else 0.0

    def wait_for_moment(self, run: Run) -> list[int]:
        """Until the moment to kill has come. The ranks there are; none if the run ended before, or has not begun."""
        ranks: list[int] = []
        if self.random.random() < SHARE_DURING_SAVES:
            first = self.newest_seen + self.random.randrange(4)

            def is_on_its_way() -> bool:
                if self.see(run.saves) and self.newest_seen >= first:
                    ranks[:] = children_of(run.process.pid)  # Not later: to look for them takes as long as a save.
                return len(ranks) == RANKS

            if not run.wait_for(is_on_its_way) or not run.wait_for(run.is_saving):
                return []
            time.sleep(self.random.uniform(0, MOST_OF_A_SAVE * self.typical_save))
        else:
            time.sleep(self.random.uniform(0, LONGEST_RUN))
            ranks = children_of(run.process.pid)
        self.see(run.saves)
        return ranks if run.process.poll() is None else []

    def kill(self, run: Run, ranks: list[int]) -> bool:
        """False if there was nothing to kill any more."""
        saving = run.is_saving()
        if self.random.random() < SHARE_OF_ALL_RANKS:
            run.kill([run.process.pid, *ranks])
            run.end()
            self.summary.of_all_ranks += 1
        else:
            run.kill([self.random.choice(ranks)])
            if run.wait() == 0:
                return False  # It was through.
            run.end()
        self.summary.during_saves += saving
        return True

    def check(self, run: Run) -> None:
        """After a kill."""
        steps = steps_in(run.saves)
        newest = steps[-1] if steps else 0
        require(
            newest >= self.newest_seen,
            f"the newest checkpoint is of step {newest}, although there was one of step {self.newest_seen}",
        )
        self.newest_seen = newest
        if newest > 0:
            self.tool("verify", run.saves / f"step-{newest}")
        self.summary.unfinished += run.is_saving()
        self.summary.most_steps_lost = max(self.summary.most_steps_lost, run.last_step() - newest)

    def check_resumed(self, run: Run, expected: int) -> None:
        """As soon as the run has made a step, or when it has ended."""
        if expected > 0 and run.last_step() > 0:
            found = run.resumed_from()
            require(found == expected, f"{run.output} went on from step {found}; the newest was {expected}")

    def run_to_the_end(self, folder: Path, kills: int) -> None:
        """A training run of STEPS steps, with so many kills at most."""
        folder.mkdir()
        self.newest_seen = 0
        left = kills
        while True:
            resumes_from = self.newest_seen
            run = self.start(folder)
            try:
                ranks = self.wait_for_moment(run) if left > 0 else []
                if ranks and self.kill(run, ranks):
                    self.check_resumed(run, resumes_from)
                    self.check(run)
                    self.summary.kills += 1
                    self.summary.restarts += 1
                    left -= 1
                    continue
                if kills == 0:
                    self.measure_saves(run)
                code = run.wait()
                require(code == 0, f"a run that nobody killed ended with {code}:\n{run.output.read_text()}")
                self.check_resumed(run, resumes_from)
                require(steps_in(run.saves)[-1] == STEPS, f"the last checkpoint in {run.saves} is not of step {STEPS}")
                if run.last_step() > 0:  # It has saved, and removed what others left.
                    require(not temporary_in(run.saves), f"something temporary is left in {run.saves}")
                return
            finally:
                run.end()

    def run(self) -> None:
        self.run_to_the_end(self.folder / "reference", 0)
        expected = self.folder / "reference" / "saves" / f"step-{STEPS}"
        self.tool("verify", expected)
        print(f"  a save takes {1e3 * self.typical_save:.0f} ms", flush=True)
        while self.summary.kills < self.arguments.kills:
            folder = self.folder / "killed"
            self.run_to_the_end(folder, self.arguments.kills - self.summary.kills)
            final = folder / "saves" / f"step-{STEPS}"
            self.tool("verify", final)
            self.tool("diff", expected, final, "--ignore", "extra.seconds", "--ignore", "fsdp.rng")
            shutil.rmtree(folder)
            self.summary.runs += 1
            print(f"  {self.summary}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-gpt", type=Path, required=True)
    parser.add_argument("--fsdp-ckpt", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--folder", type=Path, help="for checkpoints and logs; on the disk to be tested")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=arguments.folder))
    print(f"seed {arguments.seed}, {RANKS} ranks, {STEPS} steps, in {folder}", flush=True)
    begin = time.monotonic()
    torture = Torture(arguments, folder)
    try:
        torture.run()
    except Violation as violation:
        print(f"VIOLATION (seed {arguments.seed}; files are kept in {folder}): {violation}\n{torture.summary}")
        return 1
    shutil.rmtree(folder)
    print(f"all well: {torture.summary}; {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
