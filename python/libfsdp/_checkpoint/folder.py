"""Finds checkpoints in a folder."""

from __future__ import annotations

import os

from libfsdp import _C
from libfsdp._checkpoint.arguments import check_path


def latest(folder: str | os.PathLike[str]) -> str | None:
    """The path of the newest complete checkpoint of this library in a folder.

    That is the one that was saved last, of those whose names end in a number. Not collective.

    Args:
        folder: the folder, which need not exist.

    Returns:
        None if there is none.

    Raises:
        Error: if a disk error prevents the check whether one is complete.
    """
    return _C.latest(check_path("folder", folder))


def best(folder: str | os.PathLike[str]) -> str | None:
    """The path of the checkpoint with the least ``metric``, of those from which ``latest`` chooses.

    Of several with the same metric, it is the newest. Not collective.

    Args:
        folder: the folder, which need not exist.

    Returns:
        None if none has a metric.

    Raises:
        Error: in the same case as ``latest``.
    """
    return _C.best(check_path("folder", folder))
