"""Shared by the per-module interfaces of Megatron-FSDP: classes of sharded modules, and memory for parameters without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from libfsdp import _C
from libfsdp._core.model import state_of, states_in
from libfsdp._fsdp2.fsdp_module import FSDPModule

if TYPE_CHECKING:
    from libfsdp._core.model import MemberState

_classes: dict[tuple[type[nn.Module], type[FSDPModule]], type[nn.Module]] = {}


def attach(module: nn.Module, original: type[nn.Module], mixin: type[FSDPModule]) -> None:
    """Gives a module that libfsdp.fully_shard was called on a class of `mixin` and its own.

    Args:
        module: the sharded module.
        original: its class before.
        mixin: a class that is derived from FSDPModule directly.
    """
    if (original, mixin) not in _classes:
        contents = {"__deepcopy__": _refuse_deepcopy, "_orig_cls_mro_index": 3}
        _classes[original, mixin] = type(f"{mixin.__name__}{original.__name__}", (mixin, original), contents)
    module.__class__ = _classes[original, mixin]


def _refuse_deepcopy(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError(
        "a sharded module can't be copied: build another one, shard it, and load the state dict of this one"
    )


def states_of(module: nn.Module) -> list[MemberState]:
    """Returns the states of one call of fully_shard on a module. Parameters of several meshes make several states."""
    state = state_of(module)
    return [] if state is None else [state, *state.companions]


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
def give_memory(module: nn.Module) -> None:
    """Gives shards on the meta device memory on the mesh's device, with undefined values, except those of sharded modules below."""
    for state in states_of(module):
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
        RuntimeError: inside of a backward, and while one of them shows whole parameters or has gradients that are not reduced.
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
