"""The options of one call of fully_shard, which all units that it makes share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from libfsdp import _C
from libfsdp._core.arguments import as_bytes, check_flags, check_functions, check_policies, refuse
from libfsdp._core.memory_budget import check_budget
from libfsdp._core.precision import MixedPrecisionPolicy, followed_grad_dtype, follows
from libfsdp._core.sharded_parameter import local_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

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

    def engine_format(self) -> _C.GatherFormat:
        """Returns the format as the engine has it."""
        return _C.float8_blocks(self.block)


@dataclass(frozen=True)
class Int4Differences:
    """All-gathers send, in four bits per element, how parameters differ from those of the last gather. (SDP4Bit.)

    A block of 128 takes 66 bytes instead of bfloat16's 256. The shards keep their dtype and their values. Rounding errors do not
    add up, because each difference is taken to what all ranks really have. Parameters have to stay unsharded for it: placements
    "optim_grads" or "optim".

    The first gather sends the parameters themselves, and so does the first one after shards were written by anything else than
    an optimizer's step, such as a load.

    Attributes:
        block: the number of elements that share a scale; a multiple of 16.
        hadamard: whether each block is sent as its Hadamard transform, which spreads outliers over the block. The block is then
            a power of two from 16 to 256.
    """

    block: int = 128
    hadamard: bool = False

    def engine_format(self) -> _C.GatherFormat:
        """Returns the format as the engine has it."""
        return _C.int4_differences(self.block, self.hadamard)


GatherFormat: TypeAlias = Float8Blocks | Int4Differences


@dataclass(frozen=True)
class GradCommFormat:
    """Messages send gradients as integers of 8 or 4 bits, with a scale in fp32 for each block of elements.

    What ranks of one host read from each other's memory, and what a rank adds to its own shard, is not rounded. With NCCL on
    several hosts, what ranks of one host send each other is not rounded either. A scale is the block's largest magnitude
    divided by 127 or 7. Sums run in fp32. A block with NaN or infinity becomes NaN. (ZeRO++; SDP4Bit.)

    Attributes:
        bits: the number of bits of each element: 8 or 4.
        block: the number of elements that share a scale; a multiple of 32. A block of 128 takes 132 or 68 bytes instead of fp32's 512.
        hadamard: whether a normalized Walsh-Hadamard transform is applied to each block before it is rounded, and again
            when it has arrived. It spreads single large values over the block, which must be a power of two of elements.
        stochastic_rounding: whether values are rounded up or down at random, so that the expected value is exact. It is
            the same on every run with the same ``seed``.
        seed: the seed of stochastic rounding.
        error_feedback: whether each rank keeps, in fp32, what rounding lost of the gradients that it has sent, and adds it to the
            next ones. It takes 4 bytes for each element that is sent. Checkpoints do not contain it.

    Raises:
        ValueError: for bits and blocks that there are not.
        TypeError: if a value is of another type.
    """

    bits: int = 8
    block: int = 128
    hadamard: bool = False
    stochastic_rounding: bool = False
    seed: int = 0
    error_feedback: bool = False

    def __post_init__(self) -> None:
        self.engine_format()

    def engine_format(self) -> _C.GradCommFormat:
        """Returns the format as the engine has it."""
        check_flags(
            hadamard=self.hadamard, stochastic_rounding=self.stochastic_rounding, error_feedback=self.error_feedback
        )
        return _C.GradCommFormat(**asdict(self))


@dataclass(frozen=True)
class ShardingOptions:
    """How the parameters of one call of fully_shard are sharded, gathered and reduced. Fields are documented as its arguments.

    Attributes:
        reshard_after_forward: as it was given. (A state may have another setting later.)
        spmd: the mesh of all ranks, if parameters are DTensors on it already.
    """

    reshard_after_forward: bool | int | None = None
    mp_policy: TorchPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    placements: str = "optim_grads_params"
    outer_placements: str = "no_shard"
    gather_format: Callable[[nn.Parameter], GatherFormat | None] | None = None
    grad_comm_format: GradCommFormat | None = None
    keep_gathered_bytes: int = 0
    memory_budget: MemoryBudget | None = None
    report_nan_in_param_grad: bool = False
    follow_grad_dtype: bool | None = None
    main_params_dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | Literal["own"] | None = None
    check_initial_values: bool = False
    spmd: SpmdMesh | None = None

    @property
    def outer_sharded(self) -> bool:
        """True if shards are cut over the outer dimension, too (HFSDP)."""
        return self.outer_placements != "no_shard"

    @property
    def is_replicated(self) -> bool:
        """True if each rank has all of each parameter (ZeRO-0)."""
        return self.placements == "no_shard"

    @property
    def after_forward(self) -> _C.AfterForward:
        """What happens to unsharded parameters after forward. (The root of a model may keep them until backward.)"""
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
        """True if gradients without a ``reduce_dtype`` are sent in the dtype of their parameter, and not in that of the computation.

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


def make_options(**arguments: Any) -> ShardingOptions:
    """Returns the options for arguments of fully_shard.

    Raises:
        TypeError: if an argument is of another type; it is named.
        ValueError: for placements that are not known, and sizes that are none.
    """
    given = ShardingOptions(**arguments)
    mp_policy, offload_policy = check_policies(given.mp_policy, given.offload_policy)
    check_functions(gather_format=given.gather_format)
    if not (given.grad_comm_format is None or isinstance(given.grad_comm_format, GradCommFormat)):
        refuse("grad_comm_format", given.grad_comm_format, "a GradCommFormat, or None")
    check_flags(
        report_nan_in_param_grad=given.report_nan_in_param_grad, follow_grad_dtype=given.follow_grad_dtype or False
    )
    for name, known in (("placements", _PLACEMENTS), ("outer_placements", _OUTER_PLACEMENTS)):
        if getattr(given, name) not in known:
            raise ValueError(f"{name} '{getattr(given, name)}' are none of {', '.join(known)}")
    return replace(
        given,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        keep_gathered_bytes=as_bytes("keep_gathered_bytes", given.keep_gathered_bytes),
        memory_budget=check_budget(given.memory_budget),
    )


def check_options(options: ShardingOptions, ranks: ShardingMesh) -> None:
    """Checks that the options are possible on this mesh.

    Raises:
        ValueError: for sharding over an outer dimension that there is not, or with other placements than ZeRO-3's, for a number of
            neighbours that does not divide the ranks, for dtypes without fractions, and for what only parameters that are cut can have.
    """
    check_reshard_after_forward(options.reshard_after_forward, ranks)
    placements, spmd = options.placements, options.spmd is not None
    if options.outer_sharded and (not ranks.replicates or spmd):
        raise ValueError("outer_placements='optim' shards over the first of two dimensions: give a mesh that has two")
    if options.outer_sharded and placements != "optim_grads_params":
        raise ValueError(f"outer_placements='optim' needs placements 'optim_grads_params', not '{placements}'")
    if options.memory_budget is not None and options.keep_gathered_bytes:
        raise ValueError(
            "memory_budget chooses what stays gathered, and "
            f"keep_gathered_bytes={options.keep_gathered_bytes} sets it by hand; give one of them"
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
    ranks_of_both = ranks.shard_size * ranks.mesh.size(0)
    return shard_dim == 0 and ranks.replicates and local_of(parameter).size(0) % ranks_of_both == 0


def gather_format_of(
    options: ShardingOptions, parameter: nn.Parameter, name: str, shard_dim: int, ranks: ShardingMesh
) -> _C.GatherFormat | None:
    """Returns the format in which the parameter is gathered; None if it is gathered in its dtype.

    Raises:
        Error: for a block that can't be transformed.
        ValueError: if its rows are not complete blocks, or, if the outer ranks shard as well, do not divide by all
            ranks.
    """
    local = local_of(parameter)
    if options.outer_sharded and not divides_by_all(ranks, parameter, shard_dim):
        pieces = ranks.shard_size * ranks.mesh.size(0)
        raise ValueError(
            f"outer_placements='optim': parameter '{name}' {tuple(local.shape)} must be cut along its first "
            f"dimension, which must divide by all {pieces} ranks; 'optim_if_even' replicates others over the outer dimension"
        )
    form = options.gather_format(parameter) if options.gather_format is not None else None
    if form is None:
        return None
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
    return form.engine_format()
