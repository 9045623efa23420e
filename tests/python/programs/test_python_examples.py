"""The examples of one page in Python do what they say."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
from support.ranks import StartRanks

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:  # the workers of a DataLoader import it, too
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def call(name: str, function: str, *arguments: Any) -> Any:
    multiprocessing.set_start_method(
        "fork", force=True
    )  # as in a program under torchrun; here it would be the ranks' server
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # else it may have no workers
    return getattr(example(name), function)(*arguments)


@pytest.mark.parametrize("name", ["lora", "ema", "data_loader"])
def test_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 120


def test_lora_learns(ranks: StartRanks, tmp_path: Path) -> None:
    for losses in ranks(2).run(call, "lora", "train", str(tmp_path)):
        assert losses[-1] < losses[0] / 2
    assert (tmp_path / "additions" / ".metadata").exists()


def test_the_average_of_weights_learns(ranks: StartRanks, tmp_path: Path) -> None:
    (model, average), _ = ranks(2).run(call, "ema", "train", str(tmp_path))
    assert 0 < average < 3.0
    assert 0 < model < 3.0
    assert model != average


def test_an_epoch_goes_on_with_the_next_sample(ranks: StartRanks, tmp_path: Path) -> None:
    """Also on another number of ranks."""
    whole = ranks(2).run(call, "data_loader", "train", str(tmp_path / "whole"), 1000)
    ranks(2).run(call, "data_loader", "train", str(tmp_path / "parts"), 5)
    parts = ranks(2).run(call, "data_loader", "train", str(tmp_path / "parts"), 1000)
    assert parts == whole
    assert sorted(number for rank in whole for number in rank) == sorted(
        2 * list(range(example("data_loader").SAMPLES))
    )

    first = ranks(2).run(call, "data_loader", "train", str(tmp_path / "fewer"), 6)
    (rest,) = ranks(1).run(call, "data_loader", "train", str(tmp_path / "fewer"), 1000)
    assert sorted([*first[0], *first[1], *rest]) == sorted(2 * list(range(example("data_loader").SAMPLES)))
