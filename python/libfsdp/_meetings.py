"""Ranks that may die tell each other where they are, through the store of their process group.

A collective can't: Gloo closes the connections of all ranks when one of them waits for too long, and does not say for whom.
"""

from __future__ import annotations

import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from libfsdp import _C

if TYPE_CHECKING:
    from typing import Final

_ALL_HAVE_COME: Final = "all have come"


class Meetings:
    """The meetings of one group, which all its ranks count alike.

    [Note: One verdict] A rank for which others have waited too long may come at that very moment. So each rank proposes
    what it has seen, and the store keeps the first proposal, which all ranks take.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store = dist.distributed_c10d._get_process_group_store(group)
        self._rank, self._size = group.rank(), group.size()
        self.count = 0

    def meet(self, said: str, timeout: timedelta) -> list[str]:
        """Returns what each rank has said, once all have come. Every rank of the group calls it.

        Raises:
            CommError: on all ranks that come, if a rank did not in this time, with its number; or if the store is gone.
        """
        number, self.count = self.count, self.count + 1
        try:
            return self._meet(number, said, timeout)
        except _C.CommError:
            raise
        except RuntimeError as error:
            raise _C.CommError(
                f"transfer_plan: the store of the process group does not answer ({error}); the rank that has it may have gone"
            ) from error

    def _meet(self, number: int, said: str, timeout: timedelta) -> list[str]:
        keys = [self._key(number, rank) for rank in range(self._size)]
        end = time.monotonic() + timeout.total_seconds()
        self._store.set(keys[self._rank], said)
        missing: list[int] = []
        try:
            self._store.wait(keys, timeout)
        except RuntimeError:
            if time.monotonic() < end:
                raise
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        seen = _ALL_HAVE_COME
        if missing:
            names = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
            seen = f"transfer_plan: {names} of the group did not come within {timeout.total_seconds():g} s"
        verdict = self._store.compare_set(self._key(number, "verdict"), "", seen).decode()
        if verdict != _ALL_HAVE_COME:
            raise _C.CommError(verdict)
        answers = [answer.decode() for answer in self._store.multi_get(keys)]
        if number > 0:  # All have left the meeting before, as they have come to this one.
            self._store.delete_key(self._key(number - 1, self._rank))
            if self._rank == 0:
                self._store.delete_key(self._key(number - 1, "verdict"))
        return answers

    @staticmethod
    def _key(number: int, of: int | str) -> str:
        return f"libfsdp/meeting {number}/{of}"


_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Meetings] = weakref.WeakKeyDictionary()


def meetings_of(group: dist.ProcessGroup) -> Meetings:
    """Returns the meetings of a group of this process."""
    if group not in _of_groups:
        _of_groups[group] = Meetings(group)
    return _of_groups[group]
