"""Stage 5 of the kit: a few steps of a tiny model under a tool of compute-sanitizer, which the argument names.

They gather in eight bits and reduce in bf16, so that libfsdp's own kernels run.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

import rows
from cpp import SMALL, TINY_GPT, train_gpt_by

# Torch's attention: its kernels let a copy into shared memory run beside the next reads on purpose, which racecheck takes for a race.
ATTENTION = "fmha_"
OWN_KERNELS = ("--float8-gather", "--param-dtype", "bf16", "--wire-dtype", "bf16")


def main() -> None:
    tool = sys.argv[1]
    found = shutil.which("compute-sanitizer", path="/usr/local/cuda/bin") or shutil.which("compute-sanitizer")
    before: tuple[str, ...] = () if SMALL or found is None else (found, "--tool", tool, "--target-processes", "all")
    if tool == "memcheck" and before:
        before += ("--error-exitcode", "9")
    with rows.recorded(f"{tool} of train_gpt") as row, tempfile.TemporaryDirectory() as folder:
        losses, said = train_gpt_by(before, Path(folder), "cpu" if SMALL else "cuda", "--steps", 2, *TINY_GPT, *OWN_KERNELS)
        assert len(losses) == 2, f"{len(losses)} losses"
        if not before:
            row.update(result="skipped", why="a rehearsal: the program ran without the tool" if SMALL else "no compute-sanitizer")
            return
        assert "SUMMARY" in said, "the tool has not reported"
        kernels = set(re.findall(r"(?:Read|Write) access at (?:void )?([\w:]+)", said))
        row["hazards_in"] = ", ".join(sorted(kernels)) or "none"
        assert all(name.startswith(ATTENTION) for name in kernels), f"races in {sorted(kernels)}"


if __name__ == "__main__":
    main()
