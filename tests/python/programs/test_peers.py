"""The program that runs a peer's own tests: which implementation they meet, and what it says of their outcomes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import libfsdp

TESTS = Path(__file__).resolve().parents[2]

OF_A_PEER = """
from torch.distributed.fsdp import fully_shard

def test_meets_libfsdp():
    assert fully_shard.__module__.startswith("libfsdp")

def test_meets_its_own():
    assert fully_shard.__module__.startswith("torch.")
"""


def test_outcomes_of_both_implementations_are_compared(tmp_path: Path) -> None:
    (tmp_path / "test_whose.py").write_text(OF_A_PEER)
    results = tmp_path / "results"
    ran = subprocess.run(
        (sys.executable, "-m", "peers.run", "--tests", tmp_path, "--results", results, "test_whose.py"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(Path(libfsdp.__file__).parents[1])))},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1, ran.stderr
    assert "1 tests pass with FSDP2 and fail with libfsdp" in ran.stdout
    table = (results / "table.md").read_text()
    assert "test_whose.py::test_meets_libfsdp | failed | passed |" in table
    assert "test_whose.py::test_meets_its_own | passed | failed |" in table


ON_A_MACHINE_WITH_A_GPU = """
import os
import torch
torch.accelerator.is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES", "0") != ""  # As a driver does.
from peers import on_cpu
"""


def test_gpus_are_hidden_from_tests_that_run_on_the_cpu() -> None:
    ran = subprocess.run(
        (sys.executable, "-c", ON_A_MACHINE_WITH_A_GPU),
        env={**os.environ, "PYTHONPATH": str(TESTS), "PEERS_RANKS": "2", "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
