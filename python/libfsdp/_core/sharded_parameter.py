"""One parameter in its two forms: a DTensor of this rank's rows between steps, an unsharded tensor while modules compute.

Without sharding (ZeRO-0) the first form is an ordinary tensor, and both are complete.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from libfsdp._core.function_calls import untraced
from libfsdp._core.spmd import spmd_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.placement_types import Placement

    from libfsdp import _C
    from libfsdp._comm.mesh import ShardingMesh
    from libfsdp._core.quantized_form import QuantizedForm
    from libfsdp._core.spmd import SpmdMesh

_identities = itertools.count()
# By their identities, which all forms of a parameter share. They are attributes, which survive copying.
_parameters: weakref.WeakValueDictionary[int, ShardedParameter] = weakref.WeakValueDictionary()

# Attributes that belong to one form only: torch's own, those with gradients, and those that define how a tensor is gathered.
_OF_ONE_FORM = frozenset({"_is_param", "main_grad", "decoupled_grad", "fsdp_pre_all_gather", "fsdp_post_all_gather"})


@dataclass
class Place:
    """Where a module has a parameter."""

    module: nn.Module
    name: str


class ManagedParameter(NamedTuple):
    """A parameter that a call of fully_shard is about to shard.

    Attributes:
        value: the unsharded parameter, as the modules have it.
        places: all modules that have it.
        shard_dim: the dimension that will be cut.
    """

    value: nn.Parameter
    places: list[Place]
    shard_dim: int = 0


@dataclass
class ShardedParameter:
    """A parameter of a unit.

    Attributes:
        name: its name in the module that fully_shard was called on; its name in the root once that is known.
        places: all modules that have it (tied parameters have several).
        shape: the shape of the unsharded parameter on this rank (a tensor-parallel one is a piece already).
        shard_dim: the dimension that is cut.
        spec: the spec of the sharded DTensor; None for an ordinary tensor, of which each rank has all.
        whole_spec: the spec of the whole DTensor, if the parameter is tensor-parallel.
        identity: equal for parameters that were one object before they were sharded.
        sharded: the parameter that the modules have between steps.
        owner: the parameter of another unit to which it was tied, so that `sharded` is that one's.
        keeps_dtype: whether modules compute with it in its own dtype, whatever the policy is.
        gather_format: the format in which it is gathered; None: the dtype of the computation.
        computes_in: the dtype that it had in the module, if its shards have another one (main_params_dtype).
        grad_dtype: the dtype of its gradient, if that is not its own.
        post_forward: the parameter that modules have between forward and backward, if there is a post-forward mesh.
        extended: whether its tensor defines how it is gathered, or it is quantized.
        quantized: makes its unsharded form, if that has fewer bits than the shards.
        trainable: whether the unit has room for its gradient.
        kind: the class that it had in the module, if its tensor has none of its own.
        before: a weak reference to the parameter that the module had before fully_shard.
        attributes: attributes that both forms get: those that front ends have set on it, and what is looked up in a packed one. (For
            those that the program has set, see attributes_of.)
        whole: the parameter that modules have while they compute; for an extended one, it exists after the first gather.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    shard_dim: int
    sharded: nn.Parameter = field(repr=False)
    places: list[Place] = field(default_factory=list)
    spec: DTensorSpec | None = None
    whole_spec: DTensorSpec | None = None
    identity: int = -1
    keeps_dtype: bool = False
    gather_format: _C.GatherFormat | None = field(default=None, repr=False)
    computes_in: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    extended: bool = False
    quantized: QuantizedForm | None = field(default=None, repr=False)
    before: Callable[[], torch.Tensor | None] = field(default=lambda: None, repr=False)
    trainable: bool = True
    owner: ShardedParameter | None = field(default=None, repr=False)
    kind: type[nn.Parameter] = nn.Parameter
    attributes: dict[str, Any] = field(default_factory=dict, repr=False)
    whole: nn.Parameter | None = field(default=None, repr=False)
    post_forward: nn.Parameter | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _parameters[self.identity] = self

    def name_among(self, names: dict[tuple[nn.Module, str], str]) -> str:
        """Returns the last of its names, given those of all places; the name that it has if there is none."""
        found = [names[key] for place in self.places if (key := (place.module, place.name)) in names]
        return found[-1] if found else self.name

    def place(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that modules have between steps, over `local`: a DTensor of this parameter's placements, if it has any."""
        return local if self.spec is None else DTensor(local, self.spec, requires_grad=False)

    def over(self, value: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Returns a parameter over a tensor. It has the program's own class (bitsandbytes' Params4bit), unless it is a DTensor."""
        if self.kind is nn.Parameter or type(value) is not torch.Tensor:
            return nn.Parameter(value, requires_grad=requires_grad)
        return torch.Tensor._make_subclass(self.kind, value, requires_grad)

    def other_of(self, value: torch.Tensor | None) -> ShardedParameter | None:
        """Returns the other parameter of which the tensor is a form; None for a form of this one, and for tensors of no unit."""
        parameter = parameter_of(value)
        return None if parameter is self else parameter

    def has_form_of(self, value: torch.Tensor | None) -> bool:
        """True if the tensor could be the parameter's shard."""
        return value is not None and isinstance(value, DTensor) == (self.spec is not None)

    def gradient_wrap(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Returns a function that makes the parameter's gradient from this rank's part; None if the part is used as it is."""
        if self.spec is None:
            return None
        spec = self.spec
        if self.grad_dtype is not None and spec.tensor_meta is not None:
            spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=self.grad_dtype))
        # It leaves out DTensor's __init__, which does nothing and costs more than the rest. Each step makes one for each parameter.
        return functools.partial(DTensor.__new__, DTensor, spec=spec, requires_grad=False)

    def compute_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """Returns the dtype in which it is gathered and computed with."""
        own = self.computes_in or self.dtype
        return own if not own.is_floating_point or self.keeps_dtype else policy.param_dtype or own

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        return local_of(self.sharded)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a DTensor, and any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the attributes that the program has set on a parameter in one form, so that the other forms get them, too.

    Attributes in which a tensor class keeps its values are left out, because the class sets them on other tensors that it makes, too.
    """
    of_class = () if type(tensor) in (torch.Tensor, nn.Parameter, DTensor) else vars(tensor.detach())
    return {
        name: value
        for name, value in vars(tensor).items()
        if name not in _OF_ONE_FORM and name not in of_class and not name.startswith("_libfsdp")
    }


def carry_attributes(parameter: ShardedParameter, value: nn.Parameter) -> None:
    """Gives a new shard the attributes that the program has set on the former one.

    (swap_tensors removes them; the unsharded form still has them.)
    """
    if parameter.quantized is not None:
        return  # They contain values of higher precision.
    if parameter.other_of(value) is not None:
        return  # It is tied, and the attributes are those of the other one.
    forms = (parameter.whole, parameter.sharded, value)
    vars(value).update({k: v for form in forms if form is not None for k, v in attributes_of(form).items()})


def identity_of(parameter: nn.Parameter) -> int:
    """Returns a number that identifies the object, even if only some of the modules that own it are sharded."""
    if not hasattr(parameter, "_libfsdp_identity"):
        parameter._libfsdp_identity = next(_identities)
    return parameter._libfsdp_identity


def parameter_of(tensor: torch.Tensor | None) -> ShardedParameter | None:
    """Returns the parameter of a unit of which the tensor is a form; None for other tensors."""
    return None if tensor is None else _parameters.get(getattr(tensor, "_libfsdp_identity", -1))


def names_of_places(root: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """Returns the name of each place that may have a parameter, in and below a module."""
    return {
        (module, own): f"{name}.{own}" if name else own
        for name, module in root.named_modules(remove_duplicate=False)
        for own in module._parameters
    }


def all_parameters() -> list[ShardedParameter]:
    """Returns the parameters of all units in the process."""
    return list(_parameters.values())


def shard_of(tensor: torch.Tensor | None) -> Any:
    """Returns the shard of which the tensor is another form; any other tensor as it is."""
    parameter = parameter_of(tensor)
    is_other_form = parameter is not None and (tensor is parameter.whole or tensor is parameter.post_forward)
    return parameter.sharded if parameter is not None and is_other_form else tensor


def is_sharded(parameter: torch.Tensor) -> bool:
    """True if it is a parameter of a unit, or became one."""
    return hasattr(parameter, "_libfsdp_identity")


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if writes to one tensor change the other. Addresses are not compared, because tensors without elements have none."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def rows_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns the rows that `rank` owns, as torch.chunk cuts: the first row, and the number of rows."""
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
    """Returns the specs of a parameter between steps, and of its unsharded form if that is a DTensor, too.

    Args:
        replicated: whether each rank has all of it (ZeRO-0), so that it stays the kind of tensor that it is.
    """
    if replicated:
        own = parameter._spec if isinstance(parameter, DTensor) else None
        return own, own
    if spmd is not None:
        return spmd_specs(parameter, spmd, shard_dim)
    whole = parameter._spec if isinstance(parameter, DTensor) else None
    meta = TensorMeta(parameter.size(), parameter.stride(), parameter.dtype) if whole is None else whole.tensor_meta
    return spec_over(mesh, whole, meta, shard_dim, outer_sharded=outer_sharded), whole


def spec_over(
    mesh: ShardingMesh,
    whole: DTensorSpec | None,
    meta: TensorMeta | None,
    shard_dim: int,
    *,
    replicated: bool = False,
    outer_sharded: bool = False,
) -> DTensorSpec:
    """Returns the spec of a parameter over the ranks that shard or replicate it, and over those that have pieces of it already.

    Args:
        mesh: the former ranks.
        whole: the spec over the latter ones, if there are any.
        meta: of the whole tensor.
    """
    pieces = 1
    if whole is not None:
        for dimension, placement in enumerate(whole.placements):
            if isinstance(placement, Shard) and placement.dim == shard_dim:
                pieces *= whole.mesh.size(dimension)
    # The inner dimension cuts the existing pieces, and the outer one cuts each of the resulting shards.
    data: tuple[Placement, ...] = (Shard(shard_dim) if pieces == 1 else _StridedShard(shard_dim, split_factor=pieces),)
    if replicated:
        data = (Replicate(),) * mesh.mesh.ndim
    elif outer_sharded:
        data = (_StridedShard(shard_dim, split_factor=pieces * mesh.shard_size), *data)
    elif mesh.replicates:
        data = (Replicate(), *data)
    if whole is None:
        return DTensorSpec(mesh.mesh, data, tensor_meta=meta)
    all_dims = DeviceMesh._concatenate([mesh.mesh, whole.mesh])
    return DTensorSpec(all_dims, (*data, *whole.placements), tensor_meta=meta)


def refuse_shared(parameters: Iterable[ShardedParameter]) -> None:
    """Refuses parameters that several units of one model have.

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


def check_values_of_a_call(unit: _C.ShownUnit, parameters: list[ShardedParameter], values: list[torch.Tensor]) -> None:
    """Checks tensors that torch.func.functional_call has put into the modules for one call. They may only be the shards again.

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
    """Returns this rank's tensor of a tensor-parallel gradient.

    Pending sums are computed, except over the mesh's data-parallel dimensions, over which the engine reduces.
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
