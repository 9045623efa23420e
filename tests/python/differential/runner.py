"""Runs programs on ranks that stay, and says in one word and in a text how one has failed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from support.ranks import RankError, Ranks

from differential.check import check
from differential.program import Program
from differential.sharded import execute

LIMIT = 100.0  # Seconds for one program, on a busy machine; most take less than one.


@dataclass(frozen=True)
class Failure:
    """How a program has failed.

    Args:
        kind: the same for two programs that fail in the same way.
        text: for people.
        operation: the number of the operation that shows it.
    """

    kind: str
    text: str
    operation: int


class Runner:
    """Ranks by their number, started when they are first used, and anew after a failure that they do not survive."""

    def __init__(self, implementation: str = "libfsdp", limit: float = LIMIT) -> None:
        self.implementation, self.limit = implementation, limit
        self._ranks: dict[int, Ranks] = {}

    def run(self, program: Program) -> Failure | None:
        """None: all is right."""
        ranks = self._ranks.setdefault(program.world, Ranks(program.world))
        try:
            traces = ranks.run(execute, program, self.implementation, limit=self.limit)
        except RankError as error:
            return failure_of(program, str(error))
        wrong = check(program, traces, other_order=self.implementation == "fsdp2")
        if wrong is None:
            return None
        number, text = wrong
        op = program.operations[number] if number >= 0 else None
        what = text.split(": ")[1].split(" of ")[0].split(" ")[0] if text.startswith("rank") else text.split(" ")[0]
        what = "result" if what.startswith("[") else what
        return Failure(
            f"wrong {what} after {op.what if op else 'fully_shard'}", f"operation {number}, {op}: {text}", number
        )

    def end(self) -> None:
        """Ends all ranks."""
        for ranks in self._ranks.values():
            ranks.end()


def failure_of(program: Program, text: str) -> Failure:
    """Of ranks that have raised, died, or not answered."""
    raised = re.findall(r"\[\[(-?\d+)\|(\w+)\|(.*?)\|([^|]*)\]\]", text)
    # Other ranks may only tell that this one has failed.
    first = next((one for one in raised if one[1] != "CommError"), raised[0] if raised else None)
    if first is None:
        died = re.search(r"died with exit code -?\d+", text)
        return Failure(died[0] if died else "hang", text[-3000:], len(program.operations))
    number, name, message, where = first
    op = program.operations[int(number)].what if int(number) >= 0 else "fully_shard"
    words = re.sub(r"\d+|'[^']*'|\[[^\]]*\]", "", message)[:60]
    return Failure(f"{name} in {op}: {words}", f"operation {number}, {op}: {name}: {message} ({where})", int(number))
