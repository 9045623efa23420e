"""Shared by the per-module interfaces of Megatron-FSDP."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from libfsdp import _C
from libfsdp._core.model import state_of, states_in
from libfsdp._fsdp2.fsdp_module import FSDPModule


def refuse_deepcopy(*args: Any, **kwargs: Any) -> NoReturn:
    """The ``__deepcopy__`` of sharded modules."""
    raise AssertionError(
        "a sharded module can't be copied: build another one, shard it, and load the state dict of this one"
    )


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters in and below a module that no sharded module below it has, by name; tied ones have several names."""
    found: dict[str, nn.Parameter] = {}

    def visit(inner: nn.Module, prefix: str) -> None:
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                found[prefix + name] = parameter
        for name, child in inner.named_children():
            if state_of(child) is None:
                visit(child, f"{prefix}{name}.")

    visit(module, "")
    return found


@torch.no_grad()
def give_memory(module: FSDPModule) -> None:
    """Gives shards on the meta device memory on the mesh's device, with undefined values, except those of sharded modules below."""
    for state in module._states(recurse=False):
        on_meta = [parameter for parameter in state.parameters if parameter.local.is_meta]
        for parameter in on_meta:
            local = torch.empty_like(parameter.local, device=state.mesh.device)
            shown = nn.Parameter(parameter.place(local), requires_grad=parameter.sharded.requires_grad)
            vars(shown).update(parameter.attributes)
            for place in parameter.places:
                place.module._parameters[place.name] = shown
        if on_meta:
            state.adopt_registered()


def require_quiet(module: nn.Module, function: str) -> None:
    """Gives up the engines of modules below a future root, which may have run by themselves.

    Raises:
        RuntimeError: inside of a backward, and while one of them has unsharded parameters or gradients that are not reduced.
    """
    models = []
    for name, state, _ in states_in(module):
        if state.model is None:
            continue
        if _C.inside_backward():
            raise RuntimeError(f"{function} of a module around '{name}' inside of a backward: call it between steps")
        unit = state.unit
        if unit is not None and any(
            place.module._parameters.get(place.name) is parameter.whole
            for parameter in state.parameters
            for place in parameter.places
            if parameter.whole is not None and parameter.whole is not parameter.sharded
        ):
            raise RuntimeError(
                f"{function} of a module around '{name}', whose parameters are gathered: call its reshard() first"
            )
        if state.model not in models:
            models.append(state.model)
    for model in models:
        model.refuse_to_drop(f"{function} of a module around others")
        model.dissolve()
