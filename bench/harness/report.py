"""The results as JSON, as a page of tables and as a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from harness import history
from harness.intervals import is_below_resolution
from harness.measure import Row


@dataclass(frozen=True)
class Target:
    """What the project promises: the row's median is at most `limit`."""

    case: str
    contender: str
    metric: str
    limit: float


TARGETS = (
    Target("d512", "libfsdp", "step_overhead", 0.03),
    Target("d512", "libfsdp_python", "overhead_ratio_to_fsdp2_best", 1 / 2),
    Target("d512", "libfsdp_python", "memory_ratio_to_fsdp2", 0.7),
    Target("d512_megatron", "libfsdp_megatron", "step_ratio_to_megatron_fsdp", 0.75),
    Target("d512", "libfsdp", "step_ratio_to_fsdp2", 0.65),
    Target("d512", "libfsdp", "step_ratio_to_ddp", 1.15),
    Target("d512", "libfsdp_no_reshard", "step_ratio_to_ddp", 1.0),
    Target("d512", "libfsdp", "memory_ratio_to_fsdp2", 0.6),
    Target("hosts", "libfsdp", "step_ratio_to_libfsdp_messages", 0.6),
    Target("hosts_rounded", "libfsdp_8bit", "step_ratio_to_libfsdp", 0.65),
    Target("hosts_rounded", "libfsdp_4bit", "step_ratio_to_libfsdp", 0.45),
    Target("hosts_bf16", "libfsdp_python", "step_ratio_to_fsdp2", 0.6),
    Target("world8", "libfsdp", "host_ratio_to_fsdp2", 1 / 40),
    Target("world1024", "libfsdp", "host_ratio_to_fsdp2", 1 / 100),
    Target("world8", "libfsdp_python", "host_ratio_to_fsdp2", 1 / 12),
    Target("world1024", "libfsdp_python", "host_ratio_to_fsdp2", 1 / 30),
    Target("world8", "libfsdp_python", "host_ratio_to_fsdp2_instant", 1 / 10),
    Target("optimizer2000", "libfsdp", "optimizer_ratio_to_torch", 1 / 10),
    Target("collectives", "libfsdp", "all_gather_ratio_to_memcpy", 1.2),
    Target("collectives", "libfsdp", "reduce_scatter_ratio_to_memcpy", 1.5),
    Target("collectives4", "libfsdp", "all_gather_ratio_to_memcpy", 1.2),
    Target("collectives4", "libfsdp", "reduce_scatter_ratio_to_memcpy", 1.5),
)


@dataclass(frozen=True)
class Result:
    """A run of the benchmark."""

    command: str
    machine: dict[str, str]
    rows: list[Row]

    def find(self, case: str, metric: str) -> list[Row]:
        """The rows of a metric, one per contender."""
        return [row for row in self.rows if (row.case, row.metric) == (case, metric)]

    def of(self, metric: str) -> list[Row]:
        """The rows of a metric, of all cases."""
        return [row for row in self.rows if row.metric == metric]

    def targets(self) -> list[dict[str, Any]]:
        """Each target whose row was measured, with the median and whether it is met."""
        return [
            {**asdict(target), "median": row.median, "met": row.median <= target.limit}
            for target in TARGETS
            for row in self.find(target.case, target.metric)
            if row.contender == target.contender
        ]


# What a reader asks, and the metric that answers.
QUESTIONS = (
    ("How long does a step take? In ms", "step_ms"),
    ("What does sharding add to a step of plain training? As a fraction of it", "step_overhead"),
    ("How long is a step beside the faster of FSDP2's settings? As a ratio", "step_ratio_to_fsdp2_best"),
    ("How much memory does a step need at its peak? In MiB; pages that processes share count once", "peak_memory_mib"),
    ("What does a step send over the links between hosts? In MiB", "link_mib_per_step"),
    ("How much processor time does sharding add? In µs per unit and step", "host_us_per_unit"),
    ("How long does a step of AdamW over many small parameters take? In ms", "optimizer_ms"),
    ("How long does an all-gather take? In ms", "all_gather_ms"),
    ("How long does a reduce-scatter take? In ms", "reduce_scatter_ms"),
)


@dataclass(frozen=True)
class Panel:
    """One part of the plot: a metric of a case."""

    title: str
    case: str
    metric: str
    axis: str


PANELS = (
    Panel("Step, d=256, 8 layers, 2 ranks", "d256", "step_ms", "ms"),
    Panel("Step, d=512, 12 layers, 2 ranks", "d512", "step_ms", "ms"),
    Panel("Over plain training, d=512, 2 ranks", "d512", "step_overhead", "part of a plain step"),
    Panel("Memory, d=256", "d256", "peak_memory_mib", "MiB, shared pages counted once"),
    Panel("Memory, d=512", "d512", "peak_memory_mib", "MiB, shared pages counted once"),
    Panel("Step, d=512, 2 hosts of 2 ranks, links of 1 Gbit/s", "hosts", "step_ms", "ms"),
    Panel("Step, rounded, 2 hosts of 2 ranks, links of 1 Gbit/s", "hosts_rounded", "step_ms", "ms"),
    Panel("Host time added, world 8", "world8", "host_us_per_unit", "µs per unit and step"),
    Panel("Host time added, world 1,024", "world1024", "host_us_per_unit", "µs per unit and step"),
    Panel("AdamW, 2,000 small parameters", "optimizer2000", "optimizer_ms", "ms"),
    Panel("All-gather, 64 MiB, 2 ranks", "collectives", "all_gather_ms", "ms"),
    Panel("Reduce-scatter, 64 MiB, 2 ranks", "collectives", "reduce_scatter_ms", "ms"),
)

# Okabe and Ito's colours, which people who see colours differently can tell apart.
COLOURS = {
    "libfsdp": "#0072B2",
    "libfsdp_no_reshard": "#56B4E9",
    "libfsdp_8bit": "#56B4E9",
    "libfsdp_4bit": "#A6D4F2",
    "libfsdp_python": "#0072B2",
    "libfsdp_python_no_reshard": "#56B4E9",
    "libfsdp_python_fuse": "#56B4E9",
    "fsdp2": "#D55E00",
    "fsdp2_no_reshard": "#E69F00",
    "fsdp2_instant": "#E69F00",
    "fsdp2_tuned": "#B34700",
    "fsdp2_tuned_2": "#B34700",
    "fsdp2_tuned_no_reshard": "#F0C060",
    "fsdp2_best": "#7A3000",
    "libfsdp_megatron": "#0072B2",
    "megatron_fsdp": "#76B900",
    "libfsdp_fuse": "#56B4E9",
    "torch": "#D55E00",
    "torch_foreach": "#E69F00",
    "torch_fused": "#CC79A7",
    "ddp": "#009E73",
    "ddp_powersgd": "#66C5AC",
    "c10d": "#CC79A7",
}
OTHER_COLOUR = "#999999"  # Limits: plain training, theory, memcpy.


def write(result: Result, json_path: Path) -> None:
    """Writes the JSON file, and the page and the plot beside it."""
    json_path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "command": result.command,
        "machine": result.machine,
        "targets": result.targets(),
        "rows": [asdict(row) for row in result.rows],
    }
    json_path.write_text(json.dumps(document, indent=2) + "\n")
    json_path.with_suffix(".md").write_text(markdown(result))
    plot(result, json_path.with_suffix(".png"))


def remember(result: Result, folder: Path) -> None:
    """Adds the run's targets to the folder's history, if there are any."""
    if targets := result.targets():
        runs = history.append(folder / "history.jsonl", history.line_of(result.machine, targets))
        limits = {" ".join((t.case, t.contender, t.metric)): t.limit for t in TARGETS}
        history.plot(runs, limits, folder / "history.png")


def markdown(result: Result) -> str:
    """Targets, then a table for each question, then where it was measured."""
    target_lines = [
        (
            *(t[key] for key in ("case", "contender", "metric")),
            number(t["limit"]),
            number(t["median"]),
            verdict(t["met"]),
        )
        for t in result.targets()
    ]
    parts = [
        "# Benchmark",
        f"`{result.command}`",
        "Medians, with the 95 % interval of each. The JSON that is written beside this page has all rows: more ratios, ranges and counts.",
        "## Are the targets met?" if target_lines else "",
        table(("case", "contender", "metric", "at most", "median", ""), target_lines) if target_lines else "",
        *(f"## {question}\n\n{answer(rows)}" for question, metric in QUESTIONS if (rows := result.of(metric))),
        "## Where",
        table(("machine", ""), list(result.machine.items())),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def answer(rows: list[Row]) -> str:
    """A line for each contender, a column for each case."""
    cases = list(dict.fromkeys(row.case for row in rows))
    found = {(row.contender, row.case): row for row in rows}
    lines = [
        (contender, *(cell(found[contender, case]) if (contender, case) in found else "" for case in cases))
        for contender in dict.fromkeys(row.contender for row in rows)
    ]
    return table(("", *cases), lines)


def cell(row: Row) -> str:
    """The median and where it lies; without the median where the noise is larger."""
    if is_below_resolution(row.low, row.high):
        return f"below resolution ({number(row.low)} to {number(row.high)})"
    return f"{number(row.median)} ({number(row.low)} to {number(row.high)})" if row.n > 1 else number(row.median)


def verdict(met: bool) -> str:
    """A word for whether a target is met."""
    return "met" if met else "missed"


def number(value: float) -> str:
    """Few digits, no exponent for what is measured here."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns line up as plain text, too."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rules = ["-" * width for width in widths]
    padded = ((cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in (head, rules, *lines))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


def plot(result: Result, path: Path) -> None:
    """A bar per contender: its median, with a whisker from least to most. Every axis is linear and shows its 0."""
    panels = [(panel, rows) for panel in PANELS if (rows := result.find(panel.case, panel.metric))]
    columns = 2
    lines = max(1, -(-len(panels) // columns))
    figure, grid = pyplot.subplots(lines, columns, figsize=(12, 0.6 + 2.6 * lines), layout="constrained", squeeze=False)
    for axes, (panel, rows) in zip(grid.flat, panels, strict=False):
        draw(axes, panel, rows)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(f"Medians with ranges. {result.machine['cpu']}, torch {result.machine['torch']}", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw(axes: Axes, panel: Panel, rows: Sequence[Row]) -> None:
    """One panel; the first contender on top, each bar with its number."""
    for place, row in enumerate(rows):
        whisker = [[row.median - row.min], [row.max - row.median]]
        colour = COLOURS.get(row.contender, OTHER_COLOUR)
        axes.barh(place, row.median, color=colour, xerr=whisker, error_kw={"elinewidth": 1, "capsize": 2})
        axes.text(max(row.max, 0), place, f"  {number(row.median)}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row.contender for row in rows], fontsize=8)
    axes.set_ylim(max(len(rows), 4) - 0.5, -0.5)
    axes.set_xlim(left=min(0.0, *(row.min for row in rows)), right=1.15 * max(row.max for row in rows))
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel(panel.axis, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
