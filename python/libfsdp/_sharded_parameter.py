"""One parameter in its two forms: a DTensor of this rank's rows between steps, a whole tensor while modules compute.

Without sharding (ZeRO-0) the first form is an ordinary tensor, and both are whole.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from libfsdp._compile import untraced
from libfsdp._spmd import spmd_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.placement_types import Placement

    from libfsdp import _C
    from libfsdp._mesh import ShardingMesh
    from libfsdp._quantized_form import QuantizedForm
    from libfsdp._spmd import SpmdMesh

_identities = itertools.count()

# Torch's own, what gradients lie in, and how a tensor is gathered: they belong to one form.
_OF_ONE_FORM = frozenset({"_is_param", "main_grad", "decoupled_grad", "fsdp_pre_all_gather", "fsdp_post_all_gather"})


@dataclass
class Place:
    """Where a module has a parameter."""

    module: nn.Module
    name: str


@dataclass
class ShardedParameter:
    """A parameter of a unit.

    Attributes:
        name: in the module that fully_shard was called on; in the root once that is known.
        places: all modules that have it (tied parameters have several).
        shape: of the whole parameter on this rank (a tensor-parallel one is a piece already).
        shard_dim: the dimension that is cut.
        spec: of the sharded DTensor; None: an ordinary tensor, as each rank has all of it.
        whole_spec: of the whole DTensor, if the parameter is tensor-parallel.
        identity: equal for parameters that were one object before they were sharded.
        sharded: the parameter that the modules have between steps.
        keeps_dtype: it is computed with in its own dtype, whatever the policy says of others.
        float8_block: it travels in eight bits, so many elements with one scale; 0: as it is.
        computes_in: the dtype that it had in the module, where its shards have another one (main_params_dtype).
        grad_dtype: of its gradient, where that is not its own.
        kept: the parameter that modules have between forward and backward, where neighbours keep a copy.
        extended: its tensor says itself how it is gathered, or it is quantized.
        quantized: how its whole form is made, where that has fewer bits than what is gathered.
        trainable: the unit has room for its gradient.
        before: the parameter that the module had before fully_shard; None when nobody has it any more.
        attributes: that front ends have set on it, and both forms are to have. (Those that the program has set: see attributes_of.)
        whole: the parameter that they have while they compute; of an extended one, when it has been gathered once.
    """

    name: str
    places: list[Place]
    shape: torch.Size
    dtype: torch.dtype
    shard_dim: int
    spec: DTensorSpec | None
    whole_spec: DTensorSpec | None
    identity: int
    sharded: nn.Parameter = field(repr=False)
    keeps_dtype: bool = False
    float8_block: int = 0
    computes_in: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    extended: bool = False
    quantized: QuantizedForm | None = field(default=None, repr=False)
    before: Callable[[], torch.Tensor | None] = field(default=lambda: None, repr=False)
    trainable: bool = True
    attributes: dict[str, Any] = field(default_factory=dict, repr=False)
    whole: nn.Parameter | None = field(default=None, repr=False)
    kept: nn.Parameter | None = field(default=None, repr=False)

    def place(self, local: torch.Tensor) -> torch.Tensor:
        """What modules have between steps, over `local`: a DTensor of this parameter's placements, if it has any."""
        return local if self.spec is None else DTensor(local, self.spec, requires_grad=False)

    def has_form_of(self, value: torch.Tensor | None) -> bool:
        """The tensor could be the parameter's shard."""
        return value is not None and isinstance(value, DTensor) == (self.spec is not None)

    def gradient_wrap(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Makes of this rank's part of the gradient what the parameter gets; None: that part as it is."""
        if self.spec is None:
            return None
        spec = self.spec
        if self.grad_dtype is not None and spec.tensor_meta is not None:
            spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=self.grad_dtype))
        # Without DTensor's __init__, which does nothing and costs more than the rest: each step makes one for each parameter.
        return functools.partial(DTensor.__new__, DTensor, spec=spec, requires_grad=False)

    def compute_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """In which it is gathered and computed with."""
        own = self.computes_in or self.dtype
        return own if not own.is_floating_point or self.keeps_dtype else policy.param_dtype or own

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        return local_of(self.sharded)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What the program has set on a parameter in one form, for the other forms to have it, too.

    What a class keeps its values in is no such thing: it is there, too, in what the class makes of the tensor.
    """
    of_class = () if type(tensor) in (torch.Tensor, nn.Parameter, DTensor) else vars(tensor.detach())
    return {
        name: value
        for name, value in vars(tensor).items()
        if name not in _OF_ONE_FORM and name not in of_class and not name.startswith("_libfsdp")
    }


def carry_attributes(parameter: ShardedParameter, value: nn.Parameter) -> None:
    """What becomes the shard has what the program has set on the one before. (swap_tensors takes it away; the whole form still has it.)"""
    if parameter.quantized is not None:
        return  # Values of higher precision are among it.
    forms = (parameter.whole, parameter.sharded, value)
    vars(value).update({k: v for form in forms if form is not None for k, v in attributes_of(form).items()})


def identity_of(parameter: nn.Parameter) -> int:
    """A number that stays with the object, also where only some of its owners are sharded."""
    if not hasattr(parameter, "_libfsdp_identity"):
        parameter._libfsdp_identity = next(_identities)
    return parameter._libfsdp_identity


def is_sharded(parameter: torch.Tensor) -> bool:
    """It is, or was before that, a parameter of a unit."""
    return hasattr(parameter, "_libfsdp_identity")


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Writes to one are seen in the other. Addresses do not tell: tensors without elements have none."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def rows_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Which rows `rank` owns, as torch.chunk cuts: the first one and how many."""
    per_rank = -(-size // ranks)
    begin = min(size, rank * per_rank)
    return begin, min(size, begin + per_rank) - begin


def sharded_spec(
    parameter: nn.Parameter,
    mesh: ShardingMesh,
    spmd: SpmdMesh | None,
    shard_dim: int,
    *,
    replicated: bool,
    outer_sharded: bool,
) -> tuple[DTensorSpec | None, DTensorSpec | None]:
    """The placements of a parameter between steps, and those of its whole form if that is a DTensor, too.

    Args:
        replicated: each rank has all of it (ZeRO-0): it stays the kind of tensor that it is.
    """
    if replicated:
        own = parameter._spec if isinstance(parameter, DTensor) else None
        return own, own
    if spmd is not None:
        return spmd_specs(parameter, spmd, shard_dim)
    whole = parameter._spec if isinstance(parameter, DTensor) else None
    pieces = 1
    if whole is not None:
        for dimension, placement in enumerate(whole.placements):
            if isinstance(placement, Shard) and placement.dim == shard_dim:
                pieces *= whole.mesh.size(dimension)
    # The inner dimension cuts the pieces that there are, and the outer one each of its shards.
    data: tuple[Placement, ...] = (Shard(shard_dim) if pieces == 1 else _StridedShard(shard_dim, split_factor=pieces),)
    if outer_sharded:
        data = (_StridedShard(shard_dim, split_factor=pieces * mesh.shard_size), *data)
    elif mesh.replicates:
        data = (Replicate(), *data)
    if whole is None:
        meta = TensorMeta(parameter.size(), parameter.stride(), parameter.dtype)
        return DTensorSpec(mesh.mesh, data, tensor_meta=meta), None
    all_dims = DeviceMesh._concatenate([mesh.mesh, whole.mesh])
    return DTensorSpec(all_dims, (*data, *whole.placements), tensor_meta=whole.tensor_meta), whole


def refuse_shared(parameters: Iterable[ShardedParameter]) -> None:
    """Of the units of one model.

    Raises:
        ValueError: if two of them have the same parameter.
    """
    seen = set()
    for parameter in parameters:
        if parameter.identity in seen:
            raise ValueError(
                f"Parameter '{parameter.name}' is shared with a parameter already managed by another FSDP group: tied parameters "
                "belong to one call, fully_shard([module_a, module_b])"
            )
        seen.add(parameter.identity)


def check_values_of_a_call(unit: _C.Unit, parameters: list[ShardedParameter], values: list[torch.Tensor]) -> None:
    """torch.func.functional_call has put tensors into the modules for one call: these may be the shards once more.

    Raises:
        RuntimeError: if they have other values.
    """
    for i, (value, parameter) in enumerate(zip(values, parameters, strict=True)):
        local = local_of(value)
        own = local is parameter.local if parameter.extended else local.data_ptr() == unit.shard(i).data_ptr()
        if not own:
            raise RuntimeError(
                f"functional_call with other values for sharded parameter '{parameter.name}': a sharded module computes with its own "
                "parameters; write the values to it in place, or leave it out of fully_shard (ignored_params)"
            )


@untraced
def local_gradient(gradient: torch.Tensor, whole: DTensorSpec, data_parallel: frozenset[int]) -> torch.Tensor:
    """This rank's tensor of a tensor-parallel gradient.

    Sums that are pending are made, except over the mesh's data-parallel dimensions, over which the engine reduces.
    """
    if not isinstance(gradient, DTensor):
        return gradient
    placements = tuple(
        mine if dimension in data_parallel else wanted
        for dimension, (mine, wanted) in enumerate(zip(gradient.placements, whole.placements, strict=True))
    )
    if gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
    return gradient._local_tensor
