"""How ranks end: by a signal, and before the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import run_program

import libfsdp

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

SHARDED = """
import os, signal, sys
import torch, libfsdp
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Linear(8, 8)
libfsdp.fully_shard(model)
"""


def write(folder: Path, program: str) -> Path:
    path = folder / "program.py"
    path.write_text(SHARDED + program)
    return path


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """By torchrun: an interpreter that ends says so to the others, which a process that a test forks does not."""
    return subprocess.run([*TORCHRUN, str(write(folder, program))], text=True, capture_output=True, timeout=300)


def test_a_signal_to_one_rank_ends_all_after_the_same_step(tmp_path: Path) -> None:
    program = write(
        tmp_path,
        """
step = 0
while not libfsdp.stop_requested():
    step += 1
    model(torch.ones(2, 8)).sum().backward()
    if step in (3, 4) and rank == 1:
        os.kill(os.getpid(), signal.SIGINT if step == 4 else signal.SIGTERM)
    assert step < 9
sys.stderr.write(f"rank {rank} ends after step {step}\\n")
dist.destroy_process_group()
""",
    )
    for rank, outcome in enumerate(run_program(program, 2, tmp_path)):
        assert outcome.exit_code == 0, outcome.errors
        assert f"rank {rank} ends after step 3\n" in outcome.errors, outcome.errors


def test_without_other_ranks() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert not libfsdp.stop_requested()
        os.kill(os.getpid(), signal.SIGINT)  # no KeyboardInterrupt
        assert libfsdp.stop_requested()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_rank_that_had_ended_is_named(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
for _ in range(3 + rank):
    model(torch.ones(2, 8)).sum().backward()
""",
    )
    assert done.returncode != 0
    assert "rank 0 had ended its training: the ranks take different numbers of steps" in done.stderr, done.stderr
    assert "FSDP_DEBUG=1" in done.stderr


@pytest.mark.nightly
def test_a_rank_that_has_failed_has_not_ended(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by torchrun, which sees rank 0 fail
for step in range(3):
    if step == 2 and rank == 0:
        raise ValueError("no batch")
    model(torch.ones(2, 8)).sum().backward()
""",
    )
    assert done.returncode != 0
    assert "ValueError: no batch" in done.stderr
    assert "CommError: " in done.stderr
    assert "had ended" not in done.stderr, done.stderr
