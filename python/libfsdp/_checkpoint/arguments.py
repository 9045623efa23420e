"""Checks the types of arguments of saves and loads."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsFloat, TypeAlias

import torch
from torch import nn

from libfsdp._core.arguments import refuse

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def check_path(name: str, value: Any) -> str:
    """Returns the path as a string."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        refuse(name, value, "a path")
    return os.fsdecode(value)


def as_folders(value: Any) -> list[str]:
    """Returns the folder of checkpoints, or those in memory and on the disk, as strings."""
    several = value if isinstance(value, (list, tuple)) else [value]
    if len(several) not in (1, 2):
        refuse("folder", value, "a folder of checkpoints, or two: that in memory, and the one that all ranks share")
    return [check_path("folder", one) for one in several]


def check_model(value: Any) -> None:
    if not isinstance(value, nn.Module):
        refuse("model", value, "the module that fully_shard was called on")


def as_list(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of a save or a load as a list."""
    if optimizer is None:
        return []
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    several = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    if not all(isinstance(one, torch.optim.Optimizer) for one in several):
        refuse("optimizer", optimizer, "an optimizer, a list of several, or None")
    return several


def check_counts(**counts: Any) -> None:
    """Raises TypeError unless each value is a whole number, of any library."""
    for name, value in counts.items():
        try:
            operator.index(value)
        except TypeError:
            refuse(name, value, "a whole number")


def check_metric(value: Any) -> None:
    """Raises TypeError unless the value is a number; a tensor and numpy's numbers are accepted, too."""
    if value is not None and not isinstance(value, SupportsFloat):
        refuse("metric", value, "a number, or None")


def check_grad_scaler(value: Any) -> None:
    """Raises TypeError unless the value is a scaler of any class with a state."""
    if value is not None and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        refuse("grad_scaler", value, "a GradScaler, or None")


def check_values(**values: Any) -> None:
    """Raises TypeError unless each value is a dictionary or None."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Mapping):
            refuse(name, value, "a dictionary, as {'step': 100}, or None")


def check_functions(taken: str, **functions: Any) -> None:
    """Raises TypeError unless each value is a function or None."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            refuse(name, value, f"a function that takes {taken}, or None")


def check_prefixes(**prefixes: Any) -> None:
    for name, value in prefixes.items():
        if not isinstance(value, str):
            refuse(name, value, "a text that names begin with; '' for none")
