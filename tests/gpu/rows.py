"""What a program of the kit has found, row by row: each is written at once, so that a time limit loses none."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def record(name: str, result: str, **more: Any) -> None:
    """A row. `result`: "passed", "failed", "skipped", or "measured"."""
    row = {"name": name, "result": result, **more}
    with Path(os.environ["GPU_KIT_ROWS"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(f"  {result}: {name}", *(f"{key}={value}" for key, value in more.items()), flush=True)


@contextmanager
def recorded(name: str, **more: Any) -> Iterator[Row]:
    """A row about what is done within it, with what that adds. An exception is a failure, and the program goes on."""
    found: Row = dict(more)
    begun = time.monotonic()
    result = "passed"
    try:
        yield found
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        result, found["why"] = "failed", f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
    record(name, found.pop("result", result), seconds=round(time.monotonic() - begun, 1), **found)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
