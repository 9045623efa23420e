"""Makes the parameters and the unit of a call of fully_shard from its options."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from libfsdp import _C
from libfsdp._beyond import check_parameter
from libfsdp._extensions import is_extended, refuse_extended
from libfsdp._precision import keeps_dtype
from libfsdp._quantized_form import QUANTIZED
from libfsdp._sharded_parameter import Place, ShardedParameter, identity_of, local_of, sharded_spec

if TYPE_CHECKING:
    from torch import nn

    from libfsdp._state import ShardState


def make_parameter(state: ShardState, parameter: nn.Parameter, places: list[Place], shard_dim: int) -> ShardedParameter:
    """Returns the facts about a parameter that are known before it is sharded."""
    main_dtype = state.beyond.main_dtype_of(parameter)
    spec, whole_spec = sharded_spec(
        parameter,
        state.mesh,
        state.spmd,
        shard_dim,
        replicated=state.is_replicated,
        outer_sharded=state.beyond.outer_sharded,
    )
    if spec is not None and spec.tensor_meta is not None:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=main_dtype))
    local = local_of(parameter)
    quantized = getattr(parameter, QUANTIZED, None)
    return ShardedParameter(
        name=places[0].name,
        places=places,
        shape=local.shape,
        dtype=main_dtype,
        computes_in=parameter.dtype if parameter.dtype != main_dtype else None,
        shard_dim=shard_dim,
        spec=spec,
        whole_spec=whole_spec,
        identity=identity_of(parameter),
        sharded=parameter,  # until there are shards
        keeps_dtype=keeps_dtype(state.mp_policy, parameter),
        float8_block=check_parameter(state.beyond, parameter, places[0].name, shard_dim, state.mesh),
        grad_dtype=state.beyond.grad_dtype_of(parameter),
        extended=quantized is not None or is_extended(local),
        quantized=quantized,
        before=weakref.ref(parameter),
    )


def make_unit(state: ShardState) -> _C.Unit:
    """Makes the unit of a state's parameters from their present form.

    Raises:
        NotImplementedError: for parameters with fsdp_pre_all_gather, and options that they can't have.
    """
    size = state.kept_size
    for parameter in state.parameters:
        differentiable = parameter.dtype.is_floating_point or parameter.dtype.is_complex
        parameter.trainable = parameter.sharded.requires_grad and differentiable
    refuse_extended(state, is_size=size > 1)
    given = [
        _C.ParameterSpec(
            name=p.name,
            shape=list(p.shape),
            shard_dim=p.shard_dim,
            dtype=p.dtype,
            trainable=p.trainable,
            param_dtype=p.compute_dtype(state.mp_policy),
            # It is set if it was asked for, even if it is the dtype of the shards, because gradients are then sent in
            # it.
            grad_dtype=p.grad_dtype or (p.dtype if p.trainable and state.beyond.main_grads_dtype is not None else None),
            float8_block=p.float8_block,
            extended=p.extended,
        )
        for p in state.parameters
    ]
    return _C.Unit(
        ", ".join(state.class_names),
        given,
        state.mesh.engine_mesh,
        placements=state.placements,
        reshard_after_forward=state.reshards_after_forward,
        reshard_after_forward_size=size,
        param_dtype=state.mp_policy.param_dtype,
        reduce_dtype=state.mp_policy.reduce_dtype,
        offload=state.offloads,
        pin_memory=getattr(state.offload_policy, "pin_memory", True),
        outer_sharded=state.beyond.outer_sharded,
        rounds_gradients=state.beyond.main_grads_dtype is None,
    )
