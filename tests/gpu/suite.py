"""Stage 9 of the kit: files of Python's tests that follow FSDP_TEST_DEVICE, several at a time, for as many seconds as its argument says.

If a rank ends while another one's kernel reads its memory, that is an illegal access, by which CUDA's MPS ends all processes that share the
GPU. Files whose ranks end or fail are therefore left out of MPS.
"""

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
RANKS_END = ["fsdp2/test_ranks_that_differ.py", "weights/test_transfer_plan.py", "fsdp2/test_errors_in_backward.py"]
FILES = [
    *RANKS_END,
    "weights/test_full_weights.py",
    "fsdp2/test_added_options.py",
    "weights/test_local_shards.py",
    "weights/test_weight_source.py",
    "megatron/test_megatron_lifetime.py",
    "megatron/test_megatron_local_shards.py",
    "megatron/test_megatron_gradients.py",
    "megatron/test_megatron_training.py",
    "fsdp2/test_order_and_memory.py",
    "megatron/test_megatron_full_weights.py",
    "fsdp2/test_main_dtypes_and_replicas.py",
    "megatron/test_megatron_microbatches.py",
    "fsdp2/test_calls_between_units.py",
    "megatron/test_megatron_quantized.py",
    "megatron/test_megatron_corrections.py",
    "fsdp2/test_outputs.py",
    "fsdp2/test_unusual_parameters.py",
    "observe/test_debug.py",
    "megatron/test_megatron_fused_gradients.py",
    "megatron/test_megatron_quantized_scales.py",
    "megatron/test_megatron_dtypes.py",
    "fsdp2/test_pipeline.py",
    # These have passed on a GPU.
    "megatron/test_megatron_options.py",
    "optim/test_optim.py",
    "checkpoint/test_checkpoint.py",
    "optim/test_clip_grad_norm.py",
    "megatron/test_megatron_strategies.py",
    "fsdp2/test_precision.py",
    "optim/test_zero_grad.py",
    "fsdp2/test_controls.py",
    "checkpoint/test_state_dict.py",
    "fsdp2/test_methods.py",
    "fsdp2/test_current_parameters.py",
]
# The memory of NCCL's groups, of which a rank has several, is what bounds how many files run at a time.
NCCL = {"NCCL_BUFFSIZE": str(1 << 20), "NCCL_MAX_CTAS": "2"}
AT_ONCE = 2 if SMALL else 6


def test(file: str, end: float) -> None:
    left = end - time.monotonic()
    if left < 5:
        rows.record(file, "skipped", why="no time was left")
        return
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(TESTS / file)]
    begun = time.monotonic()
    environment = {**os.environ, **NCCL, **({"CUDA_MPS_PIPE_DIRECTORY": os.devnull} if file in RANKS_END else {})}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
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
        for done in [pool.submit(test, file, end) for file in (FILES[-4:-3] if SMALL else FILES)]:
            done.result()


if __name__ == "__main__":
    main()
