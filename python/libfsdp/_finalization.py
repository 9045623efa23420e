"""Gradients that are reduced when the program says so, not when a backward ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libfsdp._model import Model


class GradientReductionHandle:
    """Waits for the reductions that ``FSDPModule.finalize_backward(async_op=True)`` has started."""

    def __init__(self, model: Model | None = None) -> None:
        self._model = model

    def wait(self) -> None:
        """Returns when the parameters have their gradients. Call it before the optimizer's step and before the next forward."""
        model, self._model = self._model, None
        if model is not None:
            model.finish_finalization(self)
