"""What a reader needs to judge numbers: of which machine, and of which commit they are."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def describe_machine() -> dict[str, str]:
    """By name."""
    cpu_lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpus = (line.split(":", 1)[1].strip() for line in cpu_lines if "model name" in line)
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": next(cpus, platform.processor()),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_kib / 2**20:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load_before": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": git_commit(),
    }


def git_commit() -> str:
    """The commit, with "-dirty" if files differ from it."""
    command = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # There is no git.
        return "unknown"
    return answer.stdout.strip() or "unknown"
