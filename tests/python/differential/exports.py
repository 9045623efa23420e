"""Whole weights out of random lives: streams at random moments, held against the state dict and, in the beginning, the plain model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from support.training import full
from torch import Tensor

from differential.model import Built
from differential.program import Program
from differential.sharded import Sharded, execute

LIKELIHOOD = 0.4  # Of a stream after an operation.


class Exporter:
    """What a program's lives send, the same on all ranks. It changes nothing of them."""

    def __init__(self, program: Program) -> None:
        import libfsdp

        self.libfsdp = libfsdp
        self.chance = random.Random(program.seed)
        self.snapshots: dict[int, Any] = {}
        self.received: dict[int, dict[str, Tensor]] = {}

    def begin(self, life: Sharded) -> None:
        """A life's model, before anything has happened, has the plain one's values."""
        built = Built(life.program, life.number)
        built.tie_weights()
        plain = list(built.root.state_dict().values())
        found = self.whole(life.model)
        names = [name for name, value in life.model.state_dict().items() if isinstance(value, Tensor)]
        assert found.keys() == set(names)
        for name, value in zip(names, plain, strict=True):
            assert torch.equal(found[name], value.to(found[name].dtype)), name

    def after(self, life: Sharded) -> None:
        """After an operation: between steps, or between microbatches."""
        if not hasattr(life, "model") or life.graphs or self.chance.random() > LIKELIHOOD:
            return
        options: dict[str, Any] = {
            "bucket_bytes": self.chance.choice((1, 200, 1 << 20)),
            "dtype": self.chance.choice((None, None, torch.bfloat16)),
            "ranks": self.chance.choice(("all", "all", "first")),
        }
        if self.chance.random() < 0.3:
            self.changes(life, options["bucket_bytes"])
            return
        names = list(life.model.state_dict())
        some = set(self.chance.sample(names, self.chance.randrange(len(names) + 1)))
        if self.chance.random() < 0.3:
            options["names"] = sorted(some)
        found = self.whole(life.model, **options)
        expected = self.gathered(life.model)
        if options["ranks"] == "first" and torch.distributed.get_rank() > 0:
            assert not found
            return
        assert found.keys() == (some if "names" in options else set(names))
        for name, value in found.items():
            dtype = options["dtype"]
            wanted = expected[name].to(dtype) if dtype and expected[name].is_floating_point() else expected[name]
            assert value.dtype == wanted.dtype
            assert torch.equal(value, wanted), f"{name}: {value}, not {wanted}"

    def changes(self, life: Sharded, bucket_bytes: int) -> None:
        """A receiver that gets changes alone has all."""
        expected = self.gathered(life.model)
        snapshot = self.snapshots.setdefault(life.number, self.libfsdp.WeightSnapshot())
        received = self.received.setdefault(life.number, {name: torch.zeros_like(v) for name, v in expected.items()})
        buckets = self.libfsdp.full_weights(life.model, bucket_bytes=bucket_bytes, since=snapshot)
        self.libfsdp.apply_changes(received, buckets)
        for name, value in expected.items():
            assert torch.equal(received[name], value), f"{name}: {received[name]}, not {value}"

    def whole(self, model: Any, **options: Any) -> dict[str, Tensor]:
        """All of a stream, copied."""
        return {n: value.clone() for bucket in self.libfsdp.full_weights(model, **options) for n, value in bucket}

    def gathered(self, model: Any) -> dict[str, Tensor]:
        """As programs put it together with FSDP2."""
        return {name: full(value) for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def same(a: Any, b: Any) -> bool:
    """Whether two records have the same bits."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[name]) for name, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))


def live_with_exports(program: Program) -> None:
    """The program's lives without streams, and with them: nothing else is different."""
    without = execute(program, "libfsdp")
    beside = execute(program, "libfsdp", Exporter(program))
    for op, *records in zip(program.operations, without[2], beside[2], strict=True):
        # What modules show may be shards, as after any state dict, where it would be whole.
        a, b = ([one[1:] if op.what == "read" else one for one in of_lives] for of_lives in records)
        assert same(a, b), f"after {op}: {b}, and without streams {a}"
