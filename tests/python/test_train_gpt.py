"""examples/train_gpt.py under torchrun, on two ranks."""

import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2]


def train(data: Path, *options: str) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = SOURCE / "examples" / "train_gpt.py"
    done = subprocess.run([*torchrun, program, "--data", data, *options], text=True, capture_output=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_two_ranks_learn_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    (tmp_path / "not_text").write_bytes(b"\0" * 4000)
    output = train(tmp_path, "--steps", "12")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 2, output  # after the first and the last step, once
    assert 5.0 < losses[0] < 6.0, "untrained, every byte is about as likely: ln 256 = 5.55"
    assert losses[1] < losses[0] - 1
    assert re.search(r"done: 12 steps in \d+ s, validation \d\.\d+ bits per byte", output), output
