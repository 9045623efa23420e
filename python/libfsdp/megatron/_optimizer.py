"""Extends the step and zero_grad of optimizers of a Megatron-FSDP model."""

from __future__ import annotations

import functools
import inspect
import math
import types
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from libfsdp._core.sharded_parameter import local_of
from libfsdp.megatron._protocol import is_expert
from libfsdp.megatron.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
from libfsdp.optim._optimizer_state import make_missing_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from libfsdp.megatron._class import MegatronFSDP


def model_of(optimizer: torch.optim.Optimizer) -> MegatronFSDP:
    """Returns the model whose parameters an optimizer has.

    Raises:
        ValueError: if it has no parameters of a MegatronFSDP, or those of several.
    """
    models = {
        id(model): model.forward.__self__  # of a proxy, what it stands for
        for group in optimizer.param_groups
        for p in group["params"]
        if (model := getattr(p, "_megatron_fsdp_model", None)) is not None
    }
    if len(models) != 1:
        raise ValueError(
            f"fully_shard_optimizer: the optimizer's parameters belong to {len(models)} MegatronFSDP models; make it of the "
            "parameters() of one, after fully_shard_model, or give both to fully_shard"
        )
    return next(iter(models.values()))


def extend(optimizer: torch.optim.Optimizer) -> MegatronFSDP:
    """Gives an optimizer's step and zero_grad the arguments of Megatron-FSDP's, in place.

    Returns:
        The model.
    """
    model = model_of(optimizer)
    base_step, base_zero_grad = optimizer.step, optimizer.zero_grad
    warn_once = functools.cache(_warn_of_no_sync)

    @functools.wraps(base_step)
    def step(
        self: torch.optim.Optimizer,
        *args: Any,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
        **kwargs: Any,
    ) -> Any:
        if 0 < model.microbatch_count == model._left_by_no_sync:
            warn_once()
        # Backwards within no_sync() leave gradients unreduced under automatic synchronization, too.
        if sync_grad_before_optimizer_step and (not model.model_auto_sync or model.microbatch_count > 0):
            model.finish_grad_sync()
        model._show_shards()  # Parameters that start_param_sync() has gathered have the weights from before the step.
        model._gradients.install()  # A forward since the last backward has put main gradients back.
        result = base_step(*args, **kwargs)
        if install_optimized_model_weights:
            model.install_optimized_model_weights()
        else:
            model._awaits_install = True
        return result

    @functools.wraps(base_zero_grad)
    def zero_grad(self: torch.optim.Optimizer, *args: Any, zero_grad_buffer: bool = True, **kwargs: Any) -> None:
        to_none = args[0] if args else kwargs.get("set_to_none", True)
        if model.ddp_config.megatron_fsdp_cuda_graph_mode:  # A graph adds to the gradients where they were when it was captured.
            args, kwargs = (), {**kwargs, "set_to_none": False}
        base_zero_grad(*args, **kwargs)
        if zero_grad_buffer:
            model.zero_grad_buffer(keep_tensors=not to_none)

    _replace(optimizer, "step", step, sync_grad_before_optimizer_step=True, install_optimized_model_weights=True)
    _replace(optimizer, "zero_grad", zero_grad, zero_grad_buffer=True)
    return model


def _warn_of_no_sync() -> None:
    warnings.warn(
        "the last backward before optimizer.step() ran within no_sync(), so the step reduces the gradients, and "
        "torch.nn.utils.clip_grad_norm_ would have found none before: run the last microbatch outside of no_sync(), or call "
        "model.finish_grad_sync() or libfsdp.clip_grad_norm_ before the step",
        stacklevel=3,
    )


def _replace(optimizer: torch.optim.Optimizer, name: str, function: Callable[..., Any], **added: bool) -> None:
    signature = inspect.signature(getattr(type(optimizer), name))
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=value) for key, value in added.items()]
    function.__signature__ = signature.replace(parameters=[*parameters, *more])  # type: ignore[attr-defined]
    setattr(optimizer, name, types.MethodType(function, optimizer))


def exchange_parameters(optimizer: torch.optim.Optimizer, exchanged: dict[int, nn.Parameter]) -> None:
    """Gives an optimizer the distributed parameters instead of those with which it was made. Its groups stay as they are.

    Args:
        exchanged: the distributed parameters by the ids of the former ones.

    Raises:
        ValueError: if it has stepped before, or has a parameter that the module does not have.
    """
    if any(optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "fully_shard: the optimizer has state of unsharded parameters already; shard the model first, and load the state from a "
            "checkpoint"
        )
    for group in optimizer.param_groups:
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in exchanged]
        if unknown:
            raise ValueError(
                f"fully_shard: the optimizer has parameters that are none of the module's, of shapes {unknown}"
            )
        group["params"] = [exchanged[id(p)] for p in group["params"]]
    optimizer.state.clear()


def complete_state_dicts(optimizer: torch.optim.Optimizer, *, tells_places: bool) -> None:
    """Gives parameters that have had no step yet state while a state dict is made, so that a checkpoint can be loaded into it.

    The optimizer itself stays as it is.

    Args:
        tells_places: whether state dicts contain the places of shards, for torch.distributed.checkpoint.
    """
    made: list[nn.Parameter] = []

    def fill(optimizer: torch.optim.Optimizer) -> None:
        made.extend(make_missing_state(optimizer))

    def empty(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        for p in made:
            optimizer.state.pop(p, None)
        made.clear()
        # All ranks have the parameters in the same order, even if some rank's shard is empty and has no state of its own.
        state_dict["state"] = dict(sorted(state_dict["state"].items()))
        if tells_places:
            _share_counts([p for group in optimizer.param_groups for p in group["params"]], state_dict["state"])
            preprocess_state_dict_for_uneven_dtensor(state_dict["state"])

    optimizer.register_state_dict_pre_hook(fill)
    optimizer.register_state_dict_post_hook(empty)


def _share_counts(parameters: list[nn.Parameter], states: dict[int, dict[str, Any]]) -> None:
    """Makes counts, such as those of updates, the same on all ranks. Ranks whose shard is empty do not update them. Collective.

    Args:
        states: the states by number; those of empty shards are replaced.
    """
    for expert in (False, True):
        uneven = [i for i, p in enumerate(parameters) if i in states and is_expert(p) == expert and _may_be_empty(p)]
        if not uneven:
            continue
        counts = {
            i: {name: value for name, value in states[i].items() if not isinstance(value, DTensor)}
            for i in uneven
            if local_of(parameters[i]).numel() > 0
        }
        model: MegatronFSDP = parameters[uneven[0]]._megatron_fsdp_model
        group = model.dist_index.get_dp_group(expert)
        of_ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, counts, group=group)
        for i in uneven:
            if i not in counts:
                states[i] = {**states[i], **next((one[i] for one in of_ranks if i in one), {})}


def _may_be_empty(p: nn.Parameter) -> bool:
    """True if some rank may have no element of the parameter."""
    if not isinstance(p, DTensor):
        return False
    sharded = [(one.dim, p.device_mesh.size(dim)) for dim, one in enumerate(p.placements) if hasattr(one, "dim")]
    return any(p.shape[dim] % math.prod(size for other, size in sharded if other == dim) != 0 for dim, _ in sharded)
