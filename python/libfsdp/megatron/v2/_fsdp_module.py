"""The class that sharded modules get in addition to their own, with diagnostics of parameters, gradients and memory."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from libfsdp import _C
from libfsdp._core.sharded_parameter import local_of
from libfsdp._fsdp2.fsdp_module import FSDPModule as _Base
from libfsdp.megatron._mixin import refuse_deepcopy

if TYPE_CHECKING:
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


class FSDPModule(_Base):
    """The class that fully_shard gives a module in addition to its own. It has the methods of libfsdp.FSDPModule.

    Peer: ``megatron_fsdp.v2.FSDPModule``.
    """

    _class_prefix = "FSDPModule"
    _orig_cls_mro_index = 3
    __deepcopy__ = refuse_deepcopy

    _fsdp_param_groups: tuple[ParameterGroup, ...]

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """Its parameters, by dtype and by whether they are trained. Parameters of sharded modules below are left out."""
        return self._fsdp_param_groups

    def stop_communication(self) -> None:
        """Waits for reductions that are under way, and delivers their gradients. Call it on the root, between backwards.

        Raises:
            RuntimeError: inside of a backward.
        """
        if _C.inside_backward():
            raise RuntimeError("stop_communication cannot be called inside of a backward")
        for state in self._states(recurse=False):
            if state.model is not None:
                state.model.engine.finish_gradient_sync()
                state.model.deliver_gradients()

    @torch.no_grad()
    def compute_per_param_norms(self) -> dict[str, ParameterNorms]:
        """Returns the 2-norms of all parameters and gradients in and below it, by name, over all ranks.

        Collective: one all-reduce for each dimension of each mesh. Sums are computed in fp64. Gradients that are not reduced yet are not
        counted.
        """
        sums: dict[str, torch.Tensor] = {}  # the sums of squares of values and of the gradient, and whether there is one
        together: dict[tuple[DeviceMesh, tuple[int, ...]], list[str]] = {}
        for name, p in cast("Any", self).named_parameters():
            value = local_of(p).double().square().sum()
            of_gradient = [torch.zeros_like(value)] * 2
            if p.grad is not None:
                of_gradient = [local_of(p.grad).double().square().sum(), torch.ones_like(value)]
            sums[name] = torch.stack([value, *of_gradient])
            if isinstance(p, DTensor):
                cut = tuple(dim for dim, placement in enumerate(p.placements) if not isinstance(placement, Replicate))
                together.setdefault((p.device_mesh, cut), []).append(name)
        for (mesh, cut), names in together.items():
            summed = torch.stack([sums[name] for name in names])
            for dim in cut:
                dist.all_reduce(summed, group=mesh.get_group(dim))
            sums.update(zip(names, summed, strict=True))
        found = {}
        for name, of_it in sums.items():
            squares, of_gradients, has_gradient = of_it.tolist()
            found[name] = ParameterNorms(math.sqrt(squares), math.sqrt(of_gradients) if has_gradient else None)
        return found

    def log_per_param_norms(self) -> None:
        """Writes these norms to the logger "libfsdp", one line for each parameter, on the first rank. Collective."""
        norms = self.compute_per_param_norms()
        for name, one in norms.items() if dist.get_rank() == 0 else ():
            gradient = "none" if one.gradient is None else f"{one.gradient:.6e}"
            logger.info("%s: parameter %.6e, gradient %s", name, one.parameter, gradient)

    def log_parameter_groups(self) -> str:
        """Writes a table of all parameter groups in and below it to the logger "libfsdp", and returns it."""
        lines = ["module | dtype | trained | parameters | elements | padding | MiB here"]
        for name, module in cast("Any", self).named_modules():
            for group in module._fsdp_param_groups if isinstance(module, FSDPModule) else ():
                layout = group.layout
                elements = sum(shape.numel() for shape in layout.tensor_shapes)
                lines.append(
                    f"{name or '(root)'} | {str(group.dtype).removeprefix('torch.')} | {'yes' if group.requires_grad else 'no'} | "
                    f"{len(layout.tensor_shapes)} | {elements:,} | {layout.size / max(elements, 1) - 1:.1%} | "
                    f"{group.main_weight.nbytes / 2**20:.2f}"
                )
        table = "\n".join(lines)
        logger.info("%s", table)
        return table

    def check_all_fsdp_buffers(self) -> None:
        """Checks that no two shards in and below it share memory.

        Raises:
            RuntimeError: if two do, with their names.
        """
        names = {id(p): name for name, p in cast("Any", self).named_parameters()}
        spans = []
        for p in (p for state in self._states(recurse=True) for p in state.parameters):
            begin = p.local.data_ptr()
            if p.local.numel() > 0 and not p.local.is_meta:
                spans.append((begin, begin + p.local.nbytes, names.get(id(p.sharded), p.name)))
        spans.sort()
        for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
            if begin < end:
                raise RuntimeError(f"rank {dist.get_rank()}: shards of parameters '{name}' and '{other}' share memory")
