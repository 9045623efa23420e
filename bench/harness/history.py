"""One line for each run: the commit, and what the project's targets measured there; and a plot of them over the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def line_of(machine: dict[str, str], targets: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of a run: each target's median, by "case contender metric"."""
    measured = {" ".join((t["case"], t["contender"], t["metric"])): t["median"] for t in targets}
    return {"commit": machine["commit"], "date": machine["date"], "cpu": machine["cpu"], "measured": measured}


def append(path: Path, line: dict[str, Any]) -> list[dict[str, Any]]:
    """Adds a run to the file, in place of an earlier one of the same commit, and returns all runs.

    Cases that this run left out keep what the earlier one measured.
    """
    runs = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    same = [run for run in runs if run["commit"] == line["commit"]]
    for run in same:
        line = {**line, "measured": {**run["measured"], **line["measured"]}}
    runs = [run for run in runs if run["commit"] != line["commit"]] + [line]
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    return runs


def plot(runs: list[dict[str, Any]], limits: dict[str, float], path: Path) -> None:
    """Each target's median over its limit, by run: below 1 it is met."""
    names = [name for name in limits if any(name in run["measured"] for run in runs)]
    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    for name in names:
        points = [(place, run["measured"][name] / limits[name]) for place, run in enumerate(runs) if name in run["measured"]]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(runs)), [run["commit"][:9] for run in runs], rotation=60, fontsize=7)
    axes.set_ylabel("measured / limit")
    axes.set_yscale("symlog", linthresh=1)
    if names:
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
