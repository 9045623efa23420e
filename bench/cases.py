"""The models that run.py and compare.py measure, each with its pace."""

from __future__ import annotations

from dataclasses import dataclass

from gpt import GPTConfig
from measure import ModelCase, Pace

VOCAB, CONTEXT, SEQUENCES = 4096, 128, 4


@dataclass(frozen=True)
class PacedModel:
    """A model, and the pace at which it is measured."""

    model: ModelCase
    pace: Pace


def step(dim: int, layers: int, pace: Pace) -> PacedModel:
    """A GPT that is trained by the ranks."""
    return PacedModel(ModelCase(f"d{dim}", GPTConfig(VOCAB, dim, layers, heads=8, context=CONTEXT), SEQUENCES), pace)


def host(name: str, world: int, layers: int, pace: Pace) -> PacedModel:
    """Blocks so tiny that a step is little but host time, of a lone rank whose collectives move nothing."""
    return PacedModel(ModelCase(name, GPTConfig(vocab=64, dim=16, layers=layers, heads=2, context=4), 1, world), pace)


MODELS = {
    case.model.name: case
    for case in (
        step(256, 8, Pace(rounds=12, turn=3)),
        step(512, 12, Pace(rounds=8, turn=2)),
        host("world8", 8, 48, Pace(rounds=12, turn=5)),
        host("world1024", 1024, 48, Pace(rounds=10, turn=3)),
        # As many units as a model of many experts has.
        host("units4000", 8, 4000, Pace(rounds=8, turn=2)),
    )
}
