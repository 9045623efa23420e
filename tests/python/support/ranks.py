"""Ranks for tests: processes that stay, so that many tests pay for one start.

`Ranks(2).run(function, argument)` calls function(argument) on each rank and returns what each has returned, by rank.
The function is one of a module that the ranks can import; arguments and results are pickled. A rank that raises, dies
or takes too long makes run() raise RankError with all tracebacks, and ends all ranks; the next run() starts new ones.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from support import device
from support.end_of_rank import end_rank

LIMIT = 120.0  # Seconds for one call, on a busy machine.
AFTER_FAILURE = 5.0  # Seconds that the other ranks have to say what they have seen of a failure.

# Ranks are forked from a process that has done these imports and nothing else; without it, each rank takes seconds of a processor for them.
# Dynamo is what torch.optim imports in its first step. libfsdp is not among them: the ranks of a peer do without it where their test does.
PRELOADED = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]


class RankError(AssertionError):
    """What went wrong, by rank."""


def forking_context() -> ForkServerContext:
    """Its processes are forked from one that has imported PRELOADED."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def serve(rank: int, size: int, store: str, calls: Connection, results: Connection) -> None:
    """A rank: answers calls until there are no more."""
    faulthandler.enable()
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # Of all threads: Gloo's are unknown to Python.
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    device.join(rank, size, init_method=f"file://{store}", timeout=timedelta(seconds=LIMIT))
    while True:
        try:
            function, arguments = pickle.loads(calls.recv_bytes())
        except EOFError:
            end_rank()
        try:
            answer = pickle.dumps((True, function(*arguments)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        results.send_bytes(answer)


class Ranks:
    """The ranks of a process group, each a process with one thread for its operators.

    Args:
        attempts: how often run() tries a call at most. It tries again only when a signal has killed a rank.
    """

    def __init__(self, size: int, attempts: int = 1) -> None:
        self.size = size
        self._attempts = attempts
        self._processes: list[BaseProcess] = []
        self._calls: list[Connection] = []
        self._results: list[Connection] = []

    def run(self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> list[Any]:
        """What function(*arguments) returns on each rank."""
        for attempt in range(1, self._attempts + 1):
            if not self._processes:
                self._start()
            call = pickle.dumps((function, arguments))
            for connection in self._calls:
                # Of a rank that has died since its last answer: _collect() finds it.
                with suppress(BrokenPipeError):
                    connection.send_bytes(call)
            answers, failed = self._collect(time.monotonic() + limit)
            if not failed:
                break
            killed = any(process.exitcode is not None and process.exitcode < 0 for process in self._processes)
            self.end()
            text = "\n".join(f"rank {rank} of {self.size}: {text}" for rank, text in sorted(failed.items()))
            if not killed or attempt == self._attempts:
                raise RankError(text)
            print(f"{text}\nattempt {attempt} of {self._attempts} has failed", file=sys.stderr)
        return [answers[rank] for rank in range(self.size)]

    def end(self) -> None:
        """Ends all ranks, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in (*self._calls, *self._results):
            connection.close()
        self._processes, self._calls, self._results = [], [], []

    def _start(self) -> None:
        context = forking_context()
        store = Path(tempfile.mkdtemp(prefix="fsdp-ranks-")) / "store"
        for rank in range(self.size):
            theirs, ours = context.Pipe(duplex=False)
            result, answer = context.Pipe(duplex=False)
            arguments = (rank, self.size, str(store), theirs, answer)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # The rank has its own; ours would hide that it has died.
            answer.close()
            self._processes.append(process)
            self._calls.append(ours)
            self._results.append(result)

    def _collect(self, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        answers: dict[int, Any] = {}
        failed: dict[int, str] = {}
        while len(answers) + len(failed) < self.size:
            waiting = {c: r for r, c in enumerate(self._results) if r not in answers and r not in failed}
            ready = wait_for_any(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = "no answer in time" if not failed else "no answer after the failure of another rank"
                return answers, failed | dict.fromkeys(waiting.values(), late)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    succeeded, answer = pickle.loads(connection.recv_bytes())
                except EOFError:
                    self._processes[rank].join()
                    succeeded, answer = False, f"died with exit code {self._processes[rank].exitcode}"
                if succeeded:
                    answers[rank] = answer
                else:
                    failed[rank] = answer
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
        return answers, failed


StartRanks = Callable[[int], Ranks]  # Ranks by their number, started when they are first used.
ComparedRanks = Mapping[str, StartRanks]  # By the implementation that they run.


def run_both(
    ranks: ComparedRanks, size: int, function: Callable[..., Any], *arguments: Any
) -> tuple[list[Any], list[Any]]:
    """Calls function(implementation, *arguments) with libfsdp and with its peer. Returns the results of both, by rank."""
    ours, theirs = (ranks[name](size).run(function, name, *arguments) for name in ("libfsdp", "fsdp2"))
    return ours, theirs
