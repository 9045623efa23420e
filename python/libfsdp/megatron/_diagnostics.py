"""Diagnostics of a sharded model: the norms of its parameters, and tables of its memory."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from libfsdp._core.model import states_in
from libfsdp._core.sharded_parameter import local_of

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from libfsdp.megatron._parameter_groups import ParameterGroup

logger = logging.getLogger("libfsdp")


@dataclass(frozen=True)
class ParameterNorms:
    """The norms of one parameter, over all ranks.

    Attributes:
        parameter: the 2-norm of the weights that the optimizer updates.
        gradient: the 2-norm of their gradient; None if no rank has one.
    """

    parameter: float
    gradient: float | None


@torch.no_grad()
def per_parameter_norms(module: nn.Module) -> dict[str, ParameterNorms]:
    """Returns the 2-norms of all parameters and their gradients, by name. Collective: one all-reduce for each dimension of each mesh.

    Sums are computed in fp64. Gradients that are not reduced yet are not counted.

    Args:
        module: a module that is sharded, in whole or in part.
    """
    parameters = dict(module.named_parameters())
    sums: dict[str, torch.Tensor] = {}  # the sums of squares of values and of the gradient, and whether there is one
    together: dict[tuple[DeviceMesh, tuple[int, ...]], list[str]] = {}
    for name, p in parameters.items():
        own = [local_of(p).double().square().sum()]
        own += (
            [torch.zeros_like(own[0])] * 2
            if p.grad is None
            else [
                local_of(p.grad).double().square().sum(),
                torch.ones_like(own[0]),
            ]
        )
        sums[name] = torch.stack(own)
        if isinstance(p, DTensor):
            cut = tuple(dim for dim, placement in enumerate(p.placements) if not isinstance(placement, Replicate))
            together.setdefault((p.device_mesh, cut), []).append(name)
    for (mesh, cut), names in together.items():
        summed = torch.stack([sums[name] for name in names])
        for dim in cut:
            dist.all_reduce(summed, group=mesh.get_group(dim))
        sums.update(zip(names, summed, strict=True))
    found = {}
    for name in parameters:
        value, gradient, has_gradient = sums[name].tolist()
        found[name] = ParameterNorms(math.sqrt(value), math.sqrt(gradient) if has_gradient else None)
    return found


def log_norms(norms: dict[str, ParameterNorms]) -> None:
    """Writes norms to the logger "libfsdp", one line for each parameter, on the first rank."""
    if dist.get_rank() != 0:
        return
    for name, one in norms.items():
        logger.info(
            "%s: parameter %.6e, gradient %s",
            name,
            one.parameter,
            "none" if one.gradient is None else f"{one.gradient:.6e}",
        )


def group_table(groups: dict[str, tuple[ParameterGroup, ...]]) -> str:
    """Lines of text, one for each parameter group: dtype, parameters, elements, padding, bytes on this rank.

    Args:
        groups: the groups of the modules, by name.
    """
    lines = ["module | dtype | trained | parameters | elements | padding | MiB here"]
    for name, of_module in groups.items():
        for group in of_module:
            layout = group.layout
            elements = sum(shape.numel() for shape in layout.tensor_shapes)
            lines.append(
                f"{name or '(root)'} | {str(group.dtype).removeprefix('torch.')} | {'yes' if group.requires_grad else 'no'} | "
                f"{len(layout.tensor_shapes)} | {elements:,} | {layout.size / max(elements, 1) - 1:.1%} | "
                f"{group.main_weight.nbytes / 2**20:.2f}"
            )
    return "\n".join(lines)


def require_disjoint_shards(module: nn.Module) -> None:
    """Checks that no two shards share memory.

    Raises:
        RuntimeError: if two do, with their names.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    spans = []
    for _, state, _ in states_in(module):
        for p in state.parameters:
            local = p.local
            if local.numel() > 0 and not local.is_meta:
                spans.append((local.data_ptr(), local.data_ptr() + local.nbytes, names.get(id(p.sharded), p.name)))
    spans.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise RuntimeError(f"rank {dist.get_rank()}: shards of parameters '{name}' and '{other}' share memory")
