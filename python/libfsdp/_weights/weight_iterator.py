"""Buckets of weights from the engine, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from libfsdp import _C

Bucket = TypeVar("Bucket")


class WeightIterator(ABC, Generic[Bucket]):
    """An iterator of buckets, and a context manager that closes it."""

    def __init__(self, stream: _C.WeightStream) -> None:
        self._stream = stream

    @abstractmethod
    def _bucket_of(self, bucket: _C.WeightBucket) -> Bucket: ...

    def __iter__(self) -> Self:
        """Returns itself."""
        return self

    def __next__(self) -> Bucket:
        """Returns the next bucket. Collective.

        Raises:
            Error: if another rank has stopped.
            CommError: if a rank has ended.
        """
        bucket = self._stream.next()
        if bucket is None:
            raise StopIteration
        return self._bucket_of(bucket)

    def __len__(self) -> int:
        """The number of all buckets."""
        return self._stream.buckets

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()

    def close(self) -> None:
        """Stops before the last bucket. Waits until the other ranks have requested their next bucket; does nothing after the end."""
        self._stream.close()
