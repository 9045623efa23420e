"""The kit for a machine with a GPU, rehearsed on the CPU: its first stage, and what a stage keeps of programs that fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import libfsdp

TESTS = Path(__file__).resolve().parents[2]
PATHS = (Path(libfsdp.__file__).parents[1], TESTS / "python", TESTS / "gpu")
ENVIRONMENT = {
    **os.environ,
    "FSDP_TEST_DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(str(path) for path in PATHS),
}


def test_the_first_stage_finds_no_difference_to_fsdp2(tmp_path: Path) -> None:
    program = (sys.executable, TESTS / "gpu" / "parity.py", "here")
    found = tmp_path / "rows"
    ran = subprocess.run(program, env={**ENVIRONMENT, "GPU_KIT_ROWS": str(found)}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    assert [row["name"] for row in rows if row["result"] != "passed"] == [], ran.stdout
    assert len(rows) > 12
    assert sum(row.get("difference") == 0.0 for row in rows) > 8, "on a CPU, nearly all bits are equal"


FAILING = """
import sys
from stages import Program, Stage, STAGES, main

def python(text):
    return [sys.executable, "-c", "import rows, time, sys; " + text]

STAGES[1] = Stage(
    "of a test",
    30,
    [
        Program(python("rows.record('before', 'passed'); time.sleep(60)"), most=8),  # A busy machine takes seconds to start Python.
        Program(python("rows.record('next', 'passed'); print('the reason'); sys.exit(3)")),
        Program(python("rows.record('last', 'passed')")),
    ],
)
sys.exit(main())
"""


def test_a_program_that_fails_or_hangs_keeps_its_rows_and_stops_no_other(tmp_path: Path) -> None:
    command = (sys.executable, "-c", FAILING, "--out", tmp_path, "1")
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    results: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    stage = results["stages"][0]
    assert [(row["name"], row["result"]) for row in stage["rows"] if "why" not in row] == [
        ("before", "passed"),
        ("next", "passed"),
        ("last", "passed"),
    ]
    assert [row["why"] for row in stage["rows"] if row["result"] == "failed"] == [
        "took longer than 8 s",
        "exit code 3: the reason",
    ]
    assert results["machine"]["device"] == "cpu: a rehearsal, nothing of which ran on a GPU"
    assert "took longer than 8 s" in (tmp_path / "tables.md").read_text()


def test_the_kit_has_what_it_names() -> None:
    """Each program of a stage is a file of the tree."""
    program = "from stages import STAGES; print('\\n'.join(p for s in STAGES.values() for q in s.programs for p in q.command))"
    ran = subprocess.run((sys.executable, "-c", program), env=ENVIRONMENT, capture_output=True, text=True, check=True)
    files = {part for part in ran.stdout.splitlines() if part.endswith(".py")}
    assert len(files) > 5
    missing = [file for file in files if not (TESTS.parent / file).is_file()]
    assert missing == []


STAGES_OF_A_TEST = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", "import libfsdp, support; print(libfsdp.NAME)"], cwd="/", check=True)
"""


def test_folders_may_be_relative(tmp_path: Path) -> None:
    """Programs of a stage, which run in other folders, find what is unpacked."""
    kit = tmp_path / "kit"
    files = {
        "prebuilt/python/libfsdp/__init__.py": "NAME = 'of the kit'",
        "tree/tests/python/support/__init__.py": "",
        "tree/tests/gpu/stages.py": STAGES_OF_A_TEST,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    kit.mkdir()
    for part in ("prebuilt", "tree"):
        shutil.make_archive(str(kit / part), "gztar", tmp_path / part)
    (kit / "kit.json").write_text('{"commit": "0"}', encoding="utf-8")
    shutil.copy(TESTS / "gpu" / "run.sh", kit)
    command = ("kit/run.sh", "--work", "unpacked", "--device", "cpu", "--python", sys.executable, "1")
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1:] == ["of the kit"], ran.stdout + ran.stderr
