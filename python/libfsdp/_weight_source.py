"""Whole weights for programs that first ask what will come, and then take one tensor after the other."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from libfsdp import _C
from libfsdp._full_weights import Receivers, full_weights, problem_of
from libfsdp._model import states_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


class WeightMetadata(NamedTuple):
    """What a WeightSource tells of a tensor before it comes.

    Attributes:
        name: the name under which it comes.
        dtype: the dtype in which it comes.
        shape: the sizes of the whole tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The whole weights of a sharded model, as often as they are asked for: metadata(), and names with tensors by iteration.

    It has the two methods that vLLM's trainer side asks of its weight sources. The names, shapes, dtypes and order of both
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
        ranks: as in full_weights; on ranks that do not receive, an iteration gives nothing, and has to be run all the same.
        rename: returns the receiver's name for one of ``state_dict()``.

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
        self._device = torch.get_device_module(state.mesh.device.type)

    def metadata(self) -> list[WeightMetadata]:
        """Returns the name, dtype and shape of each tensor, in the order of iteration. Not collective: nothing is sent.

        Raises:
            Error: if an argument is wrong, a name is unknown, or ``rename`` gives a name twice. An iteration raises it on
                every rank.
        """
        problem = problem_of(self._bucket_bytes, self._dtype, self._names, self._ranks)
        if problem:
            raise _C.Error(problem)
        values = {n: v for n, v in self._model.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
        unknown = [name for name in self._names or () if name not in values]
        if unknown:
            raise _C.Error(f"full_weights: no parameter or buffer '{unknown[0]}'")
        wanted = set(values if self._names is None else self._names)
        # The names of a tied parameter stand one behind the other.
        tensors: dict[int, list[str]] = {}
        for name, value in values.items():
            if name in wanted:
                tensors.setdefault(id(value), []).append(name)
        found = []
        for name in (name for tied in tensors.values() for name in tied):
            value = values[name]
            dtype = value.dtype if self._dtype is None or not value.is_floating_point() else self._dtype
            found.append(WeightMetadata(self._renamed(name), dtype, tuple(value.shape)))
        names = [one.name for one in found]
        twice = [name for name in names if names.count(name) > 1] if len(set(names)) < len(names) else []
        if twice:
            raise _C.Error(f"WeightSource: rename gives '{twice[0]}' for more than one name")
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
            self._model, bucket_bytes=self._bucket_bytes, dtype=self._dtype, names=self._names, ranks=self._ranks
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
                    yield self._renamed(name), copy

    def _renamed(self, name: str) -> str:
        return name if self._rename is None else self._rename(name)
