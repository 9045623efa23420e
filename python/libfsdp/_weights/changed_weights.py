"""Changes in the weights of a sharded model, in a stream of buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from libfsdp import _C
from libfsdp._weights.weight_iterator import WeightIterator

if TYPE_CHECKING:
    from collections.abc import Iterable


class WeightSnapshot:
    """The values that the receivers of a model's weights have: the bits of this rank's shards, in the dtype in which they were last sent.

    A stream of full_weights with this snapshot as ``since`` sends the differences from it, and updates it. With a new snapshot, everything
    is sent. Everything is also sent after a stream that did not end on all ranks, because some receivers may have a part of it.

    It belongs to streams of one kind: tensors of the same names, shapes, dtypes and division, and the same ``ranks``.
    It does not keep the model alive, and may be used with another model of the same kind, for example a resumed one.
    Each rank has its own; all ranks use theirs together.

    Args:
        device: where the bits are kept, "cpu" for host memory; by default, each beside its shard.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._snapshot = _C.WeightSnapshot(None if device is None else torch.device(device))

    @property
    def nbytes(self) -> int:
        """The bytes that it holds: on each rank as many as its shards have in the dtype that travels."""
        return self._snapshot.nbytes


class WeightChange(NamedTuple):
    """New values of a tensor, of all its elements or of some.

    Attributes:
        name: the name in ``state_dict()``.
        shape: the shape of the unsharded tensor.
        positions: where the elements are in the flattened tensor, each once: one dimension, int32, or int64 for tensors
            of 2**31 elements and more. None if all elements are sent.
        values: as many as there are positions, in one dimension; the complete tensor if all elements are sent.
    """

    name: str
    shape: tuple[int, ...]
    positions: torch.Tensor | None
    values: torch.Tensor


class ChangeBucket(list[WeightChange]):
    """Changes, complete tensors first.

    Attributes:
        flat: the buffer of which positions and values are views: one dimension, bytes; each tensor begins at a multiple
            of 64 bytes. None on ranks that do not receive.
    """

    def __init__(self, changes: Iterable[WeightChange], flat: torch.Tensor | None) -> None:
        super().__init__(changes)
        self.flat = flat


class ChangedWeights(WeightIterator[ChangeBucket]):
    """An iterator of buckets of changes, and a context manager that closes it: see full_weights, with ``since``.

    The snapshot is updated when the stream is made. The receivers count as updated when all buckets have been taken on
    all ranks, and the iterator has ended. If it is closed before, the next stream sends everything. Its length is 0 if
    nothing has changed.
    """

    def _bucket_of(self, bucket: _C.WeightBucket) -> ChangeBucket:
        found = [WeightChange(name, tuple(values.shape), None, values) for name, values in bucket.weights]
        found += [WeightChange(one.name, tuple(one.shape), one.positions, one.values) for one in bucket.changes]
        return ChangeBucket(found, bucket.flat)

    @property
    def changed_fraction(self) -> float:
        """The fraction of all elements that has changed, from 0 to 1, the same on all ranks. It is 1 if everything is sent."""
        return self._stream.changed_fraction
