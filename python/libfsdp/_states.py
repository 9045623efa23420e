"""Finds the states that fully_shard has attached to modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from libfsdp._state import ShardState

ATTRIBUTE = "_libfsdp_state"


def state_of(module: nn.Module) -> ShardState | None:
    """Returns the state of a module that fully_shard was called on."""
    return module.__dict__.get(ATTRIBUTE)


def states_in(*modules: nn.Module) -> Iterator[tuple[str, ShardState, ShardState | None]]:
    """Yields all states in modules, each once, with its name and the closest enclosing state. Enclosing states come first."""
    seen: set[nn.Module] = set()
    found: set[ShardState] = set()

    def walk(
        module: nn.Module, name: str, enclosing: ShardState | None
    ) -> Iterator[tuple[str, ShardState, ShardState | None]]:
        if module in seen:
            return
        seen.add(module)
        state = state_of(module)
        if state is not None:
            if state not in found:
                for one in (state, *state.companions):
                    found.add(one)
                    yield name, one, enclosing
                    enclosing = one
            else:
                enclosing = (state, *state.companions)[-1]
        for child_name, child in module.named_children():
            yield from walk(child, f"{name}.{child_name}" if name else child_name, enclosing)

    for module in modules:
        yield from walk(module, "", None)
