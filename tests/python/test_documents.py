"""The Python programs in the documents run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"^```python\n(import .*?)^```$", re.DOTALL | re.MULTILINE)
DOCUMENTS = ["README.md", "docs/python-guide.md", "docs/migrating-from-megatron-fsdp.md", "docs/megatron-v2.md"]


def programs() -> list[tuple[str, str]]:
    """Each document's blocks that begin with an import, with where they are from."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        found += [(f"{document}-{k}", program) for k, program in enumerate(PROGRAM.findall(text))]
    return found


def test_documents_have_programs() -> None:
    assert {name.rsplit("-", 1)[0] for name, _ in programs()} == set(DOCUMENTS)


@pytest.mark.parametrize("program", [pytest.param(program, id=name) for name, program in programs()])
def test_program_runs(program: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(program, encoding="utf-8")
    command = [sys.executable, str(path)]
    if "init_process_group" in program:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
