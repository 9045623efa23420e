"""examples/train_gpt.py on two ranks, of which torchrun starts those that Ctrl-C ends."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from support.programs import run_program

SOURCE = Path(__file__).parents[3]
EXAMPLE = SOURCE / "examples" / "train_gpt.py"
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="the package tensorboard is not installed"
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    (folder / "not_text").write_bytes(b"\0" * 4000)
    return folder


def train(folder: Path, *options: object) -> str:
    outcomes = run_program(EXAMPLE, 2, folder, *options)
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.errors
    return outcomes[0].output


def end_at_once(folder: Path, *options: object, fails: bool = True) -> str:
    """What one rank says that trains nothing, or fails."""
    (outcome,) = run_program(EXAMPLE, 1, folder, *options)
    assert (outcome.exit_code != 0) == fails, f"{outcome.output}\n{outcome.errors}"
    assert "loss" not in outcome.output
    return outcome.output + outcome.errors


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (run / "log.jsonl").read_text().splitlines()]


def test_two_ranks_learn_a_text(tmp_path: Path, text: Path) -> None:
    output = train(tmp_path, "--data", text, "--layers", 2, "--steps", 12)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 2, output  # after the first and the last step, once
    assert 5.0 < losses[0] < 6.0, "untrained, every byte is about as likely: ln 256 = 5.55"
    assert losses[1] < losses[0] - 1
    assert re.search(r"done: 12 steps in \d+ s, validation \d\.\d+ bits per byte", output), output

    run = tmp_path / output.splitlines()[0].removeprefix("run folder: ")
    assert run.parent == tmp_path / "runs"
    assert {path.name for path in run.iterdir()} == {".lock", "config.json", "log.jsonl", "step-12"}
    logged = [row for row in rows(run) if "loss" in row]
    assert [row["loss"] for row in logged] == pytest.approx(losses, abs=1e-4)
    for row, steps in zip(logged, (1, 12), strict=True):
        times = {name.removeprefix("times/"): value for name, value in row.items() if name.startswith("times/")}
        assert times["steps"] == steps
        assert 0 < times["exposed_ms"] < times["step_ms"]
        assert sum(value for name, value in times.items() if name.startswith("waits/")) == pytest.approx(
            times["exposed_ms"]
        )
    error = end_at_once(tmp_path, "--data", text, "--folder", run)
    assert f"--folder {run} holds a run: go on with --resume" in error
    assert len(rows(run)) == 3
    error = end_at_once(tmp_path, "--resume", text)
    assert f"--resume {text} is not the folder of a run" in error
    for outcome in run_program(EXAMPLE, 3, tmp_path, "--folder", "of_three"):
        assert outcome.exit_code != 0
        assert "4 sequences of a step do not divide among 3 ranks" in outcome.errors
    assert not (tmp_path / "of_three").exists()


@needs_tensorboard
def test_tensorboard_has_the_numbers_of_the_log(tmp_path: Path, text: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ("--data", text, "--layers", 1, "--tensorboard")
    train(tmp_path, *options, "--steps", 3, "--folder", "run")
    train(tmp_path, *options, "--steps", 5, "--resume", "run")  # which shows nothing twice
    board = EventAccumulator(str(tmp_path / "run")).Reload()
    logged = rows(tmp_path / "run")
    names = {name for row in logged for name in row} - {"step"}
    assert {"loss", "times/step_ms", "times/waits/late_rank_ms"} <= names
    assert names == set(board.Tags()["scalars"])
    for name in names:
        shown = [(event.step, event.value) for event in board.Scalars(name)]
        assert shown == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in logged if name in row]


def ranks_of(torchrun: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(torchrun), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(rank) for rank in found.stdout.split()]


def test_a_rank_that_is_killed_goes_on_from_memory(tmp_path: Path, text: Path) -> None:
    """By torchrun's restarts, twice; nothing is on the disk before the end."""
    common = ("--data", text, "--layers", 1, "--steps", 12, "--save-every", 1000)
    train(tmp_path, *common, "--folder", "whole")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        memory = Path(shm, "run")
        command = [*COMMAND[:-1], "--max-restarts", "3", str(EXAMPLE), *(str(word) for word in common)]
        command += ["--folder", "killed", "--memory", str(memory), "--memory-every", "2"]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (
            (tmp_path / "out").open("w") as out,
            subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out) as process,
        ):
            for rank, step in enumerate((4, 8)):
                while process.poll() is None and not (memory / f"step-{step}").exists():
                    time.sleep(0.002)
                os.kill(ranks_of(process.pid)[rank], signal.SIGKILL)
            assert process.wait(timeout=240) == 0, (tmp_path / "out").read_text()
        assert os.listdir(shm) == [], "nothing is left in memory"
    output = (tmp_path / "out").read_text()
    steps = [int(step) for step in re.findall(r"goes on after step (\d+), from memory of this host", output)]
    assert len(steps) == 2, output
    assert steps[0] >= 4
    assert steps[1] >= 8
    assert rows(tmp_path / "killed")[-1] == rows(tmp_path / "whole")[-1]


def test_a_run_that_was_interrupted_goes_on_as_if_nothing_had_happened(tmp_path: Path, text: Path) -> None:
    common = ("--data", text, "--layers", 2, "--save-every", 6)
    train(tmp_path, *common, "--steps", 12, "--folder", "whole")
    command = [*COMMAND, *(str(word) for word in common), "--steps", "12", "--folder", "stopped"]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE, text=True) as process:
        log = tmp_path / "stopped" / "log.jsonl"
        while process.poll() is None and not (log.exists() and '"step": 1,' in log.read_text()):
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: to torchrun and to its ranks
        output = process.communicate(timeout=120)[0]
    stopped_at = int(re.findall(r"ended by a signal after step (\d+); to go on: --resume stopped", output)[0])
    assert 1 <= stopped_at < 12
    assert (tmp_path / "stopped" / f"step-{stopped_at}" / ".metadata").exists()

    # A run that is killed has logged steps that no checkpoint has, and half of a line.
    with (tmp_path / "stopped" / "log.jsonl").open("a") as file:
        file.write(json.dumps({"step": stopped_at + 1, "loss": 0.0}) + '\n{"step":')
    train(tmp_path, "--resume", "stopped")
    found = [(row["step"], row["loss"]) for row in rows(tmp_path / "stopped") if "loss" in row]
    assert found == [(row["step"], row["loss"]) for row in rows(tmp_path / "whole") if "loss" in row]
    assert rows(tmp_path / "stopped")[-1] == rows(tmp_path / "whole")[-1]
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names == {".lock", "config.json", "log.jsonl", "step-6", "step-12"}
    # Two are kept, and what is given beside it counts: more steps.
    assert "done: 14 steps" in train(tmp_path, "--resume", "whole", "--steps", 14)
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {
        ".lock",
        "config.json",
        "log.jsonl",
        "step-12",
        "step-14",
    }

    # A config.json of another program is none of a run, and stays.
    foreign = tmp_path / "model" / "config.json"
    foreign.parent.mkdir()
    foreign.write_text('{"model_type": "llama"}')
    assert "is not the folder of a run" in end_at_once(tmp_path, "--resume", "model")
    assert "has a config.json that is not of a run" in end_at_once(tmp_path, "--folder", "model")
    assert foreign.read_text() == '{"model_type": "llama"}'

    # Nothing changes where nothing is left, or a load fails, or another process trains there.
    config = tmp_path / "whole" / "config.json"
    before = config.read_text()
    assert "nothing is left to train: whole has made 14 steps" in end_at_once(
        tmp_path, "--resume", "whole", "--steps", 13, fails=False
    )
    with (tmp_path / "whole" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another training goes on in whole" in end_at_once(tmp_path, "--resume", "whole", "--steps", 30)
    for name in ("step-12", "step-14"):
        (tmp_path / "whole" / name / ".metadata").write_bytes(b"")
    end_at_once(tmp_path, "--resume", "whole", "--steps", 30)
    assert config.read_text() == before
