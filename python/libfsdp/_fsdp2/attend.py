"""Modules that not all ranks use in every forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from libfsdp import _C
from libfsdp._core.arguments import as_flag
from libfsdp._core.function_calls import outside_inference, outside_transforms, untraced
from libfsdp._core.model import states_in

if TYPE_CHECKING:
    from torch import nn


@untraced
def attend(module: nn.Module, present: bool, *, divide_by_present: bool = False) -> None:
    """Says whether this rank uses a module in this forward: it may have no images for a tower, or no tokens for an expert.

    Call it on every rank of the module's mesh, within the forward of the root, before the module is used or skipped,
    every time. A forward pre-hook of the root is a place for models whose code is not yours. The ranks exchange it in
    one small message.

    Afterwards, a rank with ``present=False`` skips the module. It sends its shards to the others, receives nothing, and
    counts as zero in the sum of gradients: the result has the same bits as if it had run a pass whose gradients are
    zero. If no rank is present, nothing is sent, and the parameters get no gradient. If only some are, the module's
    units stay gathered on them until the end of backward, where their gradients are reduced.

    In a forward that activation checkpointing repeats, it does nothing.

    Args:
        module: a module that fully_shard was called on, or one that contains such modules; all of these are meant.
        present: whether this rank uses the module.
        divide_by_present: divide the sum of gradients by the number of ranks that were present, and not by the number
            of all ranks. The same on all ranks.

    Raises:
        ValueError: if the module contains no sharded module with parameters of its own.
        RuntimeError: outside of the root's forward.
        libfsdp.Error: if the ranks' divide_by_present differ, or the module has a gradient divide factor beside it.
            Using a module that this rank has said to skip raises it, too.
    """
    uses, divides = as_flag("present", present), as_flag("divide_by_present", divide_by_present)
    if _C.inside_backward():
        return
    states = [state for _, state, _ in states_in(module) if state.unit is not None]
    if not states:
        raise ValueError(
            f"attend expects a module with a sharded module in it, but {type(module).__name__} has none: its parameters "
            "are gathered and reduced with those of a module around it. Call fully_shard on it"
        )
    model = states[0].model
    if model is None or model.forward_root is None:
        raise RuntimeError(
            "attend must be called within the forward of the root FSDP module, for example in a forward pre-hook of it"
        )
    _attend([state.unit for state in states if state.unit is not None], model.engine, uses, divides)


@outside_transforms
@outside_inference
def _attend(units: list[_C.ShownUnit], engine: _C.HookedModel, present: bool, divide_by_present: bool) -> None:
    engine.attend(units, present=present, divide_by_present=divide_by_present)
