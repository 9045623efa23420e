"""Provides the stack of this program to `fsdp why`: its present lines, and the line at which an exception has ended it."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sys
import sysconfig
import traceback

# Programs use the signals that have names: Slurm's, and frameworks', for saving before a time limit, for example.
_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None

_STACK_FILE = "fsdp-stack"  # As in src/events/program_stack.h: a file in memory, which ends with its process.

_files: dict[int, int] = {}  # The one of this process, by its number: a fork of it makes its own.


def register() -> None:
    """With the environment variable FSDP_EVENTS, makes a signal write the stack of this rank into a file that `fsdp why` finds.

    The file's first line is the number of the signal. Without the variable, nothing is done, and once in a process is enough.
    """
    if not os.environ.get("FSDP_EVENTS") or os.getpid() in _files:
        return
    if _SIGNAL is None or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return
    try:
        made = os.memfd_create(_STACK_FILE)
        file = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, 3)  # The program may have closed its streams.
        os.close(made)
        os.write(file, f"{int(_SIGNAL)}\n".encode())
    except OSError:
        return  # The answer would have been a help.
    faulthandler.register(_SIGNAL, file=file, all_threads=True)
    for parents in _files.values():
        os.close(parents)
    _files.clear()
    _files[os.getpid()] = file


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
