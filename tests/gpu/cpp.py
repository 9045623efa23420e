"""How the kit starts the examples in C++, and how small they are in a rehearsal."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import rows
from support.device import TYPE

EXAMPLES = Path(os.environ["FSDP_EXAMPLES"])
TEXT = Path(__file__).resolve().parents[2] / "docs"
SMALL = TYPE == "cpu"
GPT = ("--dim", 256, "--layers", 4, "--heads", 4, "--context", 128, "--batch", 4, "--threads", 8)
TINY_GPT = ("--dim", 64, "--layers", 2, "--heads", 2, "--context", 64, "--batch", 4)


def run(*command: object) -> str:
    """What it has printed. Raises with its last line if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, flush=True)
    if done.returncode != 0:
        said = [*done.stdout.strip().splitlines(), *done.stderr.strip().splitlines()] or [""]
        raise AssertionError(f"{Path(str(command[0])).name} exited with {done.returncode}: {said[-1]}")
    return done.stdout


def train_gpt(folder: Path, where: str, *options: object, ranks: int = 1) -> list[float]:
    """The losses of a run."""
    return train_gpt_by((), folder, where, *options, ranks=ranks)[0]


def train_gpt_by(
    before: tuple[object, ...], folder: Path, where: str, *options: object, ranks: int = 1
) -> tuple[list[float], str]:
    """As train_gpt, run by a program that `before` names with its options; and what was printed."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{where}.jsonl"
    common = ("--data", TEXT, "--nproc", ranks, "--eval-every", 1000, "--eval-sequences", 4, "--sample-tokens", 0, "--log", log)
    said = run(*before, EXAMPLES / "train_gpt", "--device", where, "--run", folder / where, *common, *options)
    read = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())
    return [row["loss"] for row in read if "loss" in row], said


def record_lines_of(program: str) -> int:
    """A row for each line "passed NAME: VALUE" (or failed, skipped, measured) of a program's; its exit code."""
    with subprocess.Popen((str(EXAMPLES / program), TYPE), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            result, _, rest = line.strip().partition(" ")
            name, _, value = rest.partition(": ")
            if result in ("passed", "failed", "skipped", "measured"):
                key = "why" if result in ("failed", "skipped") else "value"
                rows.record(name, result, **({key: value} if value else {}))
    return running.returncode
