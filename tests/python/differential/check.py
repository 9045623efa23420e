"""Goes through what ranks have recorded, side by side with the replicas."""

from __future__ import annotations

import importlib
from typing import Any

from differential.mismatch import Mismatch
from differential.program import Program
from differential.replica import Replica


def check(program: Program, traces: list[Any], *, other_order: bool) -> tuple[int, str] | None:
    """The number of the first operation whose outcome is wrong, and what is; None: all is right."""
    setups, firsts, records = zip(*traces, strict=True)
    replicas: list[Replica] = []
    replica_class = Replica
    if program.options.front == "megatron":
        replica_class = importlib.import_module("differential.megatron").Replica
    number = -1
    try:
        for model in range(program.models):
            replicas.append(replica_class(program, model, [setup[model] for setup in setups]))
            replicas[-1].other_order = other_order
            replicas[-1].student = replicas[0]
            replicas[-1].begin([first[model] for first in firsts])
        for number, op in enumerate(program.operations):
            replica = replicas[op.model]
            results = [of_rank[number][op.model][0] for of_rank in records]
            expected = getattr(replica, op.what)(results, **op.arguments)
            if expected is not None and not agrees(replica, results, expected):
                raise Mismatch(f"{results}, not {expected}")
            for model, one in enumerate(replicas):
                one.compare_all([of_rank[number][model] for of_rank in records])
    except Mismatch as mismatch:
        return number, str(mismatch)
    return None


def agrees(replica: Replica, results: list[Any], expected: list[Any]) -> bool:
    """Losses have the same bits: all that is computed whole is."""
    return all(a == b or (a != a and b != b) for a, b in zip(results, expected, strict=True))
