"""Stage 7 of the kit: steps that are captured as a CUDA graph and replayed, against the same steps without one; in C++, too."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import rows
import torch
import torch.distributed as dist
from cpp import record_lines_of
from support import device
from support.models import Transformer, next_token_loss
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

import libfsdp

WARM, REPLAYED = 3, 3
ON_GPU = device.TYPE != "cpu"


def plain(model: Any, **_: Any) -> Any:
    return model


class Trainer:
    """A small transformer on one batch."""

    def __init__(self, shard: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.model: Any = Transformer(blocks=3).to(device.TYPE)
        mesh = init_device_mesh(device.TYPE, (1,))
        for block in self.model.blocks:
            shard(block, mesh=mesh)
        shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, capturable=ON_GPU)
        self.batch = (torch.randint(37, (4, 16), generator=torch.Generator().manual_seed(1)).to(device.TYPE),)

    def forward_and_backward(self) -> Tensor:
        loss = next_token_loss(self.model, self.batch)
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.forward_and_backward()
        self.optimizer.step()
        return loss


def replayed(work: Callable[[], Tensor]) -> list[float]:
    """The losses of what is replayed, after the warm-up that capturing needs. Where there are no graphs, `work` is called again."""
    if not ON_GPU:
        return [work().item() for _ in range(WARM + REPLAYED)][WARM:]
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARM):
            work()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = work()
    losses = []
    for _ in range(REPLAYED):
        graph.replay()
        losses.append(loss.item())
    return losses


def check(name: str, shard: Callable[..., Any]) -> None:
    with rows.recorded(name) as row:
        eager = Trainer(shard)
        expected = [eager.step().item() for _ in range(WARM + REPLAYED)][WARM:]
        found = replayed(Trainer(shard).step)
        row["difference"] = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
        assert row["difference"] <= 1e-4, f"losses {found}, not {expected}"
        if not ON_GPU:
            row.update(result="skipped", why="a rehearsal: the steps ran, without graphs")


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        device.join(0, 1, init_method=f"file://{folder}/store")
        # A capture that fails can leave its stream unusable: what is least likely to fail comes first.
        for name, shard in (("plain", plain), ("libfsdp", libfsdp.fully_shard), ("FSDP2", fsdp2)):
            check(f"a whole step, {name}", shard)
        dist.destroy_process_group()
    return record_lines_of("check_capture")


if __name__ == "__main__":
    sys.exit(main())
