"""Runs scripts for tests in C++. Each runs in processes of its own, forked from this one, which has imported torch: that takes seconds.

Reads a line for each script: the number of ranks, the script and its arguments, with tabs between them. Answers each with
a line: 0 if all ranks have ended with 0, and otherwise the exit code of one that has not. A rank has the variables that
torchrun would set. What scripts print goes to stderr.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))  # its support
import torch
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from support.ports import reserved_port

LIMIT = 120.0  # seconds for a script
TIMED_OUT = 124


def run_rank(script: str, arguments: list[str]) -> None:
    """Ends the process with the script's exit code."""
    code = 1
    try:
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def run(ranks: int, script: str, arguments: list[str]) -> int:
    if ranks > 1:
        importlib.import_module("torch._dynamo")  # which an optimizer's first step imports
    with reserved_port() as port:
        return run_at(port, ranks, script, arguments)


def run_at(port: int, ranks: int, script: str, arguments: list[str]) -> int:
    running = set()
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            run_rank(script, arguments)
        running.add(process)
    result = 0
    end = time.monotonic() + LIMIT
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0 and time.monotonic() < end:
            time.sleep(0.005)
            continue
        running.discard(process)
        failed = TIMED_OUT if process == 0 else os.waitstatus_to_exitcode(status)
        if failed != 0:
            result = result or failed
            for other in running:
                os.kill(other, signal.SIGKILL)  # They would wait for the one that has gone.
            end = time.monotonic() + LIMIT
    return result


def main() -> None:
    torch.set_num_threads(1)  # Threads of an operator would not survive a fork.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        ranks, script, *arguments = line.rstrip("\n").split("\t")
        print(run(int(ranks), script, arguments), file=answers, flush=True)


if __name__ == "__main__":
    main()
