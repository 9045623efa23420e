"""The names under which unsharded weights are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from libfsdp import _C

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from libfsdp._weights.adapters import Adapters


def names_that_come(
    values: dict[str, Any],
    names: Collection[str] | None,
    rename: Callable[[str], str] | None,
    adapters: Adapters | None,
) -> dict[str, str]:
    """Returns the names under which tensors are sent, by those in ``state_dict()``, in its order.

    Args:
        values: the state dict.
        names: only these of its names; None: all.
        rename: returns the receiver's name for one of the state dict, or, with adapters, of the base model.
        adapters: those that are merged, and therefore not sent.

    Raises:
        Error: for names that are not sent, or for a ``rename`` that fails, or returns a name twice.
    """
    own = {name: name for name, value in values.items() if isinstance(value, torch.Tensor)}
    if adapters is not None:
        own = {name: adapters.names[name] for name in own if name in adapters.names}
    for name in names or ():
        if name not in own and name in values:
            raise _C.Error(f"full_weights: '{name}' is not sent: merge_adapters leaves adapters out")
        if name not in own:
            raise _C.Error(f"full_weights: the model has no parameter or buffer '{name}'")
    if names is not None:
        wanted = set(names)
        own = {name: base for name, base in own.items() if name in wanted}
    received = {name: base if rename is None else _renamed(rename, base) for name, base in own.items()}
    first: dict[str, str] = {}
    for name, new in received.items():
        if first.setdefault(new, name) != name:
            raise _C.Error(f"full_weights: '{first[new]}' and '{name}' would both be named '{new}'")
    return received


def names_of_tensors(values: dict[str, Any]) -> list[list[str]]:
    """Returns the names of each tensor of a state dict, in the order of the first ones. One that is tied has several."""
    names: dict[int, list[str]] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):  # and not extra state of a module
            names.setdefault(id(value), []).append(name)
    return list(names.values())


def _renamed(rename: Callable[[str], str], name: str) -> str:
    """Returns the receiver's name.

    Raises:
        Error: if there is none. (Another exception would leave this rank, and the others would wait.)
    """
    try:
        new = rename(name)
    except Exception as error:
        raise _C.Error(f"full_weights: rename failed for '{name}': {type(error).__name__}: {error}") from error
    if not isinstance(new, str):
        raise _C.Error(f"full_weights: rename must return a name, and returned {new!r} for '{name}'")
    return new
