"""One rank of Python's checkpoints: FSDP2's state through torch.distributed.checkpoint, or as many bytes as they are.

bench/checkpoint.py starts the ranks and drives them as bench/run.py does those of contender.py; numbers are those of
checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from contenders.contender import Reply, Trainer, parse_arguments, timed

BLOCK = 1 << 20


class Checkpoints(Trainer):
    """What is timed is torch's own part: making the state dict, and setting it after a load, are not."""

    def handle(self, verb: str, count: int) -> Reply:
        """Saves or loads checkpoint `count`, or answers as Trainer."""
        work = {
            "save": self.save,
            "async_save": self.async_save,
            "load": self.load,
            "write": self.write,
            "read": self.read,
        }.get(verb)
        return super().handle(verb, count) if work is None else work(count)

    def folder(self, number: int) -> Path:
        return Path(os.environ["BENCH_CHECKPOINTS"]) / f"dcp-{number}"

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dist.barrier()
        return {"model": model, "optim": optimizer}

    def save(self, number: int) -> Reply:
        state = self.state()
        return {"ms": [timed(lambda: dcp.save(state, checkpoint_id=self.folder(number)))]}

    def async_save(self, number: int) -> Reply:
        if not hasattr(self, "group"):
            self.group = dist.new_group(backend="gloo")
        [alone] = self.repeat(1)["ms"]
        state = self.state()
        start = time.perf_counter()
        saved = dcp.async_save(state, checkpoint_id=self.folder(number), process_group=self.group)
        blocked = (time.perf_counter() - start) * 1e3
        [beside] = self.repeat(1)["ms"]
        (saved if isinstance(saved, Future) else saved.upload_completion).result()
        return {
            "blocked_ms": [blocked],  # It has copied when it returns: the update waits for nothing.
            "delayed_ms": [blocked + beside - alone],
            "ms": [(time.perf_counter() - start) * 1e3],
        }

    def load(self, number: int) -> Reply:
        state = self.state()
        return {"ms": [timed(lambda: dcp.load(state, checkpoint_id=self.folder(number)))]}

    def plain_file(self, number: int) -> Path:
        return Path(os.environ["BENCH_CHECKPOINTS"]) / f"plain-{number}-{self.rank}"

    def own_bytes(self) -> int:
        """This rank's share of parameters and two moments."""
        return self.parameters * 4 * 3 // self.world

    def write(self, number: int) -> Reply:
        """As many bytes as a checkpoint has, in one sequence, with fsync."""
        block = torch.arange(BLOCK // 4, dtype=torch.float32).numpy().tobytes()
        dist.barrier()

        def work() -> None:
            with self.plain_file(number).open("wb", buffering=0) as file:
                for _ in range(self.own_bytes() // BLOCK):
                    file.write(block)
                os.fsync(file.fileno())

        return {"ms": [timed(work)]}

    def read(self, number: int) -> Reply:
        block = bytearray(BLOCK)
        dist.barrier()

        def work() -> None:
            with self.plain_file(number).open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass

        return {"ms": [timed(work)]}


def main() -> None:
    """Answers lines until stdin ends."""
    args = parse_arguments()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print goes to the log, not between the replies.
    torch.set_num_threads(1)
    contender = Checkpoints(args)
    print(json.dumps({"parameters": contender.parameters}), file=replies)
    for line in sys.stdin:
        verb, count = line.split()
        print(json.dumps(contender.handle(verb, int(count))), file=replies)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
