"""The small examples in C++ run, learn, and show what each is about."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(os.environ.get("FSDP_EXAMPLES", ROOT / "build" / "examples"))
# What each prints beside its losses.
SHOWS = {
    "minimal": "",
    "hsdp": r"rank 0 of 4 holds 3\d\d of 641 parameters\n",
    "attend": r"rank 0 skipped an expert \d+ times\n",
    "experts": r"trunk on 4 ranks, each expert on 2\n",
    "accumulation": r"step 50  loss \S+  gradient norm \S+  lr 0.001\d\d  reductions 2\n",
    "offload": r"bytes between steps: 0 on the device, \d{4,} of the host\n",
    "convnet": r"25\d of 256 images are told right\n",
}


def output_of(name: str) -> str:
    environment = {variable: value for variable, value in os.environ.items() if variable not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([PROGRAMS / name], text=True, capture_output=True, timeout=300, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("name", SHOWS)
def test_example_learns(name: str) -> None:
    output = output_of(name)
    losses = [float(loss) for loss in re.findall(r"step \d+  loss (\d+\.\d+)", output)]
    assert len(losses) == 5, output
    assert losses[-1] < losses[0] / 4, output
    assert re.search(SHOWS[name], output), output


def test_the_generator_follows_the_trainers() -> None:
    """The seeds are the program's own."""
    output = output_of("grpo")
    rewards = [float(reward) for reward in re.findall(r"update \d+  reward (\d\.\d+)", output)]
    assert rewards[0] < 0.3, output
    assert rewards[-1] > 0.95, output
    assert "its logits and the trainers' differ by 0\n" in output
