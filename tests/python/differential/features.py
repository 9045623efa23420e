"""What random programs may contain, by name, and how often."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

# The probability that a program has it, or of each place where it may be.
LIKELIHOOD = {
    # Models.
    "shared": 0.25,  # Modules under several owners.
    "sideways": 0.25,  # Modules that call units which are not below them.
    "groups": 0.2,  # fully_shard([a, b]).
    "readers": 0.5,  # Weights of a group that are read between its modules' forwards.
    "tied": 0.15,
    "late_ties": 0.3,  # Of those: made after sharding.
    "frozen": 0.15,
    "autocast": 0.05,
    "mixed_dtypes": 0.1,
    "checkpointing": 0.15,
    # Options.
    "ranks": 0.5,  # Other than 2.
    "strategies": 0.5,
    "hsdp": 0.3,
    "hfsdp": 0.5,  # Of those with two dimensions.
    "reshard": 0.4,
    "dtypes": 0.15,
    "main_dtypes": 0.1,
    "offload": 0.1,
    "shard_dim": 0.15,
    "keep": 0.1,
    "budget": 0.1,
    "megatron": 0.3,
    # Optimizers.
    "foreach": 0.3,
    "fused": 0.3,
    "own_optimizers": 0.4,
    "matrix_optimizers": 0.1,
    "parameter_groups": 0.2,
    "scaler": 0.1,
    "schedule": 0.2,
    # Lives.
    "evaluation": 0.35,
    "several_backwards": 0.3,
    "no_sync": 0.4,
    "retain_graph": 0.1,
    "several_graphs": 0.3,
    "checked": 0.15,  # Microbatches that a ReplayCheck repeats.
    "lone_forwards": 0.2,  # In grad mode, without a backward.
    "unshard": 0.2,
    "setters": 0.2,
    "reshard_after_backward": 0.1,
    "last_backward": 0.1,
    "clip": 0.2,
    "writes": 0.2,
    "quiet_writes": 0.25,  # Of which no version tells.
    "shared_memory": 0.1,
    "zero_grad": 0.3,  # That fills with zeros, or comes at other moments.
    "state_dict": 0.15,
    "assign": 0.2,  # Of loads.
    "checkpoints": 0.05,
    "saves": 0.5,  # Of checkpoints: by libfsdp.
    "streams": 0.1,  # Of whole weights.
    "reads": 0.15,  # Of what the modules show.
    "collected": 0.05,  # A model that nobody has any more, between forward and backward.
    "rebuilding": 0.05,  # Another sharded model takes over.
    "freezing": 0.15,
    "failures": 0.15,
    "empty": 0.1,
    "two_models": 0.1,
    "average": 0.3,  # Of the one model's parameters into the other's.
}

# Features that need others to show.
PROFILES: dict[str, tuple[str, ...]] = {
    "optimizers": ("strategies", "foreach", "fused", "own_optimizers", "hsdp", "hfsdp", "parameter_groups"),
    "evaluations": ("evaluation", "lone_forwards", "unshard", "strategies", "reshard", "foreach", "own_optimizers"),
    "quiet": ("quiet_writes", "evaluation", "lone_forwards", "strategies", "reshard"),
    "in_place": ("writes", "evaluation", "lone_forwards", "strategies", "reshard"),
    "memory": ("shared_memory", "evaluation", "strategies"),
    "freeze": ("freezing", "evaluation", "lone_forwards", "reshard", "strategies", "checkpointing", "several_graphs"),
    "sharing": ("sideways", "shared", "groups", "readers", "checkpointing", "evaluation", "reshard"),
    "collected": ("collected", "strategies"),
    "megatron_reads": ("megatron", "strategies", "reads", "unshard"),
    "last": ("last_backward", "several_backwards"),
    "tools": ("checked", "streams", "checkpoints", "budget", "no_sync", "several_backwards"),
    "matrices": ("matrix_optimizers", "strategies"),
    "megatron": ("megatron", "strategies", "several_backwards", "no_sync", "zero_grad"),
}


# With FSDP2 in the library's place the replicas are checked, not FSDP2: these features are left out then.
WITHOUT_FSDP2 = {
    **dict.fromkeys(("strategies", "hfsdp", "main_dtypes", "keep", "megatron"), "It has no such option."),
    **dict.fromkeys(("own_optimizers", "matrix_optimizers", "budget", "checked", "saves", "streams"), "libfsdp's."),
    **dict.fromkeys(
        ("evaluation", "lone_forwards"),
        "The root stays whole after a forward without a backward, and older than later steps and writes.",
    ),
    **dict.fromkeys(
        ("unshard", "reshard_after_backward"), "What it keeps by these is older than later steps and writes."
    ),
    "shared_memory": "It goes on with the memory that it had before.",
    "checkpointing": "Backward in a reentrant region may read memory that it has freed.",
    "mixed_dtypes": "The parameters of a unit have one dtype.",
    "late_ties": "The tied parameter is trained apart.",
    "freezing": "It goes on with what was trained when parameters were gathered.",
    "failures": "Its state is then of the pass that has failed.",
    **dict.fromkeys(
        ("sideways", "shared", "readers"), "Modules that are called where others have freed them are an error."
    ),
    "collected": "Hooks of a collected model do nothing.",
}


class Chance:
    """The random choices of one program. The same seed and features give the same ones."""

    def __init__(self, seed: int, features: dict[str, float]) -> None:
        self.random = random.Random(seed)
        self.features = features

    def has(self, feature: str) -> bool:
        """Whether it is there, here."""
        return self.random.random() < self.features.get(feature, 0.0)

    def of(self, values: Sequence[T]) -> T:
        """One of them."""
        return self.random.choice(values)

    def chance(self, probability: float) -> bool:
        """True so often."""
        return self.random.random() < probability


def features(only: Iterable[str] = (), without: Iterable[str] = ()) -> dict[str, float]:
    """Likelihoods by name; those that `only` names (features or profiles) are likelier."""
    chosen = dict(LIKELIHOOD)
    named = [feature for name in only for feature in PROFILES.get(name, (name,))]
    unknown = [name for name in (*named, *without) if name not in LIKELIHOOD]
    if unknown:
        raise SystemExit(f"no such features: {', '.join(unknown)}; there are {', '.join((*LIKELIHOOD, *PROFILES))}")
    if named:
        chosen = {name: max(LIKELIHOOD[name], 0.5) for name in named}
    for name in without:
        chosen.pop(name, None)
    return chosen
