"""Losses of small models whose parameters and gradients are sent in fp32, bf16, 8 bits and 4 bits.

    python bench/loss.py --steps 1000 --seeds 3 --layers 2
    python bench/loss.py --model llama --steps 1000 --seeds 1 --layers 6 --dim 384

The model `gpt`, the text (by default LibTorch's own headers) and the learning rates are those of examples/train_gpt.py; `llama` is
transformers' Llama. The ranks send messages, also on one host, so that each gradient is rounded. Seeds change the model's initial values
and the batches, which all formats share. Writes a table and a plot whenever all formats have run with a seed.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
LAST = 10  # Steps of which the table has the mean.
SMOOTHED = 50  # Steps of which the plot shows the mean.
VALIDATED = 64  # Sequences of each rank.


@dataclass(frozen=True)
class Job:
    """One training run."""

    form: str
    seed: int
    ranks: int
    steps: int
    model: str
    layers: int
    dim: int
    data: Path


def options_of(form: str) -> dict[str, Any]:
    """Arguments of fully_shard. Vectors are few, and are gathered as they are, as in the case `hosts_rounded` of bench/run.py."""
    libfsdp = importlib.import_module("libfsdp")

    def of_matrices(gather_format: object) -> dict[str, Any]:
        return {"gather_format": lambda parameter: gather_format if parameter.dim() > 1 else None}

    def in_4_bits(hadamard: bool) -> dict[str, Any]:
        gathers = of_matrices(libfsdp.Int4Differences(hadamard=hadamard))
        return gathers | {
            "placements": "optim_grads",
            "grad_comm_format": libfsdp.GradCommFormat(bits=4, hadamard=hadamard),
        }

    formats: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"mp_policy": libfsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        "8 bits": {"grad_comm_format": libfsdp.GradCommFormat(bits=8)},
        "4 bits": {"grad_comm_format": libfsdp.GradCommFormat(bits=4)},
        "8 bits both ways": of_matrices(libfsdp.Float8Blocks(128))
        | {"grad_comm_format": libfsdp.GradCommFormat(bits=8)},
        "4 bits both ways": in_4_bits(hadamard=False),
        "4 bits both ways, transformed": in_4_bits(hadamard=True),
    }
    return formats[form]


FORMS = ("fp32", "bf16", "8 bits", "4 bits", "8 bits both ways", "4 bits both ways", "4 bits both ways, transformed")


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


def build(job: Job) -> tuple[nn.Module, list[nn.Module]]:
    """The model, and its units."""
    program = importlib.import_module("train_gpt")
    torch.manual_seed(job.seed)
    if job.model == "gpt":
        gpt = program.GPT(job.layers)
        return gpt, [*gpt.blocks, gpt]
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=job.dim,
        intermediate_size=(job.dim * 8 // 3 + 63) // 64 * 64,
        num_hidden_layers=job.layers,
        num_attention_heads=job.dim // 64,
        num_key_value_heads=max(job.dim // 128, 1),
        max_position_embeddings=program.CONTEXT,
        use_cache=False,
    )
    llama = LlamaForCausalLM(config)
    return llama, [*llama.model.layers, llama]


def loss_of(job: Job, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy((logits if job.model == "gpt" else logits.logits).flatten(0, 1), targets.flatten())


def train(job: Job, rank: int) -> Curve:
    """On one rank; all ranks return the same."""
    program = importlib.import_module("train_gpt")
    libfsdp = importlib.import_module("libfsdp")
    text, validation = program.read_text(job.data)
    model, units = build(job)
    for unit in units:
        libfsdp.fully_shard(unit, **options_of(job.form))
    optimizer = libfsdp.fuse(torch.optim.AdamW(model.parameters(), lr=program.LR, betas=(0.9, 0.95), weight_decay=0.1))
    losses = []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = program.lr_at(step, job.steps)
        draws = torch.Generator().manual_seed((job.seed * job.steps + step) * job.ranks + rank)
        starts = torch.randint(len(text) - program.CONTEXT, (program.SEQUENCES // job.ranks,), generator=draws)
        loss = loss_of(job, model, *program.cut(text, starts))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), program.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        starts = torch.linspace(0, len(validation) - program.CONTEXT - 1, VALIDATED * job.ranks).long()[
            rank :: job.ranks
        ]
        losses.append(loss_of(job, model, *program.cut(validation, starts)).item())
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


def run_all(jobs: Sequence[Job]) -> Iterator[Curve]:
    """The curves of the jobs, in their order. Raises RuntimeError if a rank fails."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    store = os.path.join(tempfile.mkdtemp(prefix="fsdp-loss-"), "store")
    ranks = [context.Process(target=run_rank, args=(jobs, rank, store, sender)) for rank in range(jobs[0].ranks)]
    for process in ranks:
        process.start()
    sender.close()
    try:
        for _ in jobs:
            yield receiver.recv()
    except EOFError:
        raise RuntimeError("a rank has failed") from None
    finally:
        for process in ranks:
            process.join()


def table_of(curves: dict[str, list[Curve]], command: str) -> str:
    """Each format's losses, of the last steps and of the validation text, and how much larger they are than fp32's with the same seed."""
    exact = curves["fp32"]
    seeds = len(exact)
    lines = [
        f"`{command}`",
        "",
        f"Means over {seeds} seeds, with the range; nats per byte." if seeds > 1 else "One seed; nats per byte.",
        "",
        f"| sent in | loss of the last {LAST} steps | more than fp32 | validation loss | more than fp32 |",
        "|---|---|---|---|---|",
    ]

    def cell(values: Sequence[float], unit: str) -> str:
        form = "{:.4f}" if not unit else "{:+.2f} %"
        text = form.format(statistics.fmean(values))
        return text if seeds == 1 else f"{text} ({form.format(min(values))} to {form.format(max(values))})"

    def last_loss(curve: Curve) -> float:
        return statistics.fmean(curve.steps[-LAST:])

    def validation_loss(curve: Curve) -> float:
        return curve.validation

    for form, runs in curves.items():
        cells = []
        for loss in (last_loss, validation_loss):
            cells.append(cell([loss(run) for run in runs], ""))
            cells.append(cell([100 * (loss(run) / loss(of) - 1) for run, of in zip(runs, exact, strict=True)], "%"))
        lines.append(f"| {form} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(curves: dict[str, list[Curve]], path: Path) -> None:
    """A line for each format: the mean over seeds of smoothed losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = ("#000000", "#D55E00", "#0072B2", "#009E73", "#56B4E9", "#CC79A7", "#E69F00")  # Okabe and Ito's
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for (form, runs), colour in zip(curves.items(), colours[: len(curves)], strict=True):
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
    parser.add_argument("--model", choices=("gpt", "llama"), default="gpt")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256, help="of llama, a multiple of 64")
    parser.add_argument("--form", action="append", choices=FORMS, help="this format and fp32 only; may be repeated")
    parser.add_argument("--data", type=Path, default=Path(torch.__file__).parent / "include")
    parser.add_argument("--package", type=Path, default=ROOT / "build/python", help="the folder of libfsdp's package")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/loss", help=".md and .png are written")
    args = parser.parse_args()
    sys.path[:0] = [str(args.package.resolve()), str(ROOT / "examples")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the ranks
    forms = [form for form in FORMS if form == "fp32" or not args.form or form in args.form]
    settings = (args.ranks, args.steps, args.model, args.layers, args.dim, args.data)
    jobs = [Job(form, seed, *settings) for seed in range(args.seeds) for form in forms]
    curves: dict[str, list[Curve]] = {form: [] for form in forms}
    table = ""
    for job, curve in zip(jobs, run_all(jobs), strict=True):
        curves[job.form].append(curve)
        if job.form != forms[-1]:
            continue
        table = table_of(curves, shlex.join(("python", "bench/loss.py", *sys.argv[1:])))
        args.out.with_suffix(".md").write_text("# Losses with fewer bits\n\n" + table)
        plot(curves, args.out.with_suffix(".png"))
    print(table)


if __name__ == "__main__":
    main()
