"""Gradients that are reduced when the program requests it, not when a backward ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class GradientReductionHandle:
    """Waits for the reductions that ``FSDPModule.finalize_backward(async_op=True)`` has started."""

    def __init__(self, finish: Callable[[GradientReductionHandle], None] | None = None) -> None:
        """Makes a handle.

        Args:
            finish: called once, with this handle; None: nothing is under way.
        """
        self._finish = finish

    def wait(self) -> None:
        """Returns when the parameters have their gradients. Call it before the optimizer's step and before the next forward."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish(self)
