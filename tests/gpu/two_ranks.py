"""Stage 8 of the kit: NCCL's collectives between two ranks on the GPU, and `train_gpt` on two ranks against the same on the CPU."""

from __future__ import annotations

import ctypes
import sys
import tempfile
import time
from pathlib import Path

import rows
import torch
import torch.distributed as dist
from cpp import SMALL, TINY_GPT, train_gpt
from support import device
from support.ranks import Ranks
from torch import Tensor

ELEMENTS = 1 << 20
REPEATED = 10


def exchange(dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds per call of what an engine needs. Raises where a result is wrong."""
    rank = dist.get_rank()
    here = device.of_rank(rank)
    mine = torch.full((ELEMENTS,), rank + 1, dtype=dtype, device=here)
    whole = torch.empty(2 * ELEMENTS, dtype=dtype, device=here)
    part = torch.empty(ELEMENTS // 2, dtype=dtype, device=here)
    other = torch.empty_like(mine)

    def two_ways() -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
        ):
            work.wait()

    calls = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, mine),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, mine),
        "send_and_receive": two_ways,
    }
    took = {}
    for name, call in calls.items():
        call()
        expected: Tensor = {
            "all_gather": torch.tensor([1.0, 2.0]).repeat_interleave(ELEMENTS),
            "reduce_scatter": torch.full((ELEMENTS // 2,), 3.0),
            "send_and_receive": torch.full((ELEMENTS,), 2.0 - rank),
        }[name].to(dtype)
        found = {"all_gather": whole, "reduce_scatter": part, "send_and_receive": other}[name]
        assert torch.equal(found.cpu(), expected), f"{name} of {dtype}"
        begun = time.perf_counter()
        for _ in range(REPEATED):
            call()
        found.cpu()
        took[name] = round((time.perf_counter() - begun) / REPEATED * 1e3, 3)
    return took


def loaded_nccl() -> int:
    """The version, as 23203 for 2.32.3. torch.cuda.nccl.version() is that of the headers which torch was built with."""
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value


def check_train_gpt(name: str, bound: float, *options: object) -> None:
    """10 steps on two ranks of a program in C++, loss by loss."""
    with rows.recorded(f"train_gpt on two ranks, {name}") as row, tempfile.TemporaryDirectory() as folder:
        common = ("--steps", 10, *TINY_GPT, *options)
        here = train_gpt(Path(folder) / "here", device.TYPE, *common, ranks=2)
        cpu = train_gpt(Path(folder) / "cpu", "cpu", *common, ranks=2)
        row["difference"] = max(abs(a - b) / b for a, b in zip(here, cpu, strict=True))
        assert len(here) == 10, f"{len(here)} losses"
        assert row["difference"] <= bound, f"losses differ by {row['difference']:.3g} of theirs"


def main() -> int:
    ranks = Ranks(2)
    passed = False
    for dtype in (torch.float32, torch.bfloat16):
        with rows.recorded(f"collectives of 1,048,576 elements of {str(dtype).removeprefix('torch.')}") as row:
            if not SMALL:
                row["nccl"] = loaded_nccl()
            row.update(ranks.run(exchange, dtype, limit=20)[0])
            passed = True
    if not passed:
        return 1
    check_train_gpt("fp32", 1e-3)
    check_train_gpt("bf16", 3e-2, "--param-dtype", "bf16", "--wire-dtype", "bf16")
    return 0


if __name__ == "__main__":
    sys.exit(main())
