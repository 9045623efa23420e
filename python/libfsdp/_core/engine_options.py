"""The settings of a root's engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from libfsdp._comm.registered_memory import RegisteredMemory


@dataclass
class EngineOptions:
    """The settings of a root's engine.

    Attributes:
        prefetch_depth: units that are gathered ahead of their use.
        overlaps_reductions: with False, each reduction ends before backward continues.
        is_last_backward: with False, the end of a backward leaves reductions under way.
        ends_step: with False, backwards that give gradients do not end a step of the reports.
        manual_finalization: with True, the end of a backward reduces nothing; finalize_backward does.
        before_delivery: called before gradients of a backward are added to those of the shards; of any state.
        after_backward: called at the end of each backward, when gradients are there; of any state.
        buffers: where the engine's buffers lie; None: where units ask for it.
    """

    prefetch_depth: int = 1
    overlaps_reductions: bool = True
    is_last_backward: bool = True
    ends_step: bool = True
    manual_finalization: bool = False
    before_delivery: Callable[[], None] | None = None
    after_backward: Callable[[], None] | None = None
    buffers: RegisteredMemory | None = None
