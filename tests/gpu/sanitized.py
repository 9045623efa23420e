"""Stage 5 of the kit: a few steps of a tiny model under a tool of compute-sanitizer, which the argument names."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import rows
from cpp import SMALL, TINY_GPT, train_gpt


def main() -> None:
    tool = sys.argv[1]
    found = shutil.which("compute-sanitizer", path="/usr/local/cuda/bin") or shutil.which("compute-sanitizer")
    before = () if SMALL or found is None else (found, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all")
    with rows.recorded(f"{tool} of train_gpt") as row, tempfile.TemporaryDirectory() as folder:
        losses = train_gpt(Path(folder), "cpu" if SMALL else "cuda", "--steps", 2, *TINY_GPT, before=before)
        assert len(losses) == 2, f"{len(losses)} losses"
        if not before:
            row.update(result="skipped", why="a rehearsal: the program ran without the tool" if SMALL else "no compute-sanitizer")


if __name__ == "__main__":
    main()
