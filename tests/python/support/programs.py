"""Runs programs as torchrun does, but in processes that are forked from one that has imported torch.

A new interpreter takes longer to import it than most programs of tests take for their work.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from support.ranks import forking_context

LIMIT = 300.0  # seconds


@dataclass(frozen=True)
class Outcome:
    """How a program has ended on one rank."""

    exit_code: int | None
    output: str
    """Of stdout and stderr."""


def run_program(path: Path, ranks: int) -> list[Outcome]:
    """Runs it in its folder, on each rank; without the environment of torchrun if there is one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = forking_context()
    outputs = [path.parent / f"output-{rank}" for rank in range(ranks)]
    processes = [context.Process(target=_run, args=(path, rank, ranks, port, outputs[rank])) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    texts = [output.read_text(encoding="utf-8") if output.exists() else "" for output in outputs]
    return [Outcome(exit_code, text) for exit_code, text in zip(exit_codes, texts, strict=True)]


def _run(path: Path, rank: int, ranks: int, port: int, output: Path) -> None:
    os.chdir(path.parent)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if ranks > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    sys.argv = [str(path)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
