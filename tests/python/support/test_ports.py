"""The port that is reserved for ranks that have yet to start."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import TCPStore

from support.ports import reserved_port


def test_the_store_gets_the_port_and_nobody_else() -> None:
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("step", "3")
        assert TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).get("step") == b"3"
