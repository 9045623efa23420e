"""Unsharded weights for programs that first ask for names and shapes, and then take one tensor after the other."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from libfsdp import _C
from libfsdp._core.model import states_in
from libfsdp._core.packed_weights import is_of_packed, packed_among
from libfsdp._weights.adapters import adapters_of
from libfsdp._weights.full_weights import Receivers, full_weights, problem_of
from libfsdp._weights.weight_names import names_of_tensors, names_that_come

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


class WeightMetadata(NamedTuple):
    """The facts that a WeightSource returns about a tensor before it is sent.

    Attributes:
        name: the name under which it is sent.
        dtype: the dtype in which it is sent.
        shape: the sizes of the unsharded tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The unsharded weights of a sharded model, any number of times: metadata(), and names with tensors by iteration.

    It has the two methods that vLLM's trainer side requires of weight sources. The names, shapes, dtypes and order of both
    are the same.

    Each iteration is one stream of full_weights, collective as that is: all ranks take all of it, or stop. Its tensors are
    copies that belong to the caller, for as long as it keeps them: a program may collect many of them before it sends
    them. They are ordered behind the stream that is current where the iteration begins, and before the one that is current
    where they are taken.

    Args:
        model: the root, or a module that has sharded modules below it.
        bucket_bytes: as in full_weights.
        dtype: as in full_weights.
        names: as in full_weights.
        ranks: as in full_weights; on ranks that do not receive, an iteration yields nothing, but must be run nevertheless.
        rename: as in full_weights.
        merge_adapters: as in full_weights.

    Raises:
        ValueError: if the model is not sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_bytes: int = 128 << 20,
        dtype: torch.dtype | None = None,
        names: Collection[str] | None = None,
        ranks: Receivers = "all",
        rename: Callable[[str], str] | None = None,
        merge_adapters: bool = False,
    ) -> None:
        state = next((state for _, state, _ in states_in(model)), None)
        if state is None:
            raise ValueError(f"{type(model).__name__} is not sharded; call fully_shard on it first")
        self._model = model
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._names = names
        self._ranks = ranks
        self._rename = rename
        self._merge_adapters = merge_adapters
        self._device = torch.get_device_module(state.mesh.device.type)

    def metadata(self) -> list[WeightMetadata]:
        """Returns the name, dtype and shape of each tensor, in the order of iteration. Not collective: nothing is sent.

        Raises:
            Error: if an argument is wrong, a name is unknown, ``rename`` gives a name twice, or adapters can't be merged. An
                iteration raises it on every rank.
        """
        problem = problem_of(self._bucket_bytes, self._dtype, self._names, self._ranks)
        if problem:
            raise _C.Error(problem)
        values = self._model.state_dict(keep_vars=True)
        members = [state for _, state, _ in states_in(self._model)]
        adapters = adapters_of(self._model, values, members) if self._merge_adapters else None
        received = names_that_come(values, self._names, self._rename, adapters)
        packed = packed_among(values)
        found = []
        for name in itertools.chain(*names_of_tensors({name: values[name] for name in received})):
            value = values[name]
            is_converted = value.is_floating_point() and not is_of_packed(name, packed)
            dtype = value.dtype if self._dtype is None or not is_converted else self._dtype
            found.append(WeightMetadata(received[name], dtype, tuple(value.shape)))
        return found

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns an iterator of all weights. Its first ``next()`` begins the collective; closing it ends it, as full_weights does.

        Raises:
            Error: see full_weights; with ``next()``.
        """
        return self._pairs(self._device.current_stream())

    def _pairs(self, stream: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names with tensors.

        Args:
            stream: where buckets are gathered and copied. A program that packs tensors changes its current stream between
                two of them, and what a bucket waits for, one stream alone would know.
        """
        with full_weights(
            self._model,
            bucket_bytes=self._bucket_bytes,
            dtype=self._dtype,
            names=self._names,
            ranks=self._ranks,
            rename=self._rename,
            merge_adapters=self._merge_adapters,
        ) as buckets:
            while True:
                with self._device.stream(stream):
                    bucket = next(buckets, None)
                if bucket is None:
                    return
                for name, tensor in bucket:
                    with self._device.stream(stream):
                        copy = tensor.clone()
                    if tensor.device.type != "cpu" and (current := self._device.current_stream()) != stream:
                        current.wait_stream(stream)
                        copy.record_stream(current)
                    yield name, copy
