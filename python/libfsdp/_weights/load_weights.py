"""Loads unsharded weights into an ordinary module, in place."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Generator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from libfsdp import _C
from libfsdp._core.packed_weights import is_packed, parts_of
from libfsdp._weights.changed_weights import ChangedWeights, WeightChange
from libfsdp._weights.full_weights import FullWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from libfsdp._core.packed_weights import QuantStatePart

    Pair = tuple[str, torch.Tensor]

_TOLD = 5  # faults that a message lists


def load_weights(
    module: nn.Module,
    buckets: Iterable[list[Pair]] | Iterable[Pair],
    *,
    names: Collection[str] | None = None,
    rename: Callable[[str], str] | None = None,
) -> None:
    """Copies unsharded weights into the parameters and buffers of a module that is not sharded, bucket by bucket.

    The module's tensors keep their memory: each value is converted to the dtype and the device of its tensor. Of names that are one tensor
    in the module (tied parameters), one is enough; different values for them are an error. Four-bit weights of bitsandbytes take codes and
    the parts of their quant_state, which modules save behind their names, and neither is converted.

    A bucket is checked before any of it is copied. After an error, also of ``buckets`` itself, the buckets before are in
    the module, and a stream of full_weights or a generator is closed. Not collective: it is as collective as ``buckets``.

    Args:
        module: an ordinary module, a model of transformers, say.
        buckets: lists of names with unsharded tensors, as full_weights returns them; or names with tensors, as WeightSource does.
        names: the names of the module's ``state_dict()`` that are sent; by default all.
        rename: returns the module's name for a received name.

    Raises:
        Error: if a received name is not in the module, or is received twice; if shapes differ; if names are missing at
            the end; if a tensor of the module can't be written to. It names them, and reports how much was loaded
            before.
    """
    try:
        loading = _Loading(module, names, rename)
        for number, bucket in enumerate(_buckets_of(buckets)):
            loading.take(number, bucket)
    except BaseException:
        if isinstance(buckets, (FullWeights, ChangedWeights, Generator)):
            buckets.close()  # The traceback keeps it alive, and the other ranks would wait for as long.
        raise
    loading.end()


def _buckets_of(buckets: Iterable[Any]) -> Iterator[list[Pair]]:
    """Yields lists of pairs; a single pair is a bucket of its own."""
    for bucket in buckets:
        yield (
            [bucket] if isinstance(bucket, tuple) and len(bucket) == 2 and isinstance(bucket[0], str) else list(bucket)
        )


def targets_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers of a module, by their names in ``state_dict()``."""
    own = {id(tensor) for tensor in itertools.chain(module.parameters(), module.buffers())}
    # What hooks put into a state dict beside parameters and buffers would be written to in vain.
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if id(tensor) in own}


class _Loading:
    """The tensors that a module has received, and those that are expected.

    Args: those of load_weights.
    """

    def __init__(self, module: nn.Module, names: Collection[str] | None, rename: Callable[[str], str] | None) -> None:
        self._targets = targets_of(module)
        self._rename = rename
        self._come: dict[str, str] = {}  # the received names, by those that they have in the module
        self._filled: dict[int, str] = {}  # the name by which a tensor was filled, by its id
        # Of packed weights, their quant_state comes, too, under names behind theirs.
        self._parts: dict[str, QuantStatePart] = {}
        faults: list[str] = []
        for name, target in list(self._targets.items()):
            parts = parts_of(target) if is_packed(target) else {}
            if parts is None:
                faults.append(f"'{name}' is quantized in a way that is not known here, by a {type(target).__name__}")
            self._parts.update({f"{name}.{key}": part for key, part in (parts or {}).items()})
        self._targets.update({name: part.value for name, part in self._parts.items()})
        if names is not None:
            if isinstance(names, str):
                raise _C.Error(f"load_weights: names must be a list of names, or None, got {names!r}")
            unknown = [f"no parameter or buffer '{name}'" for name in names if name not in self._targets]
            if unknown:
                raise _C.Error(f"load_weights: names: {told(unknown)} in {type(module).__name__}")
            wanted = set(names)
            self._targets = {name: target for name, target in self._targets.items() if name in wanted}
        faults += [fault for name, target in self._targets.items() if (fault := fault_of_target(name, target))]
        if faults:
            raise _C.Error(f"load_weights: {told(faults)}")

    def take(self, number: int, bucket: list[Pair]) -> None:
        """Copies a bucket, of this number from 0, into the module."""
        faults: list[str] = []
        found: dict[str, tuple[str, torch.Tensor]] = {}
        for entry in bucket:
            name, tensor = entry if isinstance(entry, (tuple, list)) and len(entry) == 2 else (None, None)
            if isinstance(entry, WeightChange):
                raise _C.Error("load_weights: these are changes, of full_weights with since; pass them to apply_changes")
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise _C.Error(f"load_weights: bucket {number + 1}: expected a name and a tensor, got {entry!r:.60}")
            mine = name if self._rename is None else self._rename(name)
            label = f"'{name}'" if mine == name else f"'{name}' (here {mine!r})"
            target = self._targets.get(mine)
            earlier = self._come.get(mine) or (found[mine][0] if mine in found else None)
            if target is None:
                faults.append(f"no parameter or buffer {label}")
            elif earlier is not None:
                faults.append(f"{label} was received before" + (f", as '{earlier}'" if earlier != name else ""))
            elif mine in self._parts:
                fault = self._parts[mine].fault_of(tensor)
                if fault:
                    faults.append(f"{label} {fault}")
                found[mine] = (name, tensor)
            elif is_packed(target) and (target.shape != tensor.shape or target.dtype != tensor.dtype):
                faults.append(
                    f"{label} is {list(tensor.shape)} of {tensor.dtype}, and here {list(target.shape)} of {target.dtype}, codes of "
                    "quantized numbers, which are not converted: load codes, or into a module that is not quantized"
                )
            elif target.shape != tensor.shape:
                faults.append(f"{label} is {list(tensor.shape)}, and here {list(target.shape)}")
            else:
                found[mine] = (name, tensor)
        if faults:
            raise _C.Error(f"load_weights: bucket {number + 1}: {told(faults)}; {self._loaded()}")
        for mine, (name, tensor) in found.items():
            self._fill(mine, tensor)
            self._come[mine] = name

    def end(self) -> None:
        """Raises Error if a tensor is missing."""
        missing = [f"'{name}'" for name, target in self._targets.items() if id(target) not in self._filled]
        if missing:
            raise _C.Error(
                f"load_weights: {told(missing)} did not arrive; {self._loaded()}; if only some are sent, pass their names as names"
            )

    @torch.no_grad()
    def _fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copies one tensor into that of this name."""
        target = self._targets[name]
        if name in self._parts:
            self._filled[id(target)] = name
            self._parts[name].fill(tensor)
            return
        first = self._filled.setdefault(id(target), name)
        if first == name:
            try:
                target.copy_(tensor)
            except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:  # of a tensor's class that can't
                raise _C.Error(
                    f"load_weights: '{name}' is a {type(target).__name__}, into which a {type(tensor).__name__} of {tensor.dtype} can't be "
                    f"copied ({error}); {self._loaded()}; load into a module that is not quantized, and quantize it then"
                ) from error
        elif not _same(target.detach(), tensor.to(device=target.device, dtype=target.dtype)):
            raise _C.Error(
                f"load_weights: '{first}' and '{name}' are tied here, and came with different values; {self._loaded()}"
            )

    def _loaded(self) -> str:
        """Returns how much was loaded, for messages."""
        last = f", the last of them '{next(reversed(self._come))}'" if self._come else ""
        return f"{len(self._come)} of {len(self._targets)} were loaded before{last}"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors of one dtype are equal, where NaN is equal to NaN."""
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def fault_of_target(name: str, target: torch.Tensor) -> str:
    """Returns why a tensor can't be filled; empty if it can."""
    if isinstance(target, DTensor):
        return f"'{name}' is a DTensor: only ordinary modules can be filled"
    if target.is_meta:
        return f"'{name}' is on the meta device: call module.to_empty(device=...) before"
    return ""


def told(faults: list[str]) -> str:
    """Joins faults, the first ones if there are many."""
    more = len(faults) - _TOLD
    return ", ".join(faults[:_TOLD]) + (f" and {more} more" if more > 0 else "")
