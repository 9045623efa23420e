"""Runs what takes hours, one part after the other, and writes one page of results; see `make nightly`.

    nightly.py OUT PART...

A part is NAME=COMMAND. Its output goes to OUT/NAME.log; OUT/README.md has a row per part: the result, the time and the last line. A part
that fails does not stop the others; then this fails at the end. Rows of parts that ran before stay, so that some can run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """What came of a part."""

    command: str
    commit: str
    passed: bool
    minutes: float
    last_line: str


def run(name: str, command: str, out: Path, commit: str) -> Outcome:
    """The part's outcome. Its output is in a log of its own."""
    begun = time.monotonic()
    log = out / f"{name}.log"
    with log.open("wb") as stream:
        code = subprocess.run(command, shell=True, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return Outcome(command, commit, code == 0, (time.monotonic() - begun) / 60, lines[-1] if lines else "")


def page(outcomes: dict[str, Outcome]) -> str:
    """Markdown."""
    rows = ["| part | result | minutes | commit | last line | command |", "|---|---|---|---|---|---|"]
    for name, outcome in outcomes.items():
        result = "passed" if outcome.passed else "**failed**"
        said, command = cell(outcome.last_line), cell(outcome.command)
        rows.append(f"| {name} | {result} | {outcome.minutes:.1f} | {outcome.commit} | `{said}` | `{command}` |")
    return "\n".join([*rows, ""])


def cell(text: str) -> str:
    """What a table can hold."""
    return text.replace("|", "\\|").replace("`", "'")


def main(arguments: list[str]) -> int:
    if len(arguments) < 2 or not all("=" in part for part in arguments[1:]):
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "outcomes.json"
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    outcomes = {name: Outcome(**fields) for name, fields in known.items()}
    describe = ("git", "describe", "--always", "--dirty")
    commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    parts = dict(part.split("=", 1) for part in arguments[1:])
    for name, command in parts.items():
        print(f"nightly: {name}", flush=True)
        outcomes[name] = run(name, command, out, commit)
        kept.write_text(json.dumps({key: asdict(value) for key, value in outcomes.items()}, indent=1), encoding="utf-8")
        (out / "README.md").write_text(page(outcomes), encoding="utf-8")
    print(page(outcomes), end="")
    return 0 if all(outcomes[name].passed for name in parts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
