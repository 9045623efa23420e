"""Reports how long the phases of a save or a load take."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class PhaseReport:
    """A phase that has ended on this rank.

    Attributes:
        phase: "collect", "write", "commit", "prune" of a save; "open", "check", "assign" of a load.
        bytes: the size of this rank's values; for "write", the size of its file.
        seconds: how long it took.
    """

    phase: str
    bytes: int
    seconds: float


class Phases:
    """Reports phases to the program's callback, if there is one."""

    def __init__(self, on_phase: Callable[[PhaseReport], None] | None) -> None:
        self._on_phase = on_phase
        self._began = time.perf_counter()

    def end(self, phase: str, size: int) -> None:
        """Ends a phase, which began when the last one ended (the first one: when this object was made)."""
        now = time.perf_counter()
        self.tell(phase, size, now - self._began)
        self._began = now

    def tell(self, phase: str, size: int, seconds: float) -> None:
        if self._on_phase is None:
            return
        try:
            self._on_phase(PhaseReport(phase, size, seconds))
        except Exception as error:  # ranks would wait for this one
            warnings.warn(f"on_phase has raised {error!r}", stacklevel=2)
