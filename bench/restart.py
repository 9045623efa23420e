"""Measures the time from a SIGKILL of a rank to the next step of a Python program under torchrun.

    python bench/restart.py [--kills 20] [--ranks 2]

torchrun runs examples/train_gpt.py, which saves each step in memory. A rank is killed again and again; torchrun starts all
ranks anew, which import torch, connect, load from memory and train. The time ends when the step after the newest one that
was in memory is complete there, too. Importing torch is a floor that no program can be faster than: it is measured before
the first start, in as many new interpreters at once as there are ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.machine import ROOT, describe_machine

PATIENCE = 120.0
STEPS_BETWEEN = 5
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def seconds_of_import(ranks: int) -> float:
    begin = time.monotonic()
    interpreters = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(ranks)]
    if any([interpreter.wait() for interpreter in interpreters]):
        raise RuntimeError("python cannot import torch")
    return time.monotonic() - begin


def newest(memory: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in memory.glob("step-*")), default=0)


def wait_for(memory: Path, step: int, torchrun: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while newest(memory) < step:
        if torchrun.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"step {step} does not come")
        time.sleep(0.001)


def measure(kills: int, ranks: int, folder: Path, memory: Path) -> list[float]:
    """The seconds after each kill."""
    text = folder / "text.txt"
    text.write_text("".join(f"the quick brown fox {i % 7}\n" for i in range(100000)))
    command = [sys.executable, *TORCHRUN, "--nproc-per-node", str(ranks), "--max-restarts", str(kills)]
    options = {"data": text, "folder": folder / "run", "memory": memory, "memory-every": 1}
    options |= {"steps": 1000000, "save-every": 1000000}
    command += [str(ROOT / "examples/train_gpt.py"), *(f"--{name}={value}" for name, value in options.items())]
    package = {"PYTHONPATH": str(ROOT / "build/python")}
    environment = {**os.environ, **package, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    seconds = []
    output = folder / "output"
    with output.open("w") as file:
        torchrun = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        for _ in range(kills):
            wait_for(memory, newest(memory) + STEPS_BETWEEN, torchrun)
            children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
            os.kill(int(random.choice(children)), signal.SIGKILL)
            killed_at = time.monotonic()
            time.sleep(0.05)  # the other ranks' saves end or fail
            wait_for(memory, newest(memory) + 1, torchrun)
            seconds.append(time.monotonic() - killed_at)
    except RuntimeError:
        print(output.read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        torchrun.send_signal(signal.SIGINT)
        torchrun.wait()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    machine = describe_machine()
    imports = [seconds_of_import(arguments.ranks) for _ in range(5)]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        seconds = measure(arguments.kills, arguments.ranks, Path(folder), Path(shm, "run"))
    print("| | median s | range |\n|---|---|---|")
    names = (f"SIGKILL to the next step, {arguments.kills} kills of {arguments.ranks} ranks", "import torch, alone")
    for name, values in zip(names, (seconds, imports), strict=True):
        print(f"| {name} | {statistics.median(values):.1f} | {min(values):.1f} to {max(values):.1f} |")
    print("\n" + "\n".join(f"- {name}: {value}" for name, value in machine.items()))


if __name__ == "__main__":
    main()
