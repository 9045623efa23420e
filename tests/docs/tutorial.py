"""Follows docs/start/tutorial.md in an empty folder, as somebody would who has the library installed.

    tutorial.py TUTORIAL FOLDER PREFIX PACKAGE GENERATOR    PREFIX: where the library is installed; PACKAGE: a folder for PYTHONPATH

The first block of shell installs, which the test has done before in its own way. All other blocks are taken as they stand.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from examples import blocks_of


def main(tutorial: Path, folder: Path, prefix: Path, package: Path, generator: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    home = folder / "home"
    home.mkdir(parents=True)
    (home / "fsdp").symlink_to(prefix)
    project = folder / "project"
    project.mkdir()
    tools = Path(sys.executable).parent
    environment = {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(package),
        "CMAKE_GENERATOR": generator,
    }
    # A block is the content of the file that the text has named last.
    names = iter(re.findall(r"[wW]rite `([\w.]+)`|And `([\w.]+)`:", tutorial.read_text(encoding="utf-8")))
    output: list[str] = []
    shells = 0
    for block in blocks_of(tutorial):
        if block.info != "sh":
            (project / "".join(next(names))).write_text(block.text, encoding="utf-8")
            continue
        shells += 1
        if shells == 1:
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text], cwd=project, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
        output.append(done.stdout)

    # Each block of shell trains 20 steps.
    losses = [float(loss) for loss in re.findall(r"loss (?:of rank 0 )?([\d.]+)$", "".join(output), re.MULTILINE)]
    assert len(losses) == 8, output
    assert losses[-1] < losses[0], losses
    _, second, third, python = output
    assert "resumes after step 20\n" in second, second
    assert "resumes after step 40\n" in third, third
    assert "step 80  loss of rank 0" in python, python
    left = {path.name for path in (project / "run").iterdir() if not path.name.startswith(".")}
    assert left == {"step-50", "step-60", "from-python"}, left


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
