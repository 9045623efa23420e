"""The recipe of docs/run/launch.md: torchrun goes on with fewer ranks after one was lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ports import reserved_port

ROOT = Path(__file__).parents[3]
RECIPE = re.compile(r"^```python\n(# restart\.py\n.*?)^```$", re.DOTALL | re.MULTILINE)


def children_of(process: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(process), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(child) for child in found.stdout.split()]


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as number:
        yield number


def test_a_run_goes_on_with_fewer_ranks(port: int, tmp_path: Path) -> None:
    """Two agents of torchrun stand for two machines; one of them is lost."""
    document = (ROOT / "docs/run/launch.md").read_text(encoding="utf-8")
    (program,) = RECIPE.findall(document)
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in document
    # At step 12, ranks tell how many they are, and wait until one has been lost.
    lines = [
        "    step += 1",
        "    if step == 12:",
        "        open(f'{folder}-{dist.get_world_size()}', 'w').close()",
        "        while not os.path.exists(f'{folder}-lost'):",
        "            time.sleep(0.1)",
    ]
    for replaced, by in (("import sys\n", "import os, sys, time\n"), ("    step += 1\n", "\n".join([*lines, ""]))):
        assert program.count(replaced) == 1
        program = program.replace(replaced, by)
    script = tmp_path / "restart.py"
    script.write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    arguments = [str(script), str(tmp_path / "run"), "100"]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}

    def agent(name: str, *, serves: bool) -> subprocess.Popen[bytes]:
        conf = ["--rdzv-conf", f"last_call_timeout=2,is_host={serves}"]
        with (tmp_path / name).open("w") as output:
            return subprocess.Popen([*command, *conf, *arguments], stdout=output, stderr=output, env=environment)

    agents = [agent("stays", serves=True), agent("lost", serves=False)]
    try:
        end = time.monotonic() + 240
        while not (tmp_path / "run-2").exists():
            assert time.monotonic() < end, (tmp_path / "stays").read_text()
            time.sleep(0.1)
        for process in (*children_of(agents[1].pid), agents[1].pid):
            os.kill(process, signal.SIGKILL)
        (tmp_path / "run-lost").touch()
        assert agents[0].wait(timeout=240) == 0, (tmp_path / "stays").read_text()
    finally:
        for one in agents:
            for process in (*children_of(one.pid), one.pid) if one.poll() is None else ():
                os.kill(process, signal.SIGKILL)
            one.wait()
    printed = (tmp_path / "stays").read_text()
    assert "steps 10 to 100 on 1 ranks" in printed, printed
