"""Recipes with one scale for a tensor: how each rank quantizes its rows with the scale of the unsharded tensor.

They are known by the names of TransformerEngine's recipes, which its quantizers have. TransformerEngine is not
imported.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


class TensorScale:
    """The scale of one parameter. It stays the same until the values are written again, as on one rank, which quantizes them once."""

    def renew(self, quantizer: Any, rows: torch.Tensor, *, trained: bool) -> torch.Tensor | None:
        """Called when new rows are to be quantized (or, if the parameter is not trained, possibly the same ones); see QuantizedForm."""
        raise NotImplementedError

    def set_largest(self, largest: torch.Tensor) -> None:
        """See QuantizedForm."""
        raise NotImplementedError

    def quantize(self, rows: torch.Tensor) -> Any:
        """Returns a quantized tensor that begins with the rows, without a transposed copy."""
        raise NotImplementedError

    def beside(self) -> list[torch.Tensor]:
        """Returns the tensors that are sent beside the rows that were quantized last, of one element each."""
        return []

    def deliver(self, name: str, quantizer: Any, arrived: list[torch.Tensor], whole: Any) -> None:
        """Called when all ranks' rows, and the tensors beside them, have arrived: sets the scale of the unsharded tensor."""
        raise NotImplementedError


def scale_of(quantizer: Any) -> TensorScale | None:
    """Returns the object that gives ranks the scale of the unsharded tensor; None if the recipe is not known to have one scale."""
    recipe = quantizer._get_compatible_recipe() if hasattr(quantizer, "_get_compatible_recipe") else None
    names = {cls.__name__ for cls in getattr(recipe, "__mro__", ())}
    if "DelayedScaling" in names:
        return DelayedScale()
    # A quantizer that reduces the largest values itself does so in each call, for each parameter.
    if "Float8CurrentScaling" in names and not getattr(quantizer, "with_amax_reduction", False):
        return CurrentScale()
    return None


class DelayedScale(TensorScale):
    """A scale that the quantizer has before it sees the values. It is computed from the largest of earlier values, which it records.

    The quantizer may get another scale, and a new record, between two gathers of the same values. So the scale is copied after values were
    written, and the largest value of all ranks' rows, which is sent beside the rows, is recorded once.
    """

    def __init__(self) -> None:
        self._of_rows: Any = None
        self._is_recorded = True
        # For a device, for which the host does not wait: the parameter whose scales arrived last, whether they differ, and the event after
        # which the host can know.
        self._differ: tuple[str, torch.Tensor, torch.Event] | None = None

    def renew(self, quantizer: Any, rows: torch.Tensor, *, trained: bool) -> None:
        """Keeps the scale that the quantizer has now; for a parameter that is not trained, the one that it had first.

        Raises:
            ValueError: if the ranks had different scales the last time, on a device.
        """
        if self._differ is not None:
            (name, differ, known), self._differ = self._differ, None
            known.synchronize()
            if differ:
                raise _different_scales(name, "and so did the values of the last update")
        if not trained and self._of_rows is not None:
            return
        self._of_rows = _for_rows(quantizer)
        self._of_rows.scale = quantizer.scale.clone()
        self._of_rows.amax = torch.zeros_like(quantizer.amax)
        self._is_recorded = False

    def quantize(self, rows: torch.Tensor) -> Any:
        """Quantizes with the scale that was kept."""
        self._of_rows.amax.zero_()
        quantized = self._of_rows(rows)
        self._scale_inv = quantized._scale_inv
        return quantized

    def beside(self) -> list[torch.Tensor]:
        """Returns the scale, which ranks compare, and the largest value of these rows."""
        return [self._scale_inv.reshape(1), self._of_rows.amax.reshape(1)]

    def deliver(self, name: str, quantizer: Any, arrived: list[torch.Tensor], whole: Any) -> None:
        """Records the largest value.

        Raises:
            ValueError: if the ranks have different scales. On a device, the next call of renew raises it, to avoid waiting here.
        """
        if self._is_recorded:
            return
        scales, largest = arrived
        differ = (scales != scales[0]).any()
        if scales.device.type != "cpu":
            self._differ = name, differ.to("cpu", non_blocking=True), torch.Event(scales.device)
            self._differ[2].record()
        elif differ:
            raise _different_scales(name, f"1/scale is {scales.unique().tolist()}")
        whole._scale_inv.copy_(scales[0])
        quantizer.amax.copy_(torch.maximum(quantizer.amax, largest.amax()))  # as TransformerEngine's kernels do
        self._is_recorded = True


class CurrentScale(TensorScale):
    """A scale that the quantizer computes from the largest of its values.

    Each rank's rows therefore get the largest of all ranks' values in one more row.
    """

    def __init__(self) -> None:
        self._is_delivered = True

    def renew(self, quantizer: Any, rows: torch.Tensor, *, trained: bool) -> torch.Tensor:
        """Returns the largest value of these rows."""
        self._of_rows = _for_rows(quantizer)
        self._is_delivered = False
        return rows.abs().amax().reshape(1)

    def set_largest(self, largest: torch.Tensor) -> None:
        """Keeps the largest value of all ranks' rows."""
        self._largest = largest

    def quantize(self, rows: torch.Tensor) -> Any:
        """Quantizes the rows with one more row behind them."""
        more = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        more[-1].view(-1)[0] = self._largest
        quantized = self._of_rows(more)
        self._scale_inv = quantized._scale_inv
        return quantized

    def deliver(self, name: str, quantizer: Any, arrived: list[torch.Tensor], whole: Any) -> None:
        """Sets the scale of the unsharded tensor to that of this rank's rows, which is that of all rows."""
        if not self._is_delivered:
            whole._scale_inv.copy_(self._scale_inv.reshape(whole._scale_inv.shape))
        self._is_delivered = True


def _different_scales(name: str, detail: str) -> ValueError:
    return ValueError(
        f"parameter '{name}' is quantized with delayed scaling, and its quantizer's scale differs between ranks ({detail}), so "
        "their rows do not fit together: give all ranks the same scales, by the same checkpoint and "
        "DelayedScaling(reduce_amax=True)"
    )


def _for_rows(quantizer: Any) -> Any:
    """Returns a copy of the quantizer that makes no transposed copies."""
    other = copy.copy(quantizer)
    other.set_usage(columnwise=False)
    return other
