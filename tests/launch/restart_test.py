"""The loop of docs/run/survive.md around mpirun: a rank is killed, all are started again, and go on from memory.

    restart_test.py TRAIN_GPT FSDP_CKPT
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOOP = re.compile(r"^  ```sh\n(  for attempt .*?)^  ```$", re.DOTALL | re.MULTILINE)
COMMAND = "mpirun -np 16 --host node01:8,node02:8 -x MASTER_ADDR=node01 ./my_trainer"
MISSING = 77
STEPS, PATIENCE = 40, 240.0


def children_of(process: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(process), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(child) for child in found.stdout.split()]


def steps_in(memory: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in memory.glob("step-*")]


def main(train_gpt: str, fsdp_ckpt: str) -> None:
    if shutil.which("mpirun") is None:
        print("no mpirun on the path; Debian's is in the package openmpi-bin")
        sys.exit(MISSING)
    (loop,) = LOOP.findall((ROOT / "docs/run/survive.md").read_text(encoding="utf-8"))
    assert loop.count(COMMAND) == 1, loop
    # Open MPI refuses to run as root, and more ranks than cores, unless told otherwise.
    allowed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe")
    environment = {**os.environ, **dict.fromkeys(allowed, "1")}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        text = Path(folder, "text.txt")
        text.write_text("".join(f"the quick brown fox {i % 7}\n" for i in range(2000)))
        memory = Path(shm, "run")

        def start(run: str, *more: str) -> subprocess.Popen[bytes]:
            options = {"data": text, "run": f"{folder}/{run}", "steps": STEPS, "eval-every": 1000000}
            options |= {"sample-tokens": 0, "dim": 16, "layers": 2, "heads": 2, "context": 16, "batch": 4, "resume": "auto"}
            words = [train_gpt, *(f"--{name}={value}" for name, value in options.items()), *more]
            command = loop.replace(COMMAND, f"mpirun -np 2 {shlex.join(words)}")
            with Path(folder, f"{run}.out").open("w") as out:
                return subprocess.Popen(["sh", "-c", command], stdout=out, stderr=out, env=environment)

        assert start("whole").wait(timeout=PATIENCE) == 0, Path(folder, "whole.out").read_text()
        process = start("killed", f"--memory={memory}", "--memory-every=2", "--save-every=1000000")
        for rank, step in enumerate((8, 20)):
            deadline = time.monotonic() + PATIENCE
            while max(steps_in(memory), default=0) < step:
                assert process.poll() is None, Path(folder, "killed.out").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.002)
            (mpirun,) = children_of(process.pid)
            os.kill(children_of(mpirun)[rank], signal.SIGKILL)
        assert process.wait(timeout=PATIENCE) == 0, Path(folder, "killed.out").read_text()
        rows = Path(folder, "killed", "log.jsonl").read_text()
        resumed = [int(step) for step in re.findall(r'"resumed": ?(\d+)', rows)]
        assert len(resumed) == 2, rows
        assert resumed[0] >= 8, resumed
        assert resumed[1] >= 20, resumed
        assert os.listdir(shm) == [], "nothing is left in memory"
        paths = [f"{folder}/{run}/checkpoints/step-{STEPS}" for run in ("whole", "killed")]
        command = [fsdp_ckpt, "diff", *paths, "--ignore", "extra.", "--ignore", "fsdp.rng"]
        subprocess.run(command, check=True, timeout=PATIENCE)


if __name__ == "__main__":
    main(*sys.argv[1:])
