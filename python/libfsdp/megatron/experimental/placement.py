"""Placements of parameters, gradients and optimizer state, dimension by dimension, and what libfsdp calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.tensor import Partial, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor.placement_types import Placement

__all__ = ["Flat", "Strategy", "strategy_of"]


class Flat(Shard):
    """A shard along the first dimension. The peer shards a buffer with several parameters by it; here it is ``Shard(0)``."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class Strategy:
    """What a combination of placements is.

    Attributes:
        placements: the placements over the last dimension, by their name in libfsdp.fully_shard.
        outer_placements: the placements over the dimension before it, if there is one.
        defers_all: whether gradients of all microbatches but the last add up on each rank.
        defers_outer: whether they are reduced within the last dimension only.
    """

    placements: str
    outer_placements: str = "no_shard"
    defers_all: bool = False
    defers_outer: bool = False


# The known combinations of placements of parameters, gradients, and optimizer state.
_KNOWN = {
    "RPR": "no_shard",
    "RPS": "optim",
    "RSS": "optim_grads",
    "SSS": "optim_grads_params",
}
_OUTER = ("no_shard", "optim")


def strategy_of(
    parameter: Sequence[Placement], gradient: Sequence[Placement], optimizer: Sequence[Placement]
) -> Strategy:
    """What a combination of placements is.

    Args:
        parameter: the placements of parameters, for one or two dimensions.
        gradient: the placements of gradients, for the same dimensions.
        optimizer: the placements of optimizer state, for the same dimensions.

    Raises:
        NotImplementedError: if it is none of ZeRO-0 to 3, HSDP and HFSDP.
    """
    keys = ["".join(_letter(one) for one in of_axis) for of_axis in zip(parameter, gradient, optimizer, strict=True)]
    found = [_KNOWN.get(key, "") for key in keys]
    fits = len(found) in (1, 2) and all(found)
    if fits and len(found) == 2:
        fits = found[0] in _OUTER and (found[0] == "no_shard" or found[1] == "optim_grads_params")
    if not fits:
        raise NotImplementedError(
            f"no strategy has placements {_told(parameter)} of parameters, {_told(gradient)} of gradients and {_told(optimizer)} of "
            "optimizer state. On one dimension there are (parameter, gradient, optimizer) (Replicate, Partial('avg'), Replicate), "
            "(Replicate, Partial('avg'), Shard(0)), (Replicate, Shard(0), Shard(0)) and (Shard(0), Shard(0), Shard(0)). Before it, a "
            "dimension may have the first of these (HSDP), or, before the last of them, the second (HFSDP)"
        )
    return Strategy(
        placements=found[-1],
        # The peer cuts between any two elements; here, parameters without a row for each rank are replicated.
        outer_placements="optim_if_even" if found[0] == "optim" and len(found) == 2 else "no_shard",
        defers_all=keys[-1][1] == "P",
        defers_outer=len(keys) == 2,
    )


def _letter(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "avg" else "?"
    return "S" if isinstance(placement, Shard) and placement.dim == 0 else "?"


def _told(placements: Sequence[Placement]) -> str:
    names = [f"Partial('{p.reduce_op}')" if isinstance(p, Partial) else repr(p) for p in placements]
    return f"({', '.join(names)})"
