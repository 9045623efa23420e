"""The Python programs in the documents run as they stand there, and what one replaces prints the same."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import run_program

ROOT = Path(__file__).parents[3]
OUTPUT = re.compile(r"^```output\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(r"^```python\n(import .*?)^```$", re.DOTALL | re.MULTILINE)
DIFF = re.compile(r"^```diff\n( import .*?)^```$", re.DOTALL | re.MULTILINE)
DOCUMENTS = [
    "README.md",
    "docs/use/python-guide.md",
    "docs/use/plan.md",
    "docs/use/tuning.md",
    "docs/use/steps.md",
    "docs/use/weights.md",
    "docs/run/corruption.md",
    "docs/migrate/from-fsdp2.md",
    "docs/migrate/from-megatron-fsdp.md",
    "docs/migrate/megatron-per-module.md",
]


def programs() -> list[tuple[str, str]]:
    """Each document's blocks that begin with an import, with where they are from."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        found += [(f"{document}-{k}", program) for k, program in enumerate(PROGRAM.findall(text))]
    return found


def test_documents_have_programs() -> None:
    assert {name.rsplit("-", 1)[0] for name, _ in programs()} == set(DOCUMENTS)


IN_PROCESSES = [pytest.param(program, id=name) for name, program in programs() if not name.startswith("README.md")]


@pytest.mark.parametrize("program", IN_PROCESSES)
def test_program_runs(program: str, tmp_path: Path) -> None:
    run(program, tmp_path)


def test_program_of_the_readme_runs_by_torchrun(tmp_path: Path) -> None:
    (program,) = (program for name, program in programs() if name.startswith("README.md"))
    path = write(program, tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    says = OUTPUT.search(readme, readme.index(program))
    assert says is not None
    assert result.stdout == says[1]


def write(program: str, folder: Path) -> Path:
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    return path


def run(program: str, folder: Path) -> list[str]:
    """The lines that it prints, sorted; on two ranks if it is made for ranks."""
    for_ranks = "init_process_group" in program
    outcomes = run_program(write(program, folder), 2 if for_ranks else 1, folder, alone=not for_ranks)
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.errors[-4000:]
    return sorted(line for outcome in outcomes for line in outcome.output.splitlines())


@pytest.mark.nightly
def test_the_program_before_migrating_prints_the_same(tmp_path: Path) -> None:
    (diff,) = DIFF.findall((ROOT / "docs/migrate/from-fsdp2.md").read_text(encoding="utf-8"))
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    assert any("torch.distributed.fsdp" in line for line in before)
    assert not any("torch.distributed.fsdp" in line for line in after)
    printed = []
    for name, program in (("before", before), ("after", after)):
        folder = tmp_path / name
        folder.mkdir()
        printed.append(run("\n".join([*program, ""]), folder))
        assert (folder / "checkpoint" / ".metadata").exists()
    assert printed[0] == printed[1]
    assert len(printed[0]) == 6
