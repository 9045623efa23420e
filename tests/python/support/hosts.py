"""Hosts without hosts: ranks find who is on their host by the kernel's name of its present life, of which each reads another one."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

BOOT = b"/proc/sys/kernel/random/boot_id"
CLONE_NEWNS, MS_BIND, MS_REC_PRIVATE = 0x20000, 0x1000, 0x4000 | 0x40000

_libc = ctypes.CDLL(None, use_errno=True)


def _require(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def pretended_host(host: int) -> Iterator[None]:
    """Within it, this process is on that host. Raises OSError where the system refuses that."""
    _require(_libc.unshare(CLONE_NEWNS))
    _require(_libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None))
    with tempfile.NamedTemporaryFile("w") as name:
        name.write(f"00000000-0000-0000-0000-{host:012}\n")
        name.flush()
        _require(_libc.mount(name.name.encode(), BOOT, None, MS_BIND, None))
    try:
        yield
    finally:
        _require(_libc.umount(BOOT))


def can_pretend_hosts() -> bool:
    """Tries it in a process of its own."""
    child = os.fork()
    if child == 0:
        possible = False
        try:
            with pretended_host(1):
                possible = True
        finally:
            os._exit(0 if possible else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
