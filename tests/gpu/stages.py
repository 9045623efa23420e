"""Runs stages of the kit, one after the other: each has a time limit, and ends in a table. See docs/run/gpu.md.

    stages.py --out FOLDER [--patience N] [--only TEXT] STAGE...

A stage is some programs. What they find is written row by row (rows.py), so that one that fails or is ended by the limit keeps the
rows that it has written; the next begins all the same. After each stage, FOLDER/results.json and tables.md have all that was found.
The exit code is 1 if a row says "failed". FSDP_TEST_DEVICE=cpu rehearses the stages with small sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rows
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ON_GPU = os.environ["FSDP_TEST_DEVICE"] != "cpu"


@dataclass(frozen=True)
class Program:
    """A command, with variables of its own. `most`: seconds, if it may not take all that is left of its stage's."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    most: float = 1e9
    pytest: bool = False  # What it finds is its exit code and its last line.
    needed: bool = False  # Where it fails, the rest of its stage would, too.


@dataclass(frozen=True)
class Stage:
    """Programs that share a time limit, in seconds."""

    title: str
    limit: float
    programs: list[Program]


COLLECTIVES = {"FSDP_SINGLE_RANK_COLLECTIVES": "1"}
OVER_GLOO = {"FSDP_TEST_BACKEND": "gloo"}  # NCCL before 2.30 wants a GPU for each rank.
# A newer one in place of torch's, if the kit has it (run.sh).
OVER_NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "LD_PRELOAD": os.environ.get("GPU_KIT_NCCL", "")} if ON_GPU else {}


def python(file: str, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / file), *options]


def tests(file: str, chosen: str, rehearsed: str, most: float, over: dict[str, str]) -> Program:
    """A file of pytest's on several ranks; the tests whose names fit, of which a rehearsal runs few."""
    options = ("-q", "-p", "no:cacheprovider", "-k", chosen if ON_GPU else rehearsed)
    return Program([sys.executable, "-m", "pytest", *options, str(ROOT / "tests" / "python" / file)], over, most, pytest=True)


MEGATRON = ("--peer", "Megatron-FSDP")
WEIGHTS = ("--ranks", "2", "--rounds", "3", "--layers", "24", "--dim", "1024")  # FSDP2 takes a collective for each parameter.
SMALL_WEIGHTS = ("--ranks", "2", "--rounds", "1", "--layers", "3", "--dim", "32", "--bucket-bytes", "10000")


def sanitized(tool: str) -> Program:
    return Program(python("tests/gpu/sanitized.py", tool), COLLECTIVES, most=40)


STAGES = {
    1: Stage(
        "parity with FSDP2 on one rank",
        60,
        [
            Program(python("tests/gpu/parity.py", "with collectives"), COLLECTIVES, most=40),
            Program(python("tests/gpu/parity.py", "without collectives")),
        ],
    ),
    2: Stage(
        "steps on one GPU: plain, a peer, libfsdp",
        360,
        [Program(python("bench/one_gpu.py", "--peer", "FSDP2"), most=180), Program(python("bench/one_gpu.py", *MEGATRON), most=180)],
    ),
    3: Stage("the examples in C++", 60, [Program(python("tests/gpu/programs.py"))]),
    4: Stage(
        "two ranks over Gloo",
        180,
        [
            tests("optim/test_clip_grad_norm.py", "", "2-1.0-1-0.1", 30, OVER_GLOO),
            tests("fsdp2/test_parity_fsdp2.py", "equals", "equals and mlp-default", 60, OVER_GLOO),
            tests("megatron/test_megatron_strategies.py", "", "two_ranks", 60, OVER_GLOO),
            tests("fsdp2/test_parity_fsdp2.py", "libfsdp-2", "libfsdp-2-mlp-default", 60, OVER_GLOO),
        ],
    ),
    5: Stage(
        "libfsdp's kernels against the CPU; compute-sanitizer on a small step",
        90,
        [Program(python("tests/gpu/own_kernels.py"), most=40), sanitized("memcheck"), sanitized("racecheck")],
    ),
    6: Stage("Megatron's front end, HSDP, 8-bit gathers, memory of NCCL", 60, [Program(python("tests/gpu/features.py"), COLLECTIVES)]),
    7: Stage("CUDA graphs of a step", 60, [Program(python("tests/gpu/graphs.py"))]),
    8: Stage(
        "two ranks over NCCL",
        280,
        [
            Program(python("tests/gpu/two_ranks.py"), OVER_NCCL, most=50, needed=True),
            tests("fsdp2/test_parity_fsdp2.py", "equals", "equals and mlp-default", 90, OVER_NCCL),
            Program(python("bench/one_gpu.py", "--ranks", "2", "--peer", "FSDP2"), OVER_NCCL, most=70),
            Program(python("bench/one_gpu.py", "--ranks", "2", *MEGATRON), OVER_NCCL, most=70),
            Program(python("bench/weights.py", *(WEIGHTS if ON_GPU else SMALL_WEIGHTS)), OVER_NCCL, most=40),
        ],
    ),
    9: Stage(
        "Python's tests, several at a time",
        150,
        [Program(python("tests/gpu/suite.py", "140"), OVER_NCCL if "GPU_KIT_NCCL" in os.environ else OVER_GLOO)],
    ),
}


def machine() -> dict[str, Any]:
    """What a reader has to know of the figures."""
    known: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    known["commit"] = os.environ.get("GPU_KIT_COMMIT", "unknown")
    if not ON_GPU:
        return {"device": "cpu: a rehearsal, nothing of which ran on a GPU", **known}
    of_card = torch.cuda.get_device_properties(0)
    return {
        "device": of_card.name,
        "memory_gib": round(of_card.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
        **known,
    }


def run(program: Program, limit: float, log: Path) -> int | None:
    """The exit code; None if it took too long, and was ended with all that it had started."""
    environment = {**os.environ, **program.environment}
    with log.open("ab") as stream:
        stream.write(f"$ {' '.join(program.command)}\n".encode())
        stream.flush()
        process = subprocess.Popen(
            program.command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_stage(stage: Stage, out: Path, patience: float, only: str) -> list[rows.Row]:
    """All that its programs have found, and a row for each that did not end well. Limits are `patience` times as long."""
    log, found = out / "log.txt", out / "rows"
    os.environ["GPU_KIT_ROWS"], os.environ["GPU_KIT_OUT"] = str(found), str(out)
    begun = time.monotonic()
    for program in (program for program in stage.programs if only in " ".join(program.command)):
        left = stage.limit * patience - (time.monotonic() - begun)
        name = " ".join(part.removeprefix(f"{ROOT}/") for part in program.command[1:] if part != "-m")
        if left < 1:
            rows.record(name, "skipped", why="no time was left")
            continue
        limit = min(left, program.most * patience)
        start = time.monotonic()
        code = run(program, limit, log)
        seconds = round(time.monotonic() - start, 1)
        last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""])[-1][:200]
        if code is None:
            so_far = f", so far: {last}" if program.pytest else ""
            rows.record(name, "failed", seconds=seconds, why=f"took longer than {limit:.0f} s{so_far}")
        elif code != 0:
            rows.record(name, "failed", seconds=seconds, why=f"exit code {code}: {last}")
        elif program.pytest:
            rows.record(name, "passed", seconds=seconds, last=last)
        if code != 0 and program.needed:
            break
    read = rows.read(found)
    found.unlink(missing_ok=True)
    return read


def table(found: list[rows.Row]) -> list[str]:
    """Markdown: one table for what has the same columns."""
    lines: list[str] = []
    before: list[str] = []
    for row in found:
        columns = list(row)
        if columns != before:
            lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            before = columns
        lines.append("| " + " | ".join(str(value).replace("|", "\\|") for value in row.values()) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--patience", type=float, default=1.0, help="times the limits, on a slow machine")
    parser.add_argument("--only", default="", help="of each stage, the programs in whose command this is")
    parser.add_argument("stages", type=int, nargs="+", choices=STAGES, metavar="STAGE")
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("log.txt", "rows", "traces.zip"):  # To which the stages append.
        (out / name).unlink(missing_ok=True)
    known = machine()
    failed = False
    results: dict[str, Any] = {"machine": dict(known), "stages": []}
    page = [f"# {known.pop('device')}", "", ", ".join(f"{key} {value}" for key, value in known.items())]
    for number in options.stages:
        stage = STAGES[number]
        begun, limit = time.monotonic(), stage.limit * options.patience
        print(f"== stage {number}: {stage.title} (at most {limit:.0f} s)", flush=True)
        found = run_stage(stage, out, options.patience, options.only)
        failed |= any(row["result"] == "failed" for row in found)
        seconds = round(time.monotonic() - begun, 1)
        text = [f"## Stage {number}: {stage.title}, {seconds} s of {limit:.0f} s", *table(found)]
        print("\n".join(text), flush=True)
        page += ["", *text]
        results["stages"].append({"stage": number, "title": stage.title, "seconds": seconds, "rows": found})
        (out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        (out / "tables.md").write_text("\n".join([*page, ""]), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
