"""Lets writers of shards wait for readers of the same units, and end streams of weights."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from libfsdp import _C

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# The threads that read a state's shards now, each as often as it does.
_readers: weakref.WeakKeyDictionary[object, list[int]] = weakref.WeakKeyDictionary()
_readers_changed = threading.Condition()


def _forget_other_threads() -> None:
    """In a forked process, of which only the thread exists that has forked: the others' reads are their process's."""
    global _readers, _readers_changed
    own, known = threading.get_ident(), _readers
    _readers, _readers_changed = weakref.WeakKeyDictionary(), threading.Condition()
    for state, threads in known.items():
        if own in threads:
            _readers[state] = [thread for thread in threads if thread == own]


os.register_at_fork(after_in_child=_forget_other_threads)


@contextmanager
def reading_of(states: Iterable[object]) -> Iterator[None]:
    """A context in which writers of these shards wait. Several threads may read at once."""
    read, thread = list(states), threading.get_ident()
    with _readers_changed:
        for state in read:
            _readers.setdefault(state, []).append(thread)
    try:
        yield
    finally:
        with _readers_changed:
            for state in read:
                _readers[state].remove(thread)
                if not _readers[state]:
                    del _readers[state]  # Steps look at nothing while there are none.
            _readers_changed.notify_all()


def before_write(states: Iterable[Any]) -> None:
    """Call it before shards of these states (MemberState) are written, except by an optimizer's step. Returns when they have no readers.

    Raises:
        Error: if a stream of full_weights was left open, which has then ended, or if the calling thread reads the shards itself.
    """
    written = list(states)
    for engine in {state.model.engine for state in written if state.model is not None}:
        engine.refuse_export()
    wait_for_readers(written)


def wait_for_readers(states: Iterable[object]) -> None:
    """Returns when the shards of these states have no readers.

    Raises:
        Error: if the calling thread reads them itself: it would wait for ever.
    """
    if not _readers:
        return
    written = list(states)
    with _readers_changed:
        if any(threading.get_ident() in _readers.get(state, ()) for state in written):
            raise _C.Error(
                "shards are to be written (a step, a load) by the thread that reads them, within reading() of local_shards; end that "
                "first"
            )
        _readers_changed.wait_for(lambda: not any(_readers.get(state) for state in written))
