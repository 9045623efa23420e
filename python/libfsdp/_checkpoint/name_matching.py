"""Matches the names in a checkpoint with those of the model and the optimizer, and decides where values go."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from libfsdp import _C
from libfsdp._checkpoint.arguments import check_functions, check_grad_scaler, check_path, check_prefixes
from libfsdp._checkpoint.random_state import generator_states, takes
from libfsdp._core.arguments import check_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from libfsdp._checkpoint.items import Item, ModelState

_MODEL = "model."
_OPTIMIZER = "optim."
_EXTRA = "extra."
_RANK_EXTRA = "rank_extra."
_OWN = "fsdp."
# Settings of an optimizer that say how it computes, and not what: they stay as the program has them, for which state was made.
_HOW = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Options:
    """The options of libfsdp.load."""

    strict: bool
    rename: Callable[[str], str] | None
    ignore: Callable[[str], bool] | None
    model_prefix: str
    optimizer_prefix: str
    check_first: bool
    optimizer_settings: bool
    rng: bool
    grad_scaler: torch.amp.GradScaler | None

    def __post_init__(self) -> None:
        check_flags(
            strict=self.strict, check_first=self.check_first, optimizer_settings=self.optimizer_settings, rng=self.rng
        )
        check_functions("a name", rename=self.rename, ignore=self.ignore)
        check_grad_scaler(self.grad_scaler)
        check_prefixes(model_prefix=self.model_prefix, optimizer_prefix=self.optimizer_prefix)


@dataclass
class Names:
    """The names that this rank has found.

    Attributes:
        used: names in the checkpoint that are used.
        replaced: names in the model and the optimizer whose values are replaced.
        missing: names of the model or the optimizer that the checkpoint does not have.
    """

    used: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)


class NameMatching:
    """A checkpoint that is being loaded on this rank."""

    def __init__(self, path: str, options: Options) -> None:
        self.path = path
        self.options = options
        self.reading = _C.CheckpointReading(path)
        self.all_names = self.reading.names
        self._has = set(self.all_names)
        self._with_state = {name.rpartition(".")[0] for name in self.all_names if not name.endswith(".step")}
        self.names = Names()
        self.extra_states: dict[str, Any] = {}  # of modules
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._groups: list[dict[str, Any]] | None = None

    def stored(self, key: str) -> str:
        """Returns the checkpoint's name for a name of the model."""
        if not key.startswith((_MODEL, _OPTIMIZER)):
            return key  # ``rename`` gets only names of the model and the optimizer, not the library's own.
        name = self.options.rename(key) if self.options.rename is not None else key
        if name.startswith(_MODEL):
            return self.options.model_prefix + name.removeprefix(_MODEL)
        if name.startswith(_OPTIMIZER):
            return self.options.optimizer_prefix + name.removeprefix(_OPTIMIZER)
        return name

    def is_ignored(self, name: str) -> bool:
        return self.options.ignore is not None and self.options.ignore(name)

    def has(self, key: str) -> bool:
        return self.stored(key) in self._has

    def expect(self, key: str) -> None:
        """Notes that the name is not unexpected."""
        self.names.used.add(self.stored(key))

    def _begin(self, key: str) -> bool:
        """Notes that the value will be replaced, if the checkpoint has it. Returns whether it has."""
        if self.is_ignored(key):
            return False
        if not self.has(key):
            self.names.missing.add(key)
            return False
        self.expect(key)
        self.names.replaced.add(key)
        return True

    def add(self, item: Item, *, other_key: str | None = None) -> None:
        """Notes where this rank's values of a tensor belong.

        Raises:
            Error: if the checkpoint has something else by this name.
        """
        key = item.key if other_key is None else other_key
        if not self._begin(key):
            return
        self.names.replaced.add(item.key)
        stored = self.stored(key)
        shape = self.reading.shape(stored)
        if shape is None:
            self.reading.value(stored)  # says why it cannot be read, if that is so
            raise _C.Error(f"{self.path}: '{stored}' is no tensor")
        if shape != item.shape:
            raise _C.Error(f"{self.path}: '{stored}' has shape {shape}, the model's has {item.shape}")
        if item.values.numel() == 0:
            return
        to = item.values
        if not to.is_contiguous():
            to = torch.empty(to.shape, dtype=to.dtype, device=to.device)
            self._copies.append((item.values, to))
        self.reading.add(stored, item.offsets, to)

    def add_model(self, state: ModelState) -> None:
        """Adds all names of a model."""
        aliases: dict[str, list[str]] = {}
        for alias, first in state.aliases.items():
            aliases.setdefault(first, []).append(alias)
            self.expect(alias)
        for item in state.items:
            there = [alias for alias in aliases.get(item.key, []) if self.has(alias)]
            self.add(item, other_key=there[0] if there and not self.has(item.key) else None)
        for key in state.extra:
            if self._begin(key):
                self.extra_states[key] = self.value(self.stored(key))

    def value(self, stored: str) -> Any:
        """Returns a tensor or a plain value by its name in the checkpoint."""
        return self.reading.value(stored) if self.reading.shape(stored) is None else self.reading.tensor(stored)

    def number(self, key: str) -> float | None:
        """Returns the value of a scalar; None if there is none."""
        if not self.has(key):
            return None
        self.expect(key)
        value = self.value(self.stored(key))
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (int, float)):
            return value
        raise _C.Error(f"{self.path}: '{self.stored(key)}' is no number")

    def is_updated(self, name: str) -> bool:
        """Returns False if the saved optimizer had the parameter and has not updated it, so that it has no state."""
        count = f"{_OPTIMIZER}state.{name}.step"
        if self.stored(count).rpartition(".")[0] in self._with_state or self.is_ignored(count):
            return True
        # This library's C++ writes a count of 0. Python writes nothing, but names all parameters that the optimizer had.
        counted = self.number(count)
        return counted != 0 if counted is not None else f"{_OWN}lr_factor" in self._has or not self._had(count)

    def add_state(self, name: str, items: list[Item], values: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Adds an optimizer's state of one parameter.

        Args:
            name: the name of the parameter.
            items: the tensors of its state.
            values: the numbers of its state, by key.

        Returns:
            Whether the optimizer has it after the load, if it had none before; and new values of its numbers.
        """
        keys = [item.key for item in items] + list(values)
        if not self.is_updated(name):
            self.names.replaced.update(keys)
            return False, {}
        count = f"{_OPTIMIZER}state.{name}.step"
        if not self.is_ignored(count):
            self.expect(count)  # C++ counts the updates of all optimizers
        for item in items:
            self.add(item)
        return any(self.has(key) for key in keys), {key: self.number(key) for key in values if self._begin(key)}

    def has_optimizer(self) -> bool:
        return any(name.startswith(self.options.optimizer_prefix) for name in self.all_names)

    def other_optimizer_prefixes(self, parameters: Iterable[str]) -> str:
        """Says where a checkpoint without optimizer state below the prefix has some, for an error."""
        advice = (self.reading.advice_on_prefixes(f"state.{name}.", "optimizer_prefix") for name in parameters)
        return next(filter(None, advice), "")

    def other_model_prefixes(self, missing: list[str]) -> str:
        """Says where a checkpoint that lacks names of the model has the first of them, for an error."""
        first = next((name.removeprefix(_MODEL) for name in missing if name.startswith(_MODEL)), None)
        return "" if first is None else self.reading.advice_on_prefixes(first, "model_prefix")

    def _saved_groups(self) -> list[dict[str, Any]]:
        """For each group of the saved optimizer, the names of values by setting; "params" has the names of its parameters."""
        if self._groups is None:
            self._groups = []
            prefix = f"{self.options.optimizer_prefix}param_groups."
            by_number: dict[int, dict[str, Any]] = {}
            for name in self.all_names:
                number, _, setting = name.removeprefix(prefix).partition(".")
                if name.startswith(prefix) and number.isdecimal() and setting:
                    by_number.setdefault(int(number), {})[setting] = name
            for _, group in sorted(by_number.items()):
                listed = self.value(group["params"]) if "params" in group else []
                group["params"] = listed if isinstance(listed, list) else []
                self._groups.append(group)
        return self._groups

    def _name_in_groups(self, count: str) -> str | None:
        prefix, stored = f"{self.options.optimizer_prefix}state.", self.stored(count)
        if not stored.startswith(prefix) or not stored.endswith(".step"):
            return None
        return stored[len(prefix) : -len(".step")]

    def _had(self, count: str) -> bool:
        """Returns whether the saved optimizer had the parameter."""
        name = self._name_in_groups(count)
        return any(name == str(one) for group in self._saved_groups() for one in group["params"])

    def settings_of(self, g: int, group: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """Returns the saved values of those settings that a group has.

        Args:
            g: the number of the group, for errors.
            group: the group with its settings.
            names: the names of its parameters.

        Raises:
            Error: if its parameters were saved with different ones.
        """
        wanted = {self._name_in_groups(f"{_OPTIMIZER}state.{name}.step") for name in names}
        found: dict[str, Any] = {}
        for saved in self._saved_groups():
            if not wanted.intersection(map(str, saved["params"])):
                continue
            for setting in group.keys() & saved.keys() - {"params", *_HOW}:
                value = self.value(saved[setting])
                if isinstance(value, torch.Tensor):
                    value = value.item()
                if setting in found and found[setting] != value:
                    raise _C.Error(
                        f"{self.path}: parameters of group {g} of the optimizer were saved with the {setting}s {found[setting]} and "
                        f"{value}; divide them into groups as they were, or pass optimizer_settings=False"
                    )
                found[setting] = value
        return found

    def unexpected(self, used: set[str], *, with_optimizer: bool) -> list[str]:
        """Returns names of the model and the optimizer's state in the checkpoint that no rank has asked for."""
        states = f"{self.options.optimizer_prefix}state."
        return [
            name
            for name in self.all_names
            if name not in used
            and not self.is_ignored(name)
            and (with_optimizer if name.startswith(states) else self._is_of_model(name))
        ]

    def _is_of_model(self, name: str) -> bool:
        """If the model's names have no prefix, all tensors belong to the model whose names have no other known prefix."""
        if self.options.model_prefix:
            return name.startswith(self.options.model_prefix)
        others = (self.options.optimizer_prefix, _EXTRA, _RANK_EXTRA, _OWN)
        return not name.startswith(others) and self.reading.shape(name) is not None

    def below(self, prefix: str) -> dict[str, Any]:
        """Returns all values whose names begin with the prefix, by the rest of their names.

        Dictionaries and lists are put together again.
        """
        found: dict[str | int, Any] = {}
        lists: list[tuple[dict[str | int, Any], str | int]] = []
        for name in self.all_names:
            if not name.startswith(prefix) or self.is_ignored(name):
                continue
            place = found
            *above, last = self._path_below(name, prefix)
            for k, part in enumerate(above):
                if part not in place:
                    place[part] = {}
                    if isinstance([*above, last][k + 1], int):
                        lists.append((place, part))
                place = place[part]
            place[last] = self.value(name)
        for place, part in reversed(lists):  # inner ones first
            place[part] = [item for _, item in sorted(place[part].items())]
        return {str(name): value for name, value in found.items()}

    def _path_below(self, name: str, prefix: str) -> list[str | int]:
        """Returns the path of a value below the prefix. If it is not known, the rest of the name is the only part."""
        path = self.reading.path(name)
        for k in range(1, len(path)):
            if ".".join(map(str, path[:k])) + "." == prefix:
                return path[k:]
        return [name.removeprefix(prefix)]

    def generators(self, device: torch.device, ranks: int, rank: int) -> dict[str, torch.Tensor]:
        """Returns the states for this rank's generators, if as many ranks saved theirs."""
        found = {}
        for name in generator_states(device) if self.options.rng else ():
            saved = sum(f"{_OWN}{name}.{other}" in self._has for other in range(ranks + 1))
            if saved != ranks:
                continue
            key = f"{_OWN}{name}.{rank}"
            state = self.value(key)
            if not isinstance(state, torch.Tensor) or not takes(name, state, device):
                raise _C.Error(f"{self.path}: '{key}' is no state of this generator")
            found[name] = state
        return found

    def grad_scaler(self) -> dict[str, Any]:
        """Returns the state for the program's GradScaler. If it is missing, that is noted."""
        scaler = self.options.grad_scaler
        if scaler is None or not scaler.is_enabled():
            return {}
        if not self.has("scaler.scale"):
            self.names.missing.add("scaler.scale")
            return {}
        state = {name: self.number(f"scaler.{name}") for name in scaler.state_dict()}
        lost = [name for name, value in state.items() if value is None]
        if lost:
            raise _C.Error(f"{self.path} has no 'scaler.{lost[0]}'")
        return state

    @torch.no_grad()
    def assign(self, *, at_once: bool) -> None:
        """Reads all values that were added to their places."""
        self.reading.assign(at_once)
        for to, values in self._copies:
            for d in range(to.ndim):  # an expanded tensor has each value once
                if to.stride(d) == 0:
                    to, values = to.narrow(d, 0, 1), values.narrow(d, 0, 1)
            to.copy_(values)


def read_rank_extra(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every rank's ``rank_extra`` in a checkpoint, by rank.

    A run on another number of ranks needs it to divide these values anew. Not collective.

    Args:
        path: the checkpoint's folder.

    Raises:
        Error: if it can't be read.
    """
    loading = NameMatching(check_path("path", path), Options(True, None, None, _MODEL, _OPTIMIZER, True, False, False, None))
    ranks = loading.number(f"{_OWN}ranks")
    return [loading.below(f"{_RANK_EXTRA}{rank}.") for rank in range(int(ranks or 0))]
