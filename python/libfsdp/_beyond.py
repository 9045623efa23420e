"""The arguments of libfsdp's fully_shard that FSDP2's does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed.tensor import DTensor

from libfsdp._precision import followed_grad_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from libfsdp._mesh import ShardingMesh


@dataclass(frozen=True)
class Float8Blocks:
    """All-gathers send parameters in eight bits per element, with a scale of one byte for each block of elements.

    A block of 32 takes 33 bytes instead of bfloat16's 64. (OCP Microscaling Formats: MXFP8.) The shards keep their dtype.

    Attributes:
        block: the number of elements that share a scale; a multiple of 16.
    """

    block: int = 32


@dataclass(frozen=True)
class Beyond:
    """Options of one call of fully_shard that are libfsdp's own.

    Attributes:
        outer_sharded: whether shards are cut over the outer dimension, too (HFSDP).
        gather_format: returns the format in which a parameter is gathered; None stands for the dtype of the
            computation.
        follow_grad_dtype: whether gradients get the ``grad_dtype`` that users have set.
        keep_gathered_bytes: how many bytes of whole parameters stay from forward into backward; the root's value
            counts.
        report_nan: whether to look for NaN in gradients; the root's value counts.
        main_params_dtype: the dtype of shards, and with them of optimizer state; None: that of the module's parameters.
        main_grads_dtype: the dtype of the shards' gradients; None: that of the shards; "own": that of the module's
            parameters.
        check_initial_values: whether ranks compare their first values, and raise if they differ.
    """

    outer_sharded: bool = False
    gather_format: Callable[[nn.Parameter], Float8Blocks | None] | None = None
    follow_grad_dtype: bool | None = None
    keep_gathered_bytes: int = 0
    report_nan: bool = False
    main_params_dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | Literal["own"] | None = None
    check_initial_values: bool = False

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


def check(beyond: Beyond, ranks: ShardingMesh, placements: str, *, spmd: bool) -> None:
    """Checks that the options are possible on this mesh.

    Raises:
        ValueError: for sharding over an outer dimension that there is not, or with other placements than ZeRO-3's, for a
            negative number of bytes, for dtypes without fractions, and for what only parameters that are cut can have.
    """
    if beyond.outer_sharded and (not ranks.replicates or spmd):
        raise ValueError("outer_placements='optim' shards over the first of two dimensions: give a mesh that has two")
    if beyond.outer_sharded and placements != "optim_grads_params":
        raise ValueError(f"outer_placements='optim' needs placements 'optim_grads_params', not '{placements}'")
    if beyond.keep_gathered_bytes < 0:
        raise ValueError(f"keep_gathered_bytes is {beyond.keep_gathered_bytes}; give 0 (keep none) or more")
    for name in ("main_params_dtype", "main_grads_dtype"):
        dtype = getattr(beyond, name)
        if dtype == "own" and name == "main_grads_dtype":
            continue
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{name} is {dtype}: give a floating-point dtype, or None")
    if placements == "no_shard" and (spmd or beyond.gather_format is not None):
        raise ValueError(
            "placements='no_shard' gathers nothing and cuts nothing: it takes neither a gather_format nor dp_mesh_dims"
        )


def divides_by_all(ranks: ShardingMesh, parameter: nn.Parameter, shard_dim: int) -> bool:
    """True if the parameter, or this rank's piece of it, can be cut evenly over both dimensions of a mesh."""
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return shard_dim == 0 and ranks.replicates and local.size(0) % (ranks.shard_size * ranks.mesh.size(0)) == 0


def check_parameter(beyond: Beyond, parameter: nn.Parameter, name: str, shard_dim: int, ranks: ShardingMesh) -> int:
    """Returns the number of elements of a block in which the parameter is gathered; 0 if it is gathered in its dtype.

    Raises:
        ValueError: if its rows are no whole blocks, or do not divide by all ranks where the outer ones shard, too.
    """
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    if beyond.outer_sharded and not divides_by_all(ranks, parameter, shard_dim):
        pieces = ranks.shard_size * ranks.mesh.size(0)
        raise ValueError(
            f"outer_placements='optim': parameter '{name}' {tuple(local.shape)} must be cut along its first "
            f"dimension, which must divide by all {pieces} ranks; 'optim_if_even' replicates others over the outer dimension"
        )
    form = beyond.gather_format(parameter) if beyond.gather_format is not None else None
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
