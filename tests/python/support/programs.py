"""Runs programs as torchrun does, but in processes that are forked from one that has imported torch.

A new interpreter takes longer to import it than most programs of tests take for their work.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from support.ports import reserved_port
from support.ranks import forking_context

LIMIT = 300.0  # seconds


@dataclass(frozen=True)
class Outcome:
    """How a program has ended on one rank."""

    exit_code: int | None
    output: str
    errors: str
    """What it has written to stderr."""


def run_program(path: Path, ranks: int, folder: Path, *arguments: object, alone: bool = False) -> list[Outcome]:
    """Runs it in a folder, on each rank, with one thread; `alone`, without what torchrun puts into the environment."""
    with reserved_port() as port:
        return _run_at(port, path, ranks, folder, arguments, alone=alone)


def _run_at(port: int, path: Path, ranks: int, folder: Path, arguments: tuple[object, ...], *, alone: bool) -> list[Outcome]:
    context = forking_context()
    words = [str(argument) for argument in arguments]
    environment = {} if alone else {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = [Path(tempfile.mkdtemp(prefix="fsdp-program-")) for _ in range(ranks)]
    processes = [
        context.Process(
            target=_run,
            args=(path, words, folder, environment | ({} if alone else {"RANK": str(rank), "LOCAL_RANK": str(rank)}), place),
        )
        for rank, place in enumerate(places)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    outcomes = []
    for exit_code, place in zip(exit_codes, places, strict=True):
        texts = [(place / name).read_text(encoding="utf-8") if (place / name).exists() else "" for name in ("out", "err")]
        outcomes.append(Outcome(exit_code, *texts))
        shutil.rmtree(place)
    return outcomes


def _run(path: Path, words: list[str], folder: Path, environment: dict[str, str], place: Path) -> None:
    os.chdir(folder)
    for name, descriptor in (("out", 1), ("err", 2)):
        with (place / name).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
