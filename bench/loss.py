"""Losses of a small GPT whose gradients are sent in fp32, bf16, 8 bits and 4 bits.

    python bench/loss.py --steps 400 --seeds 3

The model, its text (by default LibTorch's own headers) and its learning rates are those of examples/train_gpt.py. The ranks send messages,
also on one host, so that each gradient is rounded. Seeds change the model's initial values and the batches, which all formats share. Writes
a table and a plot.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
SMOOTHED = 10  # Steps of which the plot shows the mean.
VALIDATED = 16  # Sequences of each rank.


@dataclass(frozen=True)
class Job:
    """One training run."""

    form: str
    seed: int
    ranks: int
    steps: int
    layers: int
    data: Path


def options_of(form: str) -> dict[str, Any]:
    """Arguments of fully_shard."""
    libfsdp = importlib.import_module("libfsdp")
    formats: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"mp_policy": libfsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        "8 bits": {"grad_comm_format": libfsdp.GradCommFormat(bits=8)},
        "4 bits": {"grad_comm_format": libfsdp.GradCommFormat(bits=4)},
        "4 bits, transformed": {"grad_comm_format": libfsdp.GradCommFormat(bits=4, hadamard=True)},
        "4 bits, with feedback": {"grad_comm_format": libfsdp.GradCommFormat(bits=4, hadamard=True, error_feedback=True)},
    }
    return formats[form]


FORMS = ("fp32", "bf16", "8 bits", "4 bits", "4 bits, transformed", "4 bits, with feedback")


@dataclass(frozen=True)
class Curve:
    """The mean loss of all ranks: of each step, and of the validation text at the end. In nats per byte."""

    steps: list[float]
    validation: float


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    means: list[float] = (total / dist.get_world_size()).tolist()
    return means


def train(job: Job, rank: int) -> Curve:
    """On one rank; all ranks return the same."""
    program = importlib.import_module("train_gpt")
    libfsdp = importlib.import_module("libfsdp")
    text, validation = program.read_text(job.data)
    torch.manual_seed(job.seed)
    model = program.GPT(job.layers)
    options = options_of(job.form)
    for part in (*model.blocks, model):
        libfsdp.fully_shard(part, **options)
    optimizer = libfsdp.fuse(torch.optim.AdamW(model.parameters(), lr=program.LR, betas=(0.9, 0.95), weight_decay=0.1))
    losses = []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = program.lr_at(step, job.steps)
        draws = torch.Generator().manual_seed((job.seed * job.steps + step) * job.ranks + rank)
        starts = torch.randint(len(text) - program.CONTEXT, (program.SEQUENCES // job.ranks,), generator=draws)
        loss: Tensor = program.loss_of(model, *program.cut(text, starts))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), program.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        starts = torch.linspace(0, len(validation) - program.CONTEXT - 1, VALIDATED * job.ranks).long()[rank :: job.ranks]
        losses.append(program.loss_of(model, *program.cut(validation, starts)).item())
    *of_steps, last = mean_over_ranks(losses)
    return Curve(of_steps, last)


def run_rank(jobs: Sequence[Job], rank: int, store: str, results: Any) -> None:
    """Trains all jobs as one of their ranks; rank 0 sends the curves."""
    torch.set_num_threads(1)
    os.environ["FSDP_SHARED_MEMORY"] = "0"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=jobs[0].ranks)
    for job in jobs:
        curve = train(job, rank)
        if rank == 0:
            print(f"{job.form}, seed {job.seed}: validation {curve.validation:.4f}", file=sys.stderr)
            results.send(curve)
    dist.destroy_process_group()


def run_all(jobs: Sequence[Job]) -> list[Curve]:
    """The curves of the jobs. Raises RuntimeError if a rank fails."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    store = os.path.join(tempfile.mkdtemp(prefix="fsdp-loss-"), "store")
    ranks = [context.Process(target=run_rank, args=(jobs, rank, store, sender)) for rank in range(jobs[0].ranks)]
    for process in ranks:
        process.start()
    sender.close()
    try:
        return [receiver.recv() for _ in jobs]
    except EOFError:
        raise RuntimeError("a rank has failed") from None
    finally:
        for process in ranks:
            process.join()


def table_of(curves: dict[str, list[Curve]], command: str) -> str:
    """Each format's loss: of the last steps and of the validation text, with the difference from fp32, seed by seed."""
    lines = [
        f"`{command}`",
        "",
        "Medians over seeds, with their range; nats per byte.",
        "",
        "| gradients | loss of the last steps | validation | difference from fp32 |",
        "|---|---|---|---|",
    ]
    for form, runs in curves.items():
        last = [statistics.fmean(run.steps[-SMOOTHED:]) for run in runs]
        validation = [run.validation for run in runs]
        differences = [run.validation - exact.validation for run, exact in zip(runs, curves["fp32"], strict=True)]
        cells = (f"{statistics.median(v):.4f} ({min(v):.4f} to {max(v):.4f})" for v in (last, validation, differences))
        lines.append(f"| {form} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(curves: dict[str, list[Curve]], path: Path) -> None:
    """A line for each format: the mean over seeds of smoothed losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = ("#000000", "#D55E00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7")  # Okabe and Ito's
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for (form, runs), colour in zip(curves.items(), colours, strict=True):
        mean = torch.tensor([run.steps for run in runs]).mean(0)
        width = min(SMOOTHED, mean.numel())
        smooth = mean.unfold(0, width, 1).mean(1)
        axes.plot(range(width, mean.numel() + 1), smooth.tolist(), label=form, color=colour, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats per byte, mean of {SMOOTHED} steps")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="2 or 4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--data", type=Path, default=Path(torch.__file__).parent / "include")
    parser.add_argument("--package", type=Path, default=ROOT / "build/python", help="the folder of libfsdp's package")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/loss", help=".md and .png are written")
    args = parser.parse_args()
    sys.path[:0] = [str(args.package.resolve()), str(ROOT / "examples")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the ranks
    jobs = [
        Job(form, seed, args.ranks, args.steps, args.layers, args.data) for form in FORMS for seed in range(args.seeds)
    ]
    of_jobs = run_all(jobs)
    curves = {form: [c for job, c in zip(jobs, of_jobs, strict=True) if job.form == form] for form in FORMS}
    table = table_of(curves, f"python bench/loss.py --steps {args.steps} --seeds {args.seeds} --ranks {args.ranks} --layers {args.layers}")
    args.out.with_suffix(".md").write_text("# Losses with gradients in fewer bits\n\n" + table)
    plot(curves, args.out.with_suffix(".png"))
    print(table)


if __name__ == "__main__":
    main()
