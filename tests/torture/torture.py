"""Kills training runs (SIGKILL) at random moments, during saves above all, and restarts them, as a scheduler would.

Half of the runs save beside training (AsyncSaver). Some restarts go back to an older step. Few checkpoints are kept.
Half of the trainings have a second job beside them, which saves into the same folder under another name.

    torture.py --train-gpt PATH --fsdp-ckpt PATH [--kills 200] [--seed N] [--folder DIR]

After each kill: the newest checkpoint (that was saved last) is whole and not older than any that was seen before,
nothing hangs, and the restart goes on from it, or from the older one that it was given. When a run is through, its
last checkpoint must have the bits of a run without kills. Exits with 1 at the first violation, and keeps the folder
then.
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
OPTIONS |= {"nproc": RANKS, "steps": STEPS, "save-every": 1}
SERIES = "step"
NEIGHBOUR = "other"
"""How the checkpoints of the second job are called."""
MOST_KEPT = 3
SHARE_ASYNC = 0.5
SHARE_OF_NEIGHBOURS = 0.5
SHARE_OF_ROLLBACKS = 0.2
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
    async_kills: int = 0
    """Of runs that save beside training."""
    restarts: int = 0
    rollbacks: int = 0
    runs: int = 0
    most_steps_lost: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.during_saves} during a save, {self.unfinished} of which it ended; "
            f"{self.of_all_ranks} of all ranks at once, {self.async_kills} beside an asynchronous save), "
            f"{self.restarts} restarts ({self.rollbacks} from an older step), {self.runs} runs to the end, "
            f"at most {self.most_steps_lost} steps lost"
        )


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass(frozen=True, order=True)
class Step:
    """A checkpoint that has its name."""

    saved: int
    """Grows from save to save."""
    number: int


NO_STEP = Step(0, 0)


def steps_in(folder: Path, series: str = SERIES) -> list[Step]:
    """In the order in which they were saved."""
    steps = []
    for name in names_in(folder):
        if not name.startswith(f"{series}-"):
            continue
        with suppress(FileNotFoundError), (folder / name / ".fsdp-checksums").open("rb") as sidecar:
            sidecar.readline()
            steps.append(Step(int(sidecar.readline().split()[1]), int(name.removeprefix(f"{series}-"))))
    return sorted(steps)


def names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def temporary_in(folder: Path) -> set[str]:
    """What the main job has made there, as long as it has no name of its own."""
    return {name for name in names_in(folder) if name.startswith((f".tmp-{SERIES}-", f".old-{SERIES}-"))}


def has_content(folder: Path) -> bool:
    """Nobody removes a folder whose writer was killed before it said who it is. Nothing was in it yet."""
    return any(path.stat().st_size > 0 for path in folder.iterdir())


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


class Run:
    """A process of train_gpt with its ranks."""

    def __init__(self, train_gpt: Path, folder: Path, name: str, options: dict[str, object]) -> None:
        self.saves = folder / "saves"
        self.saves_async = options.get("save-async") == "true"
        self.log = folder / f"{name}.jsonl"
        self.output = folder / f"{name}.out"
        options = OPTIONS | options | {"run": folder / name, "log": self.log, "save": self.saves}
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
        self.newest_seen = NO_STEP
        self.starts = 0
        self.typical_save = 0.0
        """Seconds; measured in the run without kills."""

    def tool(self, *arguments: str | Path) -> None:
        done = subprocess.run([self.arguments.fsdp_ckpt, *arguments], capture_output=True, text=True, timeout=PATIENCE)
        require(done.returncode == 0, f"fsdp-ckpt {' '.join(map(str, arguments))}:\n{done.stdout}{done.stderr}")

    def start(self, folder: Path, **options: object) -> Run:
        self.starts += 1
        named = {name.replace("_", "-"): value for name, value in options.items()}
        return Run(self.arguments.train_gpt, folder, f"run-{self.starts}", {"data": self.text, **named})

    def start_main(self, folder: Path, has_neighbour: bool) -> tuple[Run, Step]:
        """A run that goes on from the newest checkpoint, or from an older one; and which one that is."""
        saves = folder / "saves"
        steps = steps_in(saves)
        resumed = steps[-1] if steps else NO_STEP
        if len(steps) > 1 and self.random.random() < SHARE_OF_ROLLBACKS:
            resumed = self.random.choice(steps[:-1])
            self.summary.rollbacks += 1
        # The newest of both jobs might be the neighbour's.
        by_path = steps and (has_neighbour or resumed != steps[-1])
        resume = saves / f"{SERIES}-{resumed.number}" if by_path else "no" if has_neighbour else "auto"
        is_async = "true" if self.random.random() < SHARE_ASYNC else "false"
        kept = self.random.randint(1, MOST_KEPT)
        return self.start(folder, resume=resume, keep_last=kept, save_async=is_async), resumed

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
            first = len(run.rows()) + self.random.randrange(4)

            def is_on_its_way() -> bool:
                if self.see(run.saves) and len(run.rows()) >= first:
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
        self.summary.async_kills += run.saves_async
        return True

    def check(self, run: Run) -> None:
        """After a kill."""
        steps = steps_in(run.saves)
        newest = steps[-1] if steps else NO_STEP
        require(newest >= self.newest_seen, f"the newest checkpoint is {newest}, although there was {self.newest_seen}")
        self.newest_seen = newest
        if newest != NO_STEP:
            self.tool("verify", run.saves / f"{SERIES}-{newest.number}")
        self.summary.unfinished += run.is_saving()
        self.summary.most_steps_lost = max(self.summary.most_steps_lost, run.last_step() - newest.number)

    def check_neighbour(self, saves: Path) -> None:
        """All that the second job has saved is whole. It keeps one, and may be about to replace it."""
        for step in steps_in(saves, NEIGHBOUR):
            path = saves / f"{NEIGHBOUR}-{step.number}"
            done = subprocess.run([self.arguments.fsdp_ckpt, "verify", path], capture_output=True, timeout=PATIENCE)
            require(done.returncode == 0 or not path.exists(), f"{path}: {done.stdout.decode()}{done.stderr.decode()}")

    def check_resumed(self, run: Run, expected: Step) -> None:
        """As soon as the run has made a step, or when it has ended."""
        if expected != NO_STEP and run.last_step() > 0:
            found = run.resumed_from()
            require(found == expected.number, f"{run.output} went on from step {found}, not {expected}")

    def run_to_the_end(self, folder: Path, kills: int) -> None:
        """A training run of STEPS steps, with so many kills at most."""
        folder.mkdir()
        self.newest_seen = NO_STEP
        neighbour = None
        if kills > 0 and self.random.random() < SHARE_OF_NEIGHBOURS:
            neighbour = self.start(
                folder, resume="no", keep_last=1, save_name=NEIGHBOUR, steps=1000000, save_async="true"
            )
        try:
            self.run_main(folder, kills, neighbour is not None)
            if neighbour is not None:
                self.check_neighbour(folder / "saves")
                neighbour.process.terminate()
                require(neighbour.wait() == 0, f"the neighbour failed:\n{neighbour.output.read_text()}")
                self.check_neighbour(folder / "saves")
        finally:
            if neighbour is not None:
                neighbour.end()

    def run_main(self, folder: Path, kills: int, has_neighbour: bool) -> None:
        left = kills
        while True:
            if kills > 0:
                run, resumes_from = self.start_main(folder, has_neighbour)
            else:
                run, resumes_from = self.start(folder, keep_last=2), NO_STEP
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
                newest = steps_in(run.saves)[-1].number
                require(newest == STEPS, f"the last checkpoint in {run.saves} is not of step {STEPS}, but {newest}")
                if run.last_step() > 0:  # It has saved, and removed what others left.
                    for name in temporary_in(run.saves):
                        require(not has_content(run.saves / name), f"something temporary is left in {run.saves}")
                return
            finally:
                run.end()

    def run(self) -> None:
        self.run_to_the_end(self.folder / "reference", 0)
        expected = self.folder / "reference" / "saves" / f"{SERIES}-{STEPS}"
        self.tool("verify", expected)
        print(f"  a save takes {1e3 * self.typical_save:.0f} ms", flush=True)
        while self.summary.kills < self.arguments.kills:
            folder = self.folder / "killed"
            self.run_to_the_end(folder, self.arguments.kills - self.summary.kills)
            final = folder / "saves" / f"{SERIES}-{STEPS}"
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
