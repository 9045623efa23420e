"""Stage 9 of the kit: files of Python's tests that follow FSDP_TEST_DEVICE, several at a time, for as many seconds as its argument says."""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import rows
from cpp import SMALL

TESTS = Path(__file__).resolve().parents[1] / "python"
FILES = [
    "test_clip_grad_norm.py",
    "test_megatron_strategies.py",
    "test_optim.py",
    "test_state_dict.py",
    "test_controls.py",
    "test_methods.py",
    "test_current_parameters.py",
    "test_order_and_memory.py",
    "test_checkpoint.py",
    "test_zero_grad.py",
    "test_beyond.py",
    "test_precision.py",
    "test_main_dtypes_and_replicas.py",
    "test_megatron_training.py",
    "test_megatron_gradients.py",
    "test_megatron_microbatches.py",
    "test_errors_in_backward.py",
    "test_calls_between_units.py",
    "test_megatron_options.py",
    "test_megatron_quantized.py",
    "test_unusual_parameters.py",
    "test_outputs.py",
]
AT_ONCE = 2 if SMALL else 7


def test(file: str, end: float) -> None:
    left = end - time.monotonic()
    if left < 5:
        rows.record(file, "skipped", why="no time was left")
        return
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(TESTS / file)]
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        said, _ = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said, _ = process.communicate()
        said += "\nwas ended: no time was left"
    print(said, flush=True)
    failed = re.findall(r"^FAILED \S+::(\S+)", said, re.MULTILINE)
    seconds = round(time.monotonic() - begun, 1)
    last = (said.strip().splitlines() or [""])[-1][:120]
    rows.record(file, "passed" if process.returncode == 0 else "failed", seconds=seconds, last=last, failed=", ".join(failed)[:600])


def main() -> None:
    end = time.monotonic() + float(sys.argv[1])
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(test, file, end) for file in (FILES[4:5] if SMALL else FILES)]:
            done.result()


if __name__ == "__main__":
    main()
