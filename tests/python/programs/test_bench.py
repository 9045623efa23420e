"""The benchmark's own arithmetic: what becomes of measured times."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import statistics
import sys
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

import compare
import instructions
import run
from contenders.gpt import GPTConfig
from harness import cases, history, measure, report
from harness.fleet import used_kib
from harness.intervals import is_below_resolution, median_interval


def rounds(*values: float) -> measure.Rounds:
    return [[value] for value in values]


def test_an_interval_has_the_median_and_narrows() -> None:
    few = [10.0, 11.0, 9.0, 10.5, 9.5]
    low, high = median_interval(few)
    assert min(few) <= low <= statistics.median(few) <= high <= max(few)
    many = few * 20
    assert median_interval(many)[1] - median_interval(many)[0] < high - low
    assert median_interval([3.0]) == (3.0, 3.0)
    assert median_interval(few) == median_interval(few)


def test_noise_that_is_larger_than_a_difference_is_named() -> None:
    assert is_below_resolution(-0.1, 0.2)
    assert not is_below_resolution(0.01, 0.2)
    assert not is_below_resolution(-0.2, -0.1)
    noisy = measure.row("d512", "libfsdp", "step_overhead", "x", [-0.1, 0.1, -0.05, 0.05])
    clear = measure.row("d512", "ddp", "step_overhead", "x", [0.5, 0.6, 0.55])
    text = report.markdown(report.Result("run", {"cpu": "a"}, [noisy, clear]))
    assert text.count("below resolution") == 1


def test_the_page_has_a_table_for_each_question_and_the_json_all_rows(tmp_path: Path) -> None:
    rows = [
        measure.row("d256", "ddp", "step_ms", "ms", [2.0, 2.1, 2.2]),
        measure.row("d512", "ddp", "step_ms", "ms", [4.0]),
        measure.row("d512", "libfsdp", "step_ms", "ms", [3.0]),
        measure.row("d512", "libfsdp", "step_ratio_to_ddp", "x", [0.75]),
    ]
    report.write(report.Result("run", {"cpu": "a", "torch": "b"}, rows), tmp_path / "latest.json")
    tables = (tmp_path / "latest.md").read_text().split("\n## ")[1:]
    questions = ["Are the targets met?", "How long does a step take? In ms", "Where"]
    assert [table.partition("\n")[0] for table in tables] == questions
    lines = [line for line in tables[1].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["", "d256", "d512"]
    assert cells[2:] == [["ddp", "2.1 (2 to 2.2)", "4"], ["libfsdp", "", "3"]]
    assert len(json.loads((tmp_path / "latest.json").read_text())["rows"]) == len(rows)


def test_builds_are_compared_in_cases_without_options_of_the_python_contenders() -> None:
    assert {"d256", "d512", "world8"} <= set(compare.CASES)
    assert [name for name, case in compare.CASES.items() if case.model.options] == []
    with pytest.raises(SystemExit):
        compare.main(["--before", "bench_contender", "--case", "bf16"])


def test_contenders_that_round_take_part_only_where_a_case_names_them() -> None:
    """Elsewhere, their losses would end the case."""
    takes_part = {name for name, case in cases.MODELS.items() if any(map(case.model.takes, measure.ROUNDED))}
    assert takes_part == {"hosts_rounded"}


def test_pairs_cancel_what_slows_a_whole_round_down() -> None:
    slow_round = (1.0, 3.0, 1.0)
    sharded, plain = rounds(*(1.2 * x for x in slow_round)), rounds(*slow_round)
    rows = measure.overhead_rows("d512", {"fsdp2": sharded, "local": plain})
    assert [(row.contender, row.metric) for row in rows] == [("fsdp2", "step_overhead")]
    assert rows[0].median == pytest.approx(0.2)
    assert rows[0].max - rows[0].min == pytest.approx(0)


def test_each_contender_is_compared_with_its_own_language() -> None:
    samples = {"libfsdp": rounds(3.0), "libfsdp_python": rounds(3.0), "local": rounds(2.0), "local_cpp": rounds(1.0)}
    overheads = {row.contender: row.median for row in measure.overhead_rows("d512", samples)}
    assert overheads == {"libfsdp": 2.0, "libfsdp_python": 0.5}


def test_host_time_is_the_difference_of_each_pair_of_steps() -> None:
    case = measure.ModelCase("world8", GPTConfig(64, 16, 50, 2, 4), 1, world=8)

    def pairs(added_ms: float) -> list[list[measure.StepPair]]:
        # What slows both steps of a pair down, however much, is not in the difference.
        return [[measure.StepPair(plain + added_ms, plain) for plain in (1.0, 9.0)] for _ in range(3)]

    rows = measure.host_rows(case, {"libfsdp": pairs(1.0), "fsdp2": pairs(40.0)})
    found = {(row.contender, row.metric): row for row in rows}
    host = found["libfsdp", "host_us_per_unit"]
    assert (host.median, host.n) == (pytest.approx(20.0), 6)
    assert host.max - host.min == pytest.approx(0)
    assert found["fsdp2", "host_us_per_unit"].median == pytest.approx(800.0)
    assert found["libfsdp", "host_ratio_to_fsdp2"].median == pytest.approx(1 / 40)
    assert found["libfsdp", "forward_backward_ms"].median == pytest.approx(6.0)
    assert found["libfsdp", "plain_forward_backward_ms"].median == pytest.approx(5.0)


def test_a_pair_is_a_sharded_and_a_plain_step() -> None:
    class Rank:
        name = "libfsdp"

        def ask(self, verb: str, count: int) -> list[dict[str, list[float]]]:
            assert (verb, count) == ("host", 2)
            return [{"ms": [3.0, 4.0], "plain_ms": [1.0, 2.0], "loss": [0.0, 0.0]}]

    turn: Any = measure.HostTurn(cast(Any, Rank()))
    assert turn.take(2) == [measure.StepPair(sharded=3.0, plain=1.0), measure.StepPair(sharded=4.0, plain=2.0)]


def test_instructions_are_counted_by_function() -> None:
    listing = """
Ir
--------------------------------------------------------------------------------
1,500 (100.0%)  PROGRAM TOTALS

Ir              file:function
--------------------------------------------------------------------------------
1,000 (66.67%)  ???:at::copy_(at::Tensor&) [/lib/libtorch_cpu.so]
  300 (20.00%)  ./malloc/./malloc/malloc.c:free [/lib/libc.so.6]
  200 (13.33%)  ???:free [/lib/libother.so]
"""
    sharded = instructions.parse(listing)
    assert sharded == {"at::copy_(at::Tensor&)": 1000, "free": 500}
    added = instructions.added(sharded, Counter({"free": 100, "exp": 700}), times=2)
    assert list(added.items()) == [("at::copy_(at::Tensor&)", 500.0), ("exp", -350.0), ("free", 200.0)]


def test_the_fastest_setting_of_fsdp2_is_the_reference() -> None:
    samples = {
        "fsdp2": rounds(3.0, 3.0),
        "fsdp2_tuned": rounds(2.0, 2.2),
        "libfsdp_python": rounds(1.5, 1.5),
        "local": rounds(1.0, 1.0),
    }
    best = measure.with_best(samples)
    assert best["fsdp2_best"] == samples["fsdp2_tuned"]
    ratios = {
        row.contender: row.median
        for row in measure.overhead_rows("d512", best)
        if row.metric == "overhead_ratio_to_fsdp2_best"
    }
    assert ratios["libfsdp_python"] == pytest.approx(statistics.median([0.5 / 1.0, 0.5 / 1.2]))
    assert measure.with_best({"ddp": rounds(1.0)}) == {"ddp": rounds(1.0)}


def test_losses_that_differ_end_their_case() -> None:
    same: measure.Losses = {"fsdp2": [[1.0, 2.0]], "ddp": [[1.0, 2.0 + 1e-9]]}
    measure.check_losses("d512", same, 2)
    with pytest.raises(measure.BenchError, match=r"at step 1 on rank 0, fsdp2 has loss 2\.0 and ddp has 2\.1"):
        measure.check_losses("d512", {**same, "ddp": [[1.0, 2.1]]}, 2)


def test_a_case_that_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measures(*_: object) -> list[measure.Row]:
        return [measure.row("d256", "libfsdp", "step_ms", "ms", [1.0])]

    def fails(*_: object) -> list[measure.Row]:
        raise measure.BenchError("contender ddp lost rank 1")

    pace = measure.Pace(rounds=1, turn=1)
    cases = {
        name: SimpleNamespace(measure=work, quick=pace, full=pace)
        for name, work in (("a", measures), ("b", fails), ("c", measures))
    }
    monkeypatch.setattr(run, "CASES", cases)
    out = tmp_path / "latest.json"
    monkeypatch.setattr(sys, "argv", ["run.py", "--case", "a", "--case", "b", "--case", "c", "--out", str(out)])
    assert run.main() == 1
    assert len(json.loads(out.read_text())["rows"]) == 2
    said = capsys.readouterr().err
    assert "contender ddp lost rank 1" in said
    assert "not measured: b" in said
    assert not (tmp_path / "history.jsonl").exists()


def test_targets_are_met_at_their_limit() -> None:
    target = report.TARGETS[0]
    for factor, met in ((1.0, True), (1.01, False)):
        row = measure.row(target.case, target.contender, target.metric, "x", [factor * target.limit])
        (found,) = report.Result("run", {}, [row]).targets()
        assert found["met"] is met


def test_history_keeps_a_line_for_each_commit(tmp_path: Path) -> None:
    def run(commit: str, **measured: float) -> dict[str, Any]:
        targets = [
            {"case": "d512", "contender": "libfsdp", "metric": name, "median": x} for name, x in measured.items()
        ]
        machine = {"commit": commit, "date": "today", "cpu": "a"}
        return history.line_of(machine, targets)

    path = tmp_path / "history.jsonl"
    history.append(path, run("one", step=1.0))
    history.append(path, run("two", step=2.0))
    runs = history.append(path, run("one", memory=3.0))
    assert [line["commit"] for line in runs] == ["two", "one"]
    assert runs[1]["measured"] == {"d512 libfsdp step": 1.0, "d512 libfsdp memory": 3.0}
    assert [json.loads(line) for line in path.read_text().splitlines()] == runs
    history.plot(runs, {"d512 libfsdp step": 2.0, "d512 libfsdp memory": 2.0, "other": 1.0}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_the_documented_targets_are_the_ones_that_are_checked() -> None:
    document = (Path(__file__).resolve().parents[3] / "docs/develop/benchmarks.md").read_text(encoding="utf-8")
    section = document.split("## Targets\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| (\S+) \|$", section, re.MULTILINE)
    written = [
        report.Target(case, contender, metric, float(Fraction(limit))) for case, contender, metric, limit in rows
    ]
    assert written == list(report.TARGETS)


def test_memory_that_processes_share_counts_once() -> None:
    mebibyte = 1 << 20
    with mmap.mmap(-1, 64 * mebibyte) as shared:
        before = used_kib(os.getpid())
        shared.write(bytes(64 * mebibyte))
        alone = used_kib(os.getpid()) - before
        child = os.fork()
        if child == 0:
            sum(shared[::4096])
            signal.pause()
        deadline = time.monotonic() + 30
        while used_kib(child) < 32 * 1024 * 0.9 and time.monotonic() < deadline:
            time.sleep(0.01)
        half = used_kib(os.getpid()) - before
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert alone == pytest.approx(64 * 1024, rel=0.1)
    assert half < 0.6 * alone
