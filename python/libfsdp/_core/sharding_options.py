"""The options of one call of fully_shard, which all units that it makes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from libfsdp import _C
from libfsdp._core.precision import followed_grad_dtype, follows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    from libfsdp._comm.mesh import ShardingMesh
    from libfsdp._core.memory_budget import MemoryBudget
    from libfsdp._core.spmd import SpmdMesh

_PLACEMENTS = ("optim_grads_params", "optim_grads", "optim", "no_shard")
_OUTER_PLACEMENTS = ("no_shard", "optim", "optim_if_even")


@dataclass(frozen=True)
class Float8Blocks:
    """All-gathers send parameters in eight bits per element, with a scale of one byte for each block of elements.

    A block of 32 takes 33 bytes instead of bfloat16's 64. (OCP Microscaling Formats: MXFP8.) The shards keep their dtype.

    Attributes:
        block: the number of elements that share a scale; a multiple of 16.
    """

    block: int = 32


@dataclass(frozen=True)
class ShardingOptions:
    """How the parameters of one call of fully_shard are sharded, gathered and reduced.

    Attributes:
        reshard_after_forward: as the call was given it. (A state may have another setting later.)
        mp_policy: dtypes of computation and of reductions.
        offload_policy: whether shards, gradients and optimizer state lie in host memory.
        placements: what is sharded.
        outer_sharded: whether shards are cut over the outer dimension, too (HFSDP).
        spmd: the mesh of all ranks, if parameters are DTensors on it already.
        gather_format: returns the format in which a parameter is gathered; None stands for the dtype of the
            computation.
        follow_grad_dtype: whether gradients get the ``grad_dtype`` that users have set.
        keep_gathered_bytes: how many bytes of whole parameters stay from forward into backward; the root's value
            counts.
        memory_budget: how much memory of its device each rank may use; the root's value counts.
        report_nan: whether to look for NaN in gradients; the root's value counts.
        main_params_dtype: the dtype of shards, and with them of optimizer state; None: that of the module's parameters.
        main_grads_dtype: the dtype of the shards' gradients; None: that of the shards; "own": that of the module's
            parameters.
        check_initial_values: whether ranks compare their first values, and raise if they differ.
    """

    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    placements: str
    outer_sharded: bool
    spmd: SpmdMesh | None
    gather_format: Callable[[nn.Parameter], Float8Blocks | None] | None
    follow_grad_dtype: bool | None
    keep_gathered_bytes: int
    memory_budget: MemoryBudget | None
    report_nan: bool
    main_params_dtype: torch.dtype | None
    main_grads_dtype: torch.dtype | Literal["own"] | None
    check_initial_values: bool

    @property
    def is_replicated(self) -> bool:
        """True if each rank has all of each parameter (ZeRO-0)."""
        return self.placements == "no_shard"

    @property
    def after_forward(self) -> _C.AfterForward:
        """What happens to whole parameters after forward. (The root of a model may keep them until backward.)"""
        given = self.reshard_after_forward
        reshards = given if isinstance(given, bool) else given != 1
        return _C.AfterForward.RESHARD if reshards else _C.AfterForward.ACROSS_FORWARDS

    def post_forward_size(self, ranks: int) -> int:
        """Returns how many of these ranks have a copy of the parameters between them after forward; 0 if no copy is made."""
        given = self.reshard_after_forward
        if self.is_replicated or given is None or isinstance(given, bool):
            return 0
        return given if 1 < given < ranks else 0

    @property
    def offloads(self) -> bool:
        """True if shards, gradients and optimizer state lie in host memory."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    @property
    def data_parallel(self) -> frozenset[int]:
        """The data-parallel dimensions of tensor-parallel gradients' mesh, over which the engine reduces."""
        return frozenset() if self.spmd is None else self.spmd.data_parallel

    @property
    def sends_gradients_in_own_dtype(self) -> bool:
        """True if gradients are sent in the dtype of their parameter, if no ``reduce_dtype`` says otherwise, and not in the computation's.

        FSDP2 does so from torch 2.15 on. It has no dtype for main parameters, which may be wider than is worth sending.
        """
        if self.main_grads_dtype is not None:
            return True
        return self.main_params_dtype is None and follows(self.follow_grad_dtype)

    def main_dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the dtype of the parameter's shards. Frozen parameters keep their own, because no optimizer updates them."""
        if self.main_params_dtype is None or not parameter.requires_grad or not parameter.is_floating_point():
            return parameter.dtype
        return self.main_params_dtype

    def grad_dtype_of(self, parameter: nn.Parameter) -> torch.dtype | None:
        """Returns the dtype of the gradient that the parameter's shards get; None stands for that of the shards."""
        if self.main_grads_dtype is None or not parameter.is_floating_point():
            return followed_grad_dtype(parameter, self.follow_grad_dtype)
        dtype = parameter.dtype if self.main_grads_dtype == "own" else self.main_grads_dtype
        return None if dtype == self.main_dtype_of(parameter) else dtype


def check_placements(placements: str, outer_placements: str) -> None:
    """Raises ValueError unless both are known names."""
    if placements not in _PLACEMENTS:
        raise ValueError(f"placements '{placements}' are none of {', '.join(_PLACEMENTS)}")
    if outer_placements not in _OUTER_PLACEMENTS:
        raise ValueError(f"outer_placements '{outer_placements}' are none of {', '.join(_OUTER_PLACEMENTS)}")


def check_options(options: ShardingOptions, ranks: ShardingMesh) -> None:
    """Checks that the options are possible on this mesh.

    Raises:
        ValueError: for sharding over an outer dimension that there is not, or with other placements than ZeRO-3's, for a
            negative number of bytes, for dtypes without fractions, and for what only parameters that are cut can have.
    """
    placements, spmd = options.placements, options.spmd is not None
    if options.outer_sharded and (not ranks.replicates or spmd):
        raise ValueError("outer_placements='optim' shards over the first of two dimensions: give a mesh that has two")
    if options.outer_sharded and placements != "optim_grads_params":
        raise ValueError(f"outer_placements='optim' needs placements 'optim_grads_params', not '{placements}'")
    if options.keep_gathered_bytes < 0:
        raise ValueError(f"keep_gathered_bytes is {options.keep_gathered_bytes}; give 0 (keep none) or more")
    if options.memory_budget is not None and options.keep_gathered_bytes:
        raise ValueError(
            f"memory_budget chooses what stays gathered, and keep_gathered_bytes={options.keep_gathered_bytes} says it; give one of them"
        )
    for name in ("main_params_dtype", "main_grads_dtype"):
        dtype = getattr(options, name)
        if dtype == "own" and name == "main_grads_dtype":
            continue
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{name} is {dtype}: give a floating-point dtype, or None")
    if placements == "no_shard" and (spmd or options.gather_format is not None):
        raise ValueError(
            "placements='no_shard' gathers nothing and cuts nothing: it takes neither a gather_format nor dp_mesh_dims"
        )


def check_reshard_after_forward(value: bool | int | None, ranks: ShardingMesh) -> None:
    """Raises ValueError unless the value is a flag, or a number of neighbours that divides the ranks."""
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int):
        raise ValueError(
            f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {value}"
        )
    if value < 1 or value > ranks.shard_size or ranks.shard_size % value != 0:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {ranks.shard_size}, not {value}"
        )


def divides_by_all(ranks: ShardingMesh, parameter: nn.Parameter, shard_dim: int) -> bool:
    """True if the parameter, or this rank's piece of it, can be cut evenly over both dimensions of a mesh."""
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return shard_dim == 0 and ranks.replicates and local.size(0) % (ranks.shard_size * ranks.mesh.size(0)) == 0


def float8_block_of(
    options: ShardingOptions, parameter: nn.Parameter, name: str, shard_dim: int, ranks: ShardingMesh
) -> int:
    """Returns the number of elements of a block in which the parameter is gathered; 0 if it is gathered in its dtype.

    Raises:
        ValueError: if its rows are no whole blocks, or do not divide by all ranks where the outer ones shard, too.
    """
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    if options.outer_sharded and not divides_by_all(ranks, parameter, shard_dim):
        pieces = ranks.shard_size * ranks.mesh.size(0)
        raise ValueError(
            f"outer_placements='optim': parameter '{name}' {tuple(local.shape)} must be cut along its first "
            f"dimension, which must divide by all {pieces} ranks; 'optim_if_even' replicates others over the outer dimension"
        )
    form = options.gather_format(parameter) if options.gather_format is not None else None
    if form is None:
        return 0
    row = local.numel() // max(local.size(0), 1)
    if (
        form.block <= 0
        or form.block % 16 != 0
        or row % form.block != 0
        or shard_dim != 0
        or not local.is_floating_point()
    ):
        raise ValueError(
            f"gather_format: parameter '{name}' {tuple(local.shape)} must be of a floating-point dtype, cut along its first "
            f"dimension, with rows of whole blocks of {form.block} elements (a multiple of 16)"
        )
    return form.block
