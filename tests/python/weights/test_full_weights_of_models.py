"""Whole weights of transformers' models, against the single process and FSDP2's full_tensor(); and consumers that misbehave at random."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support import hugging_face
from support.marks import at_night, needs_transformers, on_ranks
from support.ranks import PRELOADED, RankError, Ranks, StartRanks
from support.strategies import a_step
from support.training import CASES, DEFAULT, Options, make_optimizer, seeded, sharded
from support.weights import BF16, assert_exported, gathered, whole
from support.weights import assert_same as assert_same_in_order

import libfsdp

# It takes seconds of a processor, and each rank would do it by itself.
PRELOADED.append("transformers.models.llama.modeling_llama")

FAMILIES = [f"hf_{name}" for name in hugging_face.CASES]


assert_same = functools.partial(assert_same_in_order, in_order=False)
FEW_MODELS = [("hf_llama", 2), ("hf_mixtral", 4)]
OTHERS = [(case, size) for case in FAMILIES for size in (1, 2, 3, 4) if (case, size) not in FEW_MODELS]


@needs_transformers
@pytest.mark.parametrize(("name", "size"), FEW_MODELS + [at_night(case, size) for case, size in OTHERS])
@on_ranks("size")
def test_models_of_transformers(name: str) -> None:
    ours, theirs = (sharded(name, implementation=implementation) for implementation in ("libfsdp", "fsdp2"))
    assert_same(whole(ours), {key: value.cpu() for key, value in seeded(CASES[name]).state_dict().items()})
    optimizers = [make_optimizer(DEFAULT, model.parameters()) for model in (ours, theirs)]
    for step in range(2):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            a_step(model, name, step, optimizer)
        expected = gathered(ours)
        if dist.get_world_size() < 3:  # where sums have one order
            assert_same(expected, gathered(theirs))
        assert_exported(ours, expected, 2000, in_order=False)
    # Of FSDP2's model itself, whose values come into ours.
    ours.load_state_dict(theirs.state_dict())
    assert_same(whole(ours), gathered(theirs))


class TheirOwn(Exception):
    """What a consumer raises."""


def plan_of(seed: int) -> dict[str, Any]:
    """What happens with a seed, the same on all ranks."""
    chance = random.Random(seed)
    how = ("raises", "closes", "sleeps", "dies")[seed % 4]
    size = chance.choice((2, 3, 4))
    return {
        "how": how,
        "size": size,
        "who": chance.randrange(size),
        "moment": chance.random(),  # of all buckets
        "case": chance.choice(("mlp", "tied", "odd_shapes", "transformer")),
        "bucket_bytes": chance.choice((1, 200, 1000)),
        "options": Options(replicas=2 if size == 4 and chance.random() < 0.5 else 1, reshard=chance.choice((None, False))),
        "export": chance.choice(({}, {"dtype": BF16}, {"ranks": "first"}, {"changes": True})),
    }


def misbehave(seed: int, folder: str) -> None:
    plan = plan_of(seed)
    how, who, case_name = plan["how"], plan["who"], plan["case"]
    mine = dist.get_rank() == who
    model, twin = (sharded(case_name, plan["options"]) for _ in range(2))
    optimizers = [make_optimizer(plan["options"], one.parameters()) for one in (model, twin)]
    for one, optimizer in zip((model, twin), optimizers, strict=True):
        a_step(one, case_name, 0, optimizer)
    export = {name: value for name, value in plan["export"].items() if name != "changes"}
    snapshot = libfsdp.WeightSnapshot() if "changes" in plan["export"] else None
    if snapshot is not None:
        for _ in libfsdp.full_weights(model, since=snapshot):
            pass
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            a_step(one, case_name, 1, optimizer)
    weights: Any = libfsdp.full_weights(model, bucket_bytes=plan["bucket_bytes"], since=snapshot, **export)
    buckets = len(weights)
    at = int(plan["moment"] * buckets)
    seen: Exception | None = None
    try:
        for k, _ in enumerate(weights):
            if mine and k == at:
                if how == "sleeps":
                    time.sleep(0.3)
                elif how == "raises":
                    raise TheirOwn
                elif how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                else:
                    break
    except (TheirOwn, libfsdp.Error) as error:
        seen = error
    if how == "dies":
        try:
            if seen is None:  # The rank has sent its last bucket, and nobody has missed it.
                a_step(model, case_name, 2, optimizers[0])
        except libfsdp.CommError as error:
            seen = error
        (Path(folder) / str(dist.get_rank())).write_text(f"{type(seen).__name__}: {seen}")
        # As a program whose error nobody catches: with HSDP, a rank may learn from its neighbours only.
        os._exit(1)
    weights.close()
    if mine:
        assert type(seen) is (TheirOwn if how == "raises" else type(None)), seen
    elif how != "sleeps" and at + 1 < buckets:
        assert f"rank {who} has stopped before bucket {min(at + 3, buckets)} of {buckets}" in str(seen)
    else:
        assert seen is None
    for step in (2, 3):
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            a_step(one, case_name, step, optimizer)
    assert_same(gathered(model), gathered(twin))
    assert_same(whole(model), gathered(twin))


FEW_SEEDS = (0, 1, 2, 3)


@pytest.mark.parametrize("seed", [*FEW_SEEDS, *(at_night(seed) for seed in range(50) if seed not in FEW_SEEDS)])
def test_a_consumer_that_raises_stops_sleeps_or_dies(ranks: StartRanks, seed: int, tmp_path: Path) -> None:
    plan = plan_of(seed)
    if plan["how"] != "dies":
        ranks(plan["size"]).run(misbehave, seed, str(tmp_path))
        return
    mortal = Ranks(plan["size"])
    try:
        with pytest.raises(RankError, match=f"rank {plan['who']} of {plan['size']}: died with exit code -9"):
            mortal.run(misbehave, seed, str(tmp_path))
    finally:
        mortal.end()
    told = {int(file.name): file.read_text() for file in tmp_path.iterdir()}
    assert told.keys() == set(range(plan["size"])) - {plan["who"]}
    for text in told.values():
        assert re.match(r"CommError: .* on rank \d of .* failed: ", text), text
