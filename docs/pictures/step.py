"""Draws a training step of a small model on two ranks: what its units did when, and how much was gathered.

    torchrun --standalone --nproc-per-node 2 docs/pictures/step.py docs/pictures/step.svg

Times are those of torch's profiler, bytes those of libfsdp.memory_stats.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from matplotlib.patches import Patch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import libfsdp

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "libfsdp"
from matplotlib import pyplot as plt  # noqa: E402

BLOCKS, DIM, ROWS, WARM_UP_STEPS = 5, 1024, 1024, 3
COLOURS = {"all-gather": "#9ecae1", "forward": "#3182bd", "backward": "#e6550d", "reduce-scatter": "#fdae6b"}
BLOCK_BYTES = 4 * (4 * DIM * DIM + 3 * DIM)


class Block(nn.Module):
    """Two layers around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@dataclass(frozen=True)
class Span:
    """What a block did, in ms since the step began."""

    block: int
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Sample:
    """Bytes at a time, in ms since the step began."""

    time: float
    gathered: int
    unreduced: int


def record_step(model: nn.Sequential, x: torch.Tensor) -> tuple[list[Span], list[Sample]]:
    """Forward and backward, with what happened in them."""
    looked: list[tuple[int, dict[str, int]]] = []

    def look(*_: Any) -> None:
        looked.append((time.time_ns(), libfsdp.memory_stats(model)))

    handles = [block.register_forward_pre_hook(look) for block in model]
    handles += [block.register_forward_hook(look) for block in model]
    handles += [block.register_full_backward_pre_hook(look) for block in model]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        look()
        loss = model(x).square().mean()
        loss.backward()
        look()
    for handle in handles:
        handle.remove()
    origin, end = looked[0][0], (looked[-1][0] - looked[0][0]) / 1e6
    samples = [
        Sample((at - origin) / 1e6, live["gathered_parameters.live"], live["unreduced_gradients.live"])
        for at, live in looked
    ]
    return spans_of(recorded, origin, end), samples


def spans_of(recorded: profile, origin: int, end: float) -> list[Span]:
    """A gather is drawn until its block is entered; a reduction until backward enters the block after the next, which waits for it."""
    results: Any = recorded.profiler.kineto_results
    spans: list[Span] = []
    begun: dict[tuple[str, int], float] = {}
    # A block is entered when its hook before forward or backward ends, which may have gathered it.
    for event in sorted(results.events(), key=lambda e: int(e.end_ns() if "::pre_" in e.name() else e.start_ns())):
        name, _, rest = event.name().partition(" (")
        if not name.startswith("FSDP::") or not rest.rstrip(")").isdigit():
            continue
        block = int(rest.rstrip(")"))
        start, stop = (event.start_ns() - origin) / 1e6, (event.end_ns() - origin) / 1e6
        match name.removeprefix("FSDP::"):
            case "all_gather":
                begun["all-gather", block] = start
            case "pre_forward" | "pre_backward" as entered:
                if ("all-gather", block) in begun:
                    spans.append(Span(block, "all-gather", begun.pop(("all-gather", block)), stop))
                begun["forward" if entered == "pre_forward" else "backward", block] = stop
            case "post_forward":
                spans.append(Span(block, "forward", begun.pop(("forward", block)), start))
            case "post_backward_reduce":
                spans.append(Span(block, "backward", begun.pop(("backward", block)), start))
                begun["reduce-scatter", block] = start
    in_backward = {span.block: span.begin for span in spans if span.kind == "backward"}
    for (kind, block), start in begun.items():
        if kind == "reduce-scatter":
            spans.append(Span(block, kind, start, in_backward.get(block - 2, end)))
    return spans


def draw(spans: list[Span], samples: list[Sample], out: str) -> None:
    """Blocks above, memory below."""
    figure, (blocks, memory) = plt.subplots(
        2, 1, figsize=(10, 5), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    for span in spans:
        communicates = span.kind in ("all-gather", "reduce-scatter")
        y, height = (span.block + 0.32, 0.2) if communicates else (span.block, 0.4)
        blocks.barh(y, span.end - span.begin, left=span.begin, height=height, color=COLOURS[span.kind])
    blocks.set_yticks(range(BLOCKS), [f"block {i}" for i in range(BLOCKS)])
    blocks.set_ylim(BLOCKS - 0.4, -1.0)
    blocks.legend(handles=[Patch(color=c, label=k) for k, c in COLOURS.items()], ncols=4, loc="upper center")
    times = [sample.time for sample in samples]
    for label, colour, sizes in (
        ("gathered parameters", COLOURS["forward"], [s.gathered / BLOCK_BYTES for s in samples]),
        ("unreduced gradients", COLOURS["backward"], [s.unreduced / BLOCK_BYTES for s in samples]),
    ):
        memory.step(times, sizes, where="post", color=colour, label=label)
    memory.set_ylabel("in blocks")
    memory.set_xlabel("ms of one step (rank 0 of 2)")
    memory.legend()
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model:
        libfsdp.fully_shard(block)
    libfsdp.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(ROWS, DIM, requires_grad=True)
    for _ in range(WARM_UP_STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    spans, samples = record_step(model, x)
    if dist.get_rank() == 0:
        draw(spans, samples, sys.argv[1])
        most = max(sample.gathered for sample in samples) / BLOCK_BYTES
        print(f"{len(spans)} spans, at most {most:.2f} blocks gathered")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
