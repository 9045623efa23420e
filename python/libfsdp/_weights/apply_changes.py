"""Writes changes of weights, in place, into tensors that have the earlier values."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from libfsdp import _C
from libfsdp._weights.changed_weights import ChangedWeights, WeightChange
from libfsdp._weights.load_weights import fault_of_target, targets_of, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Targets = dict[str, torch.Tensor]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes that index every value's bits: torch indexes no 8-bit floating-point numbers on some devices."""


def apply_changes(
    target: nn.Module | Mapping[str, torch.Tensor],
    buckets: Iterable[Iterable[WeightChange]] | Iterable[WeightChange],
    *,
    rename: Callable[[str], str] | None = None,
) -> None:
    """Writes changed weights into the tensors of a module that is not sharded, or of a dict, bucket by bucket.

    The tensors keep their memory, and must have the values that the snapshot had. The result then equals that of a full export, bit for bit
    if the dtype is the same. Values are converted to the dtype and the device of their tensor. Tensors that are not sent are not changed.

    A bucket is checked before any of it is written. After an error, also of ``buckets`` itself, the buckets before are in
    the tensors, and a stream of full_weights or a generator is closed. Not collective: it is as collective as ``buckets``.

    Args:
        target: an ordinary module, or tensors by their names.
        buckets: lists of WeightChange, as full_weights returns them with ``since``; or single ones, as another process
            may send them.
        rename: returns the target's name for a received name.

    Raises:
        Error: if a received name is not in the target; if shapes differ; if positions are outside of the tensor, or
            not as many as values; if a tensor can't be written to. It names them.
    """
    try:
        tensors = dict(target) if isinstance(target, Mapping) else targets_of(target)
        for number, bucket in enumerate(buckets):
            changes = [bucket] if isinstance(bucket, WeightChange) else list(bucket)
            _apply(tensors, number, changes, rename)
    except BaseException:
        if isinstance(buckets, (ChangedWeights, Generator)):
            buckets.close()  # The traceback keeps it alive, and the other ranks would wait for as long.
        raise


def _apply(tensors: Targets, number: int, changes: list[Any], rename: Callable[[str], str] | None) -> None:
    """Checks a bucket, of this number from 0, and writes it."""
    faults: list[str] = []
    found: list[tuple[torch.Tensor, WeightChange]] = []
    for change in changes:
        if not isinstance(change, WeightChange):
            raise _C.Error(f"apply_changes: bucket {number + 1}: expected a WeightChange, got {change!r:.60}")
        mine = change.name if rename is None else rename(change.name)
        label = f"'{change.name}'" if mine == change.name else f"'{change.name}' (here {mine!r})"
        tensor = tensors.get(mine)
        fault = (
            f"no parameter or buffer {label}"
            if tensor is None
            else fault_of_target(mine, tensor) or _fault_of(label, tensor, change)
        )
        if fault:
            faults.append(fault)
        elif tensor is not None:
            found.append((tensor, change))
    if faults:
        raise _C.Error(f"apply_changes: bucket {number + 1}: {told(faults)}; nothing of this bucket was written")
    for tensor, change in found:
        _write(tensor, change)


def _fault_of(label: str, tensor: torch.Tensor, change: WeightChange) -> str:
    """Returns why a change does not fit its tensor; empty if it does."""
    shape, positions, values = tuple(tensor.shape), change.positions, change.values
    if shape != tuple(change.shape):
        return f"{label} is {list(change.shape)}, and here {list(shape)}"
    if positions is None:
        return "" if shape == tuple(values.shape) else f"{label} has values {list(values.shape)}"
    if positions.dtype not in (torch.int32, torch.int64) or positions.dim() != 1:
        return f"{label} has positions {positions.dtype} {list(positions.shape)}"
    if values.shape != positions.shape:
        return f"{label} has {len(positions)} positions and values {list(values.shape)}"
    if len(positions) > 0:
        low, high = (int(bound) for bound in positions.aminmax())
        if low < 0 or high >= tensor.numel():
            return f"{label} has {tensor.numel()} elements, and no position {low if low < 0 else high}"
    return ""


@torch.no_grad()
def _write(tensor: torch.Tensor, change: WeightChange) -> None:
    """Writes a change that was checked."""
    values = change.values.to(device=tensor.device, dtype=tensor.dtype)
    if change.positions is None:
        tensor.copy_(values)
        return
    tensor, positions = torch.atleast_1d(tensor), change.positions.to(tensor.device, torch.int64)
    if (bits := _BITS.get(tensor.itemsize)) is not None:
        tensor, values = tensor.view(bits), values.view(bits)
    tensor[torch.unravel_index(positions, tensor.shape)] = values  # With any strides.
