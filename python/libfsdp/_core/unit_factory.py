"""Makes the parameters and the unit of a call of fully_shard from its options."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from libfsdp import _C
from libfsdp._core.extensions import is_extended, refuse_extended
from libfsdp._core.packed_weights import looked_up
from libfsdp._core.precision import keeps_dtype
from libfsdp._core.quantized_form import QUANTIZED
from libfsdp._core.sharded_parameter import ShardedParameter, identity_of, local_of, sharded_spec
from libfsdp._core.sharding_options import gather_format_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from libfsdp._comm.mesh import ShardingMesh
    from libfsdp._core.sharded_parameter import ManagedParameter
    from libfsdp._core.sharding_options import ShardingOptions


def planned_parameter(
    parameter: nn.Parameter, name: str, shard_dim: int, mesh: ShardingMesh, options: ShardingOptions
) -> ShardedParameter:
    """Returns the facts about a parameter that need no ranks."""
    main_dtype = options.main_dtype_of(parameter)
    return ShardedParameter(
        name=name,
        shape=parameter.shape,
        dtype=main_dtype,
        shard_dim=shard_dim,
        sharded=parameter,  # until there are shards
        computes_in=parameter.dtype if parameter.dtype != main_dtype else None,
        keeps_dtype=keeps_dtype(options.mp_policy, parameter),
        gather_format=gather_format_of(options, parameter, name, shard_dim, mesh),
        grad_dtype=options.grad_dtype_of(parameter),
    )


def make_parameter(managed: ManagedParameter, mesh: ShardingMesh, options: ShardingOptions) -> ShardedParameter:
    """Returns the facts about a parameter that are known before it is sharded."""
    parameter, places, shard_dim = managed
    known = planned_parameter(parameter, places[0].name, shard_dim, mesh, options)
    spec, whole_spec = sharded_spec(
        parameter,
        mesh,
        options.spmd,
        shard_dim,
        replicated=options.is_replicated,
        outer_sharded=options.outer_sharded,
    )
    if spec is not None and spec.tensor_meta is not None:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=known.dtype))
    local = local_of(parameter)
    quantized = getattr(parameter, QUANTIZED, None)
    return replace(
        known,
        places=places,
        shape=local.shape,
        spec=spec,
        whole_spec=whole_spec,
        identity=identity_of(parameter),
        extended=quantized is not None or is_extended(local),
        quantized=quantized,
        before=weakref.ref(parameter),
        kind=type(local) if issubclass(type(local), nn.Parameter) else nn.Parameter,
        attributes=looked_up(parameter),
    )


def make_unit(
    name: str,
    parameters: Sequence[ShardedParameter],
    mesh: ShardingMesh,
    options: ShardingOptions,
    *,
    after_forward: _C.AfterForward,
    post_forward_size: int,
) -> _C.ShownUnit:
    """Makes the unit of some parameters from their present form.

    Args:
        name: for errors and profiles, until the unit is a part of a model.
        post_forward_size: the number of ranks of the post-forward mesh; 0 if there is none.

    Raises:
        NotImplementedError: for parameters with fsdp_pre_all_gather, and options that they can't have.
    """
    for parameter in parameters:
        differentiable = parameter.dtype.is_floating_point or parameter.dtype.is_complex
        parameter.trainable = parameter.sharded.requires_grad and differentiable
    refuse_extended(parameters, options, is_size=post_forward_size > 1)
    given = [
        _C.ParameterSpec(
            name=p.name,
            shape=list(p.shape),
            shard_dim=p.shard_dim,
            dtype=p.dtype,
            trainable=p.trainable,
            param_dtype=p.compute_dtype(options.mp_policy),
            # It is set if it was asked for, even if it is the dtype of the shards, because gradients are then sent in
            # it.
            grad_dtype=p.grad_dtype or (p.dtype if p.trainable and options.sends_gradients_in_own_dtype else None),
            gather_format=p.gather_format,
            extended=p.extended,
        )
        for p in parameters
    ]
    return _C.ShownUnit(
        name,
        given,
        mesh.engine_mesh,
        placements=options.placements,
        after_forward=after_forward,
        post_forward_size=post_forward_size,
        param_dtype=options.mp_policy.param_dtype,
        reduce_dtype=options.mp_policy.reduce_dtype,
        offload=options.offloads,
        pin_memory=getattr(options.offload_policy, "pin_memory", True),
        outer_sharded=options.outer_sharded,
        rounds_gradients=options.main_grads_dtype is None,
        grad_comm_format=None if options.grad_comm_format is None else options.grad_comm_format.engine_format(),
    )


def post_forward_parameter(
    parameter: ShardedParameter, i: int, unit: _C.ShownUnit, mesh: DeviceMesh, ranks: int
) -> nn.Parameter | None:
    """Returns the parameter as a DTensor over the post-forward mesh, whose memory exists only after forward.

    Returns None if this rank's part is not the one that torch.chunk would give it. Its module then has the shard.

    Args:
        mesh: the post-forward mesh: two dimensions, of which the second shards a copy.
    """
    neighbours = mesh.size(1)
    padded = parameter.shard_dim == 0 and parameter.shape[0] % ranks != 0
    if parameter.whole_spec is not None or padded or parameter.shape[0] % neighbours != 0:
        return None
    assert parameter.whole is not None
    shape = [parameter.shape[0] // neighbours, *parameter.shape[1:]]
    stride = torch.empty(parameter.shape, device="meta").stride()
    spec = DTensorSpec(
        mesh, (Replicate(), Shard(0)), tensor_meta=TensorMeta(parameter.shape, stride, parameter.whole.dtype)
    )
    local = unit.post_forward_shard(i, shape)
    form = nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad=False)
    form._libfsdp_identity = parameter.identity
    return form
