"""The examples of one page in Python do what they say."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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


@pytest.mark.parametrize(("name", "lines"), [("lora", 120), ("ema", 120), ("attend", 120), ("data_loader", 120), ("grpo", 150)])
def test_example_is_short(name: str, lines: int) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < lines


def test_lora_learns(ranks: StartRanks, tmp_path: Path) -> None:
    for losses in ranks(2).run(call, "lora", "train", str(tmp_path)):
        assert losses[-1] < losses[0] / 2
    assert (tmp_path / "additions" / ".metadata").exists()


def test_a_tower_is_skipped_and_learns(ranks: StartRanks) -> None:
    for losses, without in ranks(2).run(call, "attend", "train"):
        assert losses[-1] < losses[0] / 1.5
        assert 0 < without < len(losses)


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


def policies() -> tuple[list[float], torch.Tensor]:
    """Trains, generates; the rewards, and logits: of a generator, its own, and of a trainer, those of whole parameters."""
    grpo = example("grpo")
    policy, rewards = grpo.run()
    plain = policy
    if dist.get_rank() != grpo.GENERATOR:
        plain = grpo.Policy()
        plain.load_state_dict({name: value.full_tensor() for name, value in policy.state_dict().items()})
    with torch.no_grad():
        return rewards, plain(torch.arange(60).view(10, 6) % grpo.DIGITS)


def test_the_generator_follows_the_trainers(ranks: StartRanks) -> None:
    (first, logits), (second, of_second), (of_generator, generated) = ranks(3).run(policies)
    assert torch.equal(generated, logits)
    assert torch.equal(generated, of_second)
    for rewards in (first, second, of_generator):
        assert sum(rewards[:3]) / 3 < 0.4
        assert sum(rewards[-5:]) / 5 > 0.95
    # All of them are of the same samples.
    assert of_generator == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])
