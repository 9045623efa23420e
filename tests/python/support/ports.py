"""Ports of this machine at which ranks meet."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserves a free TCP port until the block ends. Only programs that know its number can listen on it.

    A socket is bound to it and does not listen. The kernel gives the port to no other socket that asks for any free one, as Gloo's and
    those of other tests do, and lets one with SO_REUSEADDR, as torch's store has, listen there. A port that was merely free a moment ago
    may be somebody else's by the time a rank has imported torch.
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
