"""Contenders as groups of long-lived processes that answer one line of JSON for each line they are sent."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from harness.hosts import Hosts

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/python"))
from support.ports import reserved_port

Reply = dict[str, Any]
REPLY_TIMEOUT_S = 300.0
EXIT_TIMEOUT_S = 20.0
SAMPLING_S = 0.005


class BenchError(Exception):
    """The benchmark can't go on; the message says which contender and why."""


@dataclass(frozen=True)
class Launch:
    """How to start a contender: its name in the results, its command, how many ranks of it, and on which hosts if not all on this one."""

    name: str
    command: tuple[str, ...]
    ranks: int
    hosts: Hosts | None = None

    def of_ranks(self, port: int) -> list[tuple[tuple[str, ...], dict[str, str]]]:
        """Each rank's command and environment; they meet at a port."""
        if self.hosts is None:
            return [(self.command, rank_environment(rank, self.ranks, port)) for rank in range(self.ranks)]
        each = self.ranks // len(self.hosts.hosts)
        environments = self.hosts.environments(each)
        commands = self.hosts.commands(each, self.command)
        everything = [{**os.environ, **environment, "MASTER_PORT": str(port)} for environment in environments]
        return list(zip(commands, everything, strict=True))


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """torchrun's variables; one thread; Gloo on the loopback device."""
    fixed = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {**os.environ, **fixed, **{name: str(number) for name, number in numbers.items()}}


class Rank:
    """One process, its pipes, and the file that takes what it writes to stderr."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=self.log, text=True, bufsize=1
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of stderr."""
        self.log.seek(0)
        return "\n".join(self.log.read().decode(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """Lets the process end by itself, for a while."""
        self.stdin.close()
        try:
            self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.stdout.close()
        self.log.close()


def used_kib(process: int) -> int:
    """Anonymous and shared memory that a process has now, each page divided by the number of those that have it. In KiB."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(text.split()[0]) for name, text in (line.split(":", 1) for line in rollup)}
    return sizes["Pss_Anon"] + sizes["Pss_Shmem"]


class Contender:
    """The ranks of one contender. Starting it waits until every rank has built its model."""

    def __init__(self, launch: Launch) -> None:
        self.name = launch.name
        with reserved_port() as port:
            try:
                self.ranks = [Rank(command, environment) for command, environment in launch.of_ranks(port)]
            except OSError as error:
                raise BenchError(f"contender {self.name} can't be started ({error}); build the project first") from error
            try:
                self.parameters: int = self.receive()[0]["parameters"]
            except BenchError:
                self.kill()
                raise

    def ask(self, verb: str, count: int = 1) -> list[Reply]:
        """Sends the line to all ranks and returns their replies in rank order."""
        try:
            for rank in self.ranks:
                rank.stdin.write(f"{verb} {count}\n")
        except BrokenPipeError as error:
            raise self.failure("has ended") from error
        return self.receive()

    def watch_memory(self, verb: str, count: int) -> list[int]:
        """Asks, and samples meanwhile what each rank uses: the peaks in rank order, in KiB. Sampling slows the ranks down."""
        peaks = [0] * len(self.ranks)
        done = threading.Event()

        def sample() -> None:
            while not done.wait(SAMPLING_S):
                for index, rank in enumerate(self.ranks):
                    peaks[index] = max(peaks[index], used_kib(rank.process.pid))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            self.ask(verb, count)
        finally:
            done.set()
            sampler.join()
        return peaks

    def receive(self) -> list[Reply]:
        """One reply of each rank. A rank that ends meanwhile fails all: its peers would wait for it in vain."""
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            for index, rank in enumerate(self.ranks):
                selector.register(rank.stdout, selectors.EVENT_READ, index)
            while len(replies) < len(self.ranks):
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    raise self.failure(f"gave no answer for {REPLY_TIMEOUT_S:.0f} s")
                for key, _ in ready:
                    line = self.ranks[key.data].stdout.readline()
                    if not line:
                        raise self.failure(f"lost rank {key.data}")
                    replies[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [replies[index] for index in range(len(self.ranks))]

    def failure(self, what: str) -> BenchError:
        """An error with what every rank last said."""
        logs = (f"--- rank {index}:\n{rank.log_tail()}" for index, rank in enumerate(self.ranks))
        return BenchError("\n".join((f"contender {self.name} {what}", *logs)))

    def kill(self) -> None:
        """Ends the processes at once, for when they can't be expected to end by themselves."""
        for rank in self.ranks:
            rank.process.kill()
        self.stop()

    def stop(self) -> None:
        """Ends the processes: all see the end of their input before any is waited for."""
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            rank.stop()


class Fleet:
    """All contenders of a case, alive together; each sleeps while another steps."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.contenders: list[Contender] = []
        self.launches = launches

    def __enter__(self) -> list[Contender]:
        try:
            for launch in self.launches:
                self.contenders.append(Contender(launch))
        except BaseException:
            self.kill()
            raise
        return self.contenders

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None:
            for contender in self.contenders:
                contender.stop()
        else:
            self.kill()

    def kill(self) -> None:
        """Ends every contender at once."""
        for contender in self.contenders:
            contender.kill()
