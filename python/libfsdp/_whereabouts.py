"""Tells `fsdp why` where this program is: the lines at which it is now, and the line at which an exception has ended it."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import sysconfig
import traceback
from contextlib import suppress
from typing import TextIO

# Programs use the signals that have names: Slurm's, and frameworks', for saving before a time limit, for example.
_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None

_files: dict[int, TextIO] = {}  # By process, as a forked one has its own. faulthandler keeps the number of its file, not the file.


def register() -> None:
    """With the environment variable FSDP_EVENTS, makes a signal write the stack of this rank into a file beside its events.

    The file's first line is the number of the signal. Without the variable, nothing is done, and once in a process is enough.
    """
    folder = os.environ.get("FSDP_EVENTS")
    if not folder or os.getpid() in _files or _SIGNAL is None or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return
    path = os.path.join(folder, f"stack-{os.getpid()}.txt")
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        print(int(_SIGNAL), file=file, flush=True)
    except OSError:
        return  # The rank says that its folder can't be written when it makes the file of events.
    _files[os.getpid()] = file
    faulthandler.register(_SIGNAL, file=file, all_threads=True)
    atexit.register(_remove, path, os.getpid())


def _remove(path: str, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        with suppress(OSError):
            os.remove(path)


def error_of_script() -> str:
    """Returns the exception that has ended the script, with the line of the program; an empty text if none has."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return ""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    installed = (os.path.dirname(__file__), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    own = [frame for frame in frames if not frame.filename.startswith((*installed, "<"))] or frames
    return f'{text} (File "{own[-1].filename}", line {own[-1].lineno}, in {own[-1].name})' if own else text
