"""Hosts without machines: network and process namespaces on this one, joined by a switch whose links have a limited rate.

Ranks of two such hosts see neither each other's processes nor loopback devices, so that they reach each other by the link alone. Each host
lives as long as the pipe to the process that holds it: when whoever made the hosts ends, even by SIGKILL, the kernel ends the ranks and
takes namespaces and links away. Needs root, or the capabilities for that.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any

TOOLS = ("ip", "tc", "unshare", "nsenter")
DEVICE = "eth0"  # Each host's.
MASTER_PORT = 29500  # Nobody else listens in a host of our own.


class HostsUnavailable(Exception):
    """This machine can't make hosts; the message says why."""


def run(*command: str) -> str:
    """The command's output. Raises HostsUnavailable with what it says if it fails."""
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise HostsUnavailable(f"{' '.join(command)}: {(answer.stderr or answer.stdout).strip()}")
    return answer.stdout


class Namespaces:
    """Namespaces, and the process that holds them: it reads from a pipe until that is closed."""

    def __init__(self, *kinds: str) -> None:
        pipe = subprocess.PIPE
        self.holder = subprocess.Popen(
            ("unshare", *kinds, "sh", "-c", "echo ready; exec cat"), stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        assert self.holder.stdout is not None
        if self.holder.stdout.readline() != "ready\n":
            _, complaint = self.holder.communicate()
            raise HostsUnavailable(f"unshare {' '.join(kinds)}: {complaint.strip()}")

    def enter(self, *kinds: str) -> tuple[str, ...]:
        """What to put before a command that is to run there."""
        return ("nsenter", "--target", str(self.holder.pid), *kinds, "--")

    def end(self) -> None:
        """Ends all that runs there, if the processes have a namespace of their own."""
        for stream in (self.holder.stdin, self.holder.stdout, self.holder.stderr):
            assert stream is not None
            stream.close()
        self.holder.wait()


class Host:
    """A host: where its processes run, and its address."""

    def __init__(self, number: int) -> None:
        self.address = f"10.77.0.{number + 1}"
        self.namespaces = Namespaces("--net", "--pid", "--fork", "--kill-child", "--mount-proc")
        of_children = f"--pid=/proc/{self.namespaces.holder.pid}/ns/pid_for_children"
        self.prefix = self.namespaces.enter("--net", "--mount", of_children, f"--wdns={os.getcwd()}")


class Hosts:
    """So many hosts, each with a link of `mbit` Mbit/s in either direction to one switch. A context manager.

    `latency_ms` is added on each host's way out. Raises HostsUnavailable where the machine does not allow it, or (for a latency) its kernel
    has no netem.
    """

    def __init__(self, count: int, mbit: int, latency_ms: float = 0) -> None:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise HostsUnavailable(f"not installed: {', '.join(missing)}")
        self.hosts: list[Host] = []
        self.switch = Namespaces("--net")
        try:
            self.connect(count, mbit, latency_ms)
        except BaseException:
            self.end()
            raise

    def connect(self, count: int, mbit: int, latency_ms: float) -> None:
        """Makes switch, hosts and links."""
        switch = self.switch.enter("--net")
        run(*switch, "ip", "link", "add", "switch", "type", "bridge")
        run(*switch, "ip", "link", "set", "switch", "up")
        for number in range(count):
            host = Host(number)
            self.hosts.append(host)
            holder = str(host.namespaces.holder.pid)
            port = f"port{number}"
            run(*switch, "ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", holder)
            run(*switch, "ip", "link", "set", port, "master", "switch", "up")
            run(*host.prefix, "ip", "address", "add", f"{host.address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                run(*host.prefix, "ip", "link", "set", device, "up")
            # The bucket holds what the kernel hands over at once (64 KiB); the queue is as long as a switch's.
            bucket = ("root", "handle", "1:", "tbf", "rate", f"{mbit}mbit", "burst", "128kb", "limit", "4mb")
            for prefix, device in ((switch, port), (host.prefix, DEVICE)):
                run(*prefix, "tc", "qdisc", "add", "dev", device, *bucket)
            if latency_ms > 0:
                delay = ("parent", "1:1", "netem", "delay", f"{latency_ms}ms", "limit", "100000")
                run(*host.prefix, "tc", "qdisc", "add", "dev", DEVICE, *delay)

    def environments(self, ranks_per_host: int) -> list[dict[str, str]]:
        """torchrun's variables for each rank, in rank order: those of one host are neighbours. One thread for each."""
        environments = []
        for rank in range(len(self.hosts) * ranks_per_host):
            numbers = {"RANK": rank, "WORLD_SIZE": len(self.hosts) * ranks_per_host, "MASTER_PORT": MASTER_PORT}
            local = {"LOCAL_RANK": rank % ranks_per_host, "LOCAL_WORLD_SIZE": ranks_per_host}
            threads = {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1}
            where = {"MASTER_ADDR": self.hosts[0].address, "GLOO_SOCKET_IFNAME": DEVICE}
            environments.append({**{name: str(value) for name, value in (numbers | local | threads).items()}, **where})
        return environments

    def commands(self, ranks_per_host: int, command: Sequence[str]) -> list[tuple[str, ...]]:
        """For each rank, in rank order, the command that runs on its host."""
        return [(*host.prefix, *command) for host in self.hosts for _ in range(ranks_per_host)]

    def start(
        self, ranks_per_host: int, command: Sequence[str], variables: Mapping[str, str], output: IO[Any]
    ) -> list[subprocess.Popen[bytes]]:
        """Starts the command as ranks, `ranks_per_host` on each host. All write to `output`."""
        started = []
        pairs = zip(self.commands(ranks_per_host, command), self.environments(ranks_per_host), strict=True)
        for rank_command, environment in pairs:
            everything = {**os.environ, **environment, **variables}
            started.append(
                subprocess.Popen(
                    rank_command, env=everything, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )
            )
        return started

    def sent_bytes(self) -> list[int]:
        """What each host has sent to the others so far, in bytes, those of headers included."""
        links = json.loads(run(*self.switch.enter("--net"), "ip", "-json", "-statistics", "link", "show"))
        received = {link["ifname"]: link["stats64"]["rx"]["bytes"] for link in links}
        return [received[f"port{number}"] for number in range(len(self.hosts))]

    def end(self) -> None:
        """Ends all that runs on the hosts, and takes them away."""
        for host in self.hosts:
            host.namespaces.end()
        self.hosts = []
        self.switch.end()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
