"""fully_shard of single modules, with placements of parameters, gradients and optimizer state."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libfsdp._comm.mesh import device_of
from libfsdp._core import buffer_memory
from libfsdp._core.shard import shard
from libfsdp._core.sharded_parameter import identity_of
from libfsdp.megatron._mixin import give_memory, own_parameters, require_quiet
from libfsdp.megatron._parameter_groups import groups_of
from libfsdp.megatron._policy import MixedPrecisionPolicy
from libfsdp.megatron.experimental.module import FsdpContext, FsdpModule
from libfsdp.megatron.experimental.placement import strategy_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["Placements", "fully_shard", "fully_shard_context", "microbatch"]

_context: ContextVar[FsdpContext | None] = ContextVar("libfsdp_megatron_context", default=None)


@dataclass(frozen=True)
class Placements:
    """What is sharded, along each data-parallel dimension of a mesh.

    Peer: ``megatron_fsdp.experimental.Placements``.

    Attributes:
        dp_axes: the dimensions, by number or name, in the mesh's order; one or two.
        parameter: the placements of parameters in computation: ``Shard(0)`` or ``Replicate()`` along each dimension.
        gradient: the placements of gradients between microbatches: ``Shard(0)``, or ``Partial("avg")`` to reduce after the last one.
        optimizer: the placements of the weights that the optimizer updates, and of their state.

    Raises:
        ValueError: if there are not as many placements as dimensions.
    """

    dp_axes: Sequence[int | str]
    parameter: Sequence[Placement]
    gradient: Sequence[Placement]
    optimizer: Sequence[Placement]

    def __post_init__(self) -> None:
        for name in ("parameter", "gradient", "optimizer"):
            given = len(getattr(self, name))
            if given != len(self.dp_axes):
                raise ValueError(f"Expected {len(self.dp_axes)} {name} placements, as there are dp_axes, got {given}.")


@contextmanager
def fully_shard_context(
    device: torch.device | None = None,
    *,
    use_symmetric_memory: bool = False,
    unify_communication_stream: bool = False,
) -> Iterator[FsdpContext]:
    """A context for modules that run together. They are sharded within it, and run only after it has been left.

    Peer: ``megatron_fsdp.experimental.fully_shard_context``.

    Args:
        device: the device of the meshes; None stands for that of the first mesh.
        use_symmetric_memory: whether gathers go into torch's symmetric memory, as after ``set_symm_mem_for_comm``.
        unify_communication_stream: has no effect: gathers and reductions of the same ranks always have one stream, until
            ``set_separate_reduce_scatter_group`` gives them two.

    Raises:
        RuntimeError: within another one.
    """
    if _context.get() is not None:
        raise RuntimeError("fully_shard_context does not support nesting: leave the one around it first")
    context = FsdpContext(device, use_symmetric_memory=use_symmetric_memory)
    token = _context.set(context)
    try:
        yield context
        context.finalize()
    finally:
        _context.reset(token)


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    grad_divisor: int = 1,
) -> None:
    """Shards a module's parameters, except for those of modules below it that were sharded before. In place.

    Peer: ``megatron_fsdp.experimental.fully_shard``. It is a call of libfsdp.fully_shard that frees parameters after forward.
    Parameters on the meta device get memory without particular values; initialise them, or load a checkpoint.

    Args:
        module: a module within a ``fully_shard_context``.
        mesh: a mesh with the data-parallel dimensions, and possibly others over which parameters are DTensors already.
        placements: what is sharded along each of them.
        mixed_precision_policy: dtypes; by default the weights that are trained are fp32.
        grad_divisor: a number by which gradients are divided in addition. For experts, whose gradients are sums over the tokens of this
            many ranks.

    Raises:
        ValueError: for a module that is sharded already, one with modules of another context or parameters of another module of
            this one, ``dp_axes`` that the mesh does not have in that order, and a divisor that is not positive.
        NotImplementedError: for placements that are none of ZeRO-0 to 3, HSDP and HFSDP.
        RuntimeError: outside of a ``fully_shard_context``, and with ``use_symmetric_memory`` where the mesh is not NCCL's.
    """
    if isinstance(module, FsdpModule):
        raise ValueError(f"{type(module).__name__} is already managed by FSDP: call fully_shard once for each module")
    context = _context.get()
    if context is None:
        raise RuntimeError("fully_shard must run inside fully_shard_context, which modules that run together share")
    for name, inner in module.named_modules():
        if isinstance(inner, FsdpModule) and inner.context is not context:
            raise ValueError(f"'{name}' was sharded in another fully_shard_context: shard all of a model in one")
    if grad_divisor <= 0:
        raise ValueError(f"grad_divisor must be positive, got {grad_divisor}.")
    ranks = _data_parallel_mesh(mesh, placements.dp_axes)
    strategy = strategy_of(placements.parameter, placements.gradient, placements.optimizer)
    device = device_of(ranks)
    if context.device is None:
        context.device = device
    if context.device.type != device.type:
        raise ValueError(
            f"fully_shard_context is for {context.device}, and the mesh for {device}: give both the same device"
        )
    parameters = own_parameters(module)
    names = {name: identity_of(parameter) for name, parameter in parameters.items()}
    owned = [name for name, identity in names.items() if identity in context.identities]
    if owned:
        raise ValueError(f"Parameters {owned} are already owned by another module: shard tied parameters by one call")
    require_quiet(module, "fully_shard")
    if context.use_symmetric_memory:
        buffer_memory.require_symmetric_memory(ranks, "use_symmetric_memory")
    policy = mixed_precision_policy or MixedPrecisionPolicy()
    policy.warn_of_low_gradients(parameters.values())
    options = policy.sharding_options(
        reshard_after_forward=True, placements=strategy.placements, outer_placements=strategy.outer_placements
    )
    shard(module, ranks, options, FsdpModule)
    assert isinstance(module, FsdpModule)
    give_memory(module)
    for state in module._states(recurse=False):
        if state.unit is not None and grad_divisor != 1:
            state.unit.gradient_divide_factor = float(grad_divisor * ranks.size())
        if context.use_symmetric_memory:
            buffer_memory.use_symmetric_memory(state, "NCCL")
    context.identities.update(names.values())
    module._join(context, strategy, groups_of(module, names))


@contextmanager
def microbatch(context: FsdpContext, is_last: bool) -> Iterator[None]:
    """One of several microbatches, forward and backward.

    Peer: ``megatron_fsdp.experimental.microbatch``. Gradients that are ``Partial`` between microbatches are reduced after the
    last one, and ``parameter.grad`` is there then; those that are ``Shard(0)`` are reduced, and added to it, by each.

    Args:
        context: the context of the modules.
        is_last: reduce the gradients that this and earlier microbatches have left.

    Raises:
        RuntimeError: while the context is open.
    """
    context.ensure_finalized()
    before = context.is_last_microbatch
    context.is_last_microbatch = is_last
    try:
        yield
    finally:
        context.is_last_microbatch = before


def _data_parallel_mesh(mesh: DeviceMesh, dp_axes: Sequence[int | str]) -> DeviceMesh:
    """Returns the given dimensions of a mesh as a mesh.

    Raises:
        ValueError: if the mesh does not have these dimensions in this order.
    """
    names = mesh.mesh_dim_names
    axes = []
    for axis in dp_axes:
        if isinstance(axis, str):
            if names is None or axis not in names:
                raise ValueError(f"Mesh axis {axis!r} is not present in mesh dim names {names}.")
            axes.append(names.index(axis))
        elif not -mesh.ndim <= axis < mesh.ndim:
            raise ValueError(f"Mesh axis {axis} is out of bounds for mesh ndim {mesh.ndim}.")
        else:
            axes.append(axis % mesh.ndim)
    if axes != sorted(set(axes)):
        raise ValueError(f"Data-parallel axes must be distinct and in mesh-axis order, got {list(dp_axes)!r}.")
    if len(axes) == mesh.ndim:
        return mesh
    if names is None:
        raise ValueError(
            f"dp_axes {list(dp_axes)!r} are some of the mesh's {mesh.ndim} dimensions: name these (mesh_dim_names)"
        )
    return mesh[tuple(names[axis] for axis in axes)]
