"""Gives models on the meta device their values after sharding, one module after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from libfsdp._core.sharded_parameter import local_of, rows_of
from libfsdp.megatron._module_order import inner_first
from libfsdp.megatron._protocol import attributes_of, is_expert
from libfsdp.megatron._quantized import is_quantized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from libfsdp._core.sharded_parameter import ShardedParameter
    from libfsdp._core.state import ShardState
    from libfsdp.megatron._index import FSDPDistributedIndex
    from libfsdp.megatron._quantized import TransformerEngineForm

    Places = dict[tuple[int, str], tuple[ShardState, int]]


@torch.no_grad()
def initialize(
    root: nn.Module,
    states: Sequence[ShardState],
    index: FSDPDistributedIndex,
    take_form: Callable[[str, nn.Parameter], TransformerEngineForm],
) -> None:
    """Gives a sharded model its values, by ``reset_parameters`` of each module that has some of its own.

    Inner modules come first. Beside the shards there is memory of one module at a time. The values of the first data-parallel rank count. A
    tensor that several modules have is made by the first of them.

    Args:
        root: a module whose parameters are shards on meta.
        take_form: returns the form of a parameter that ``reset_parameters`` has quantized, by its name.

    Raises:
        ValueError: if a module has parameters on meta and no ``reset_parameters``.
    """
    places: Places = {
        (id(place.module), place.name): (state, i)
        for state in states
        for i, parameter in enumerate(state.parameters)
        for place in parameter.places
    }
    modules = [module for module in inner_first(root) if is_on_meta(module)]
    names = {module: name or type(module).__name__ for name, module in root.named_modules()}
    for module in modules:
        if _resetter(module) is None:
            raise ValueError(
                f"init_model_with_meta_device: module '{names[module]}' has parameters or buffers of its own on the meta device, "
                "and no reset_parameters() or _reset_parameters() that gives them values"
            )
    # to_empty makes new tensors for parameters that are not parts of units.
    carried = [
        (module, name, attributes_of(p))
        for module in root.modules()
        for name, p in module._parameters.items()
        if p is not None and (id(module), name) not in places
    ]
    root.to_empty(device=index.get_root_mesh().device_type)  # type: ignore[union-attr]
    for module, name, attributes in carried:
        vars(module._parameters[name]).update(attributes)
    scratch = _Scratch()
    for module in modules:
        own = (places.get((id(module), name)) for name in module._parameters)
        scratch.make_room_for(state.parameters[i] for state, i in filter(None, own))
    done: set[tuple[int, int]] = set()
    for module in modules:
        scratch.clear()
        _reset(module, places, scratch, done, index, take_form)
    for state in states:
        if any(parameter.quantized is not None and not parameter.extended for parameter in state.parameters):
            state.adopt_registered()  # quantized parameters have become the shards
        if state.unit is not None and state.unit.model is not None:
            state.unit.model.main_parameters_changed()


def _reset(
    module: nn.Module,
    places: Places,
    scratch: _Scratch,
    done: set[tuple[int, int]],
    index: FSDPDistributedIndex,
    take_form: Callable[[str, nn.Parameter], TransformerEngineForm],
) -> None:
    """Gives one module its values. When it returns, all unsharded parameters have been freed.

    Args:
        done: the parameters that have their values already.
    """
    wholes: dict[str, nn.Parameter] = {}
    for name, shown in module._parameters.items():
        if shown is None:
            continue
        state, i = places.get((id(module), name), (None, -1))
        if state is None:
            whole = torch.empty_like(shown)
        else:
            whole, spec = scratch.take(state.parameters[i], state.mesh.device), state.parameters[i].whole_spec
            whole = whole if spec is None else DTensor(whole, spec, requires_grad=False)
        wholes[name] = nn.Parameter(whole, requires_grad=shown.requires_grad)
    shards = dict(module._parameters)
    module._parameters.update(wholes)
    with torch.enable_grad():
        reset: Any = _resetter(module)
        reset()
    made = dict(module._parameters)
    module._parameters.update(shards)
    for name in wholes:
        value: Any = made[name]
        state, i = places.get((id(module), name), (None, -1))
        expert = is_expert(shards[name] if state is None else state.parameters[i].sharded)
        local = value._local_tensor if isinstance(value, DTensor) else value.detach()
        if is_quantized(value):
            form = take_form(name, value)
            local = form.high_precision().to(state.mesh.device if state is not None else local.device)
            if state is not None:
                state.parameters[i].quantized = form
        _from_first_rank(local, index, expert=expert)
        if state is None:
            shown = shards[name]
            assert shown is not None
            shown.copy_(value)
        elif (id(state), i) not in done:
            done.add((id(state), i))
            _keep_rows(state, i, local)
    for buffer in module.buffers(recurse=False):
        _from_first_rank(buffer, index, expert=False)


class _Scratch:
    """Memory of one module's unsharded parameters, which the next module uses again.

    If each parameter had a tensor of its own, some of the previous module's would still exist, because a process group's thread may hold a
    tensor for a moment after it has been broadcast.
    """

    def __init__(self) -> None:
        self._capacity = 0
        self._used = 0
        self._memory: torch.Tensor | None = None

    def make_room_for(self, parameters: Iterable[ShardedParameter]) -> None:
        """Makes room for all parameters of a module, before the first is taken."""
        self._capacity = max(self._capacity, sum(self._bytes_of(parameter) for parameter in parameters))

    def take(self, parameter: ShardedParameter, device: torch.device) -> torch.Tensor:
        """Returns a tensor of the parameter's unsharded shape with undefined values."""
        if self._memory is None:
            self._memory = torch.empty(self._capacity, dtype=torch.uint8, device=device)
        begin = self._used
        self._used += self._bytes_of(parameter)
        dtype = _whole_dtype(parameter)
        return self._memory[begin : begin + parameter.shape.numel() * dtype.itemsize].view(dtype).view(parameter.shape)

    def clear(self) -> None:
        """Call it when the tensors that were taken are no longer needed."""
        self._used = 0

    @staticmethod
    def _bytes_of(parameter: ShardedParameter) -> int:
        alignment = 64  # that of the allocators' own tensors
        size = parameter.shape.numel() * _whole_dtype(parameter).itemsize
        return (size + alignment - 1) // alignment * alignment


def _whole_dtype(parameter: ShardedParameter) -> torch.dtype:
    return parameter.computes_in or parameter.dtype


def is_on_meta(module: nn.Module) -> bool:
    """True if the module has parameters or buffers of its own on the meta device."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(local_of(t).is_meta for t in tensors)


def _resetter(module: nn.Module) -> Any:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _keep_rows(state: ShardState, i: int, whole: torch.Tensor) -> None:
    assert state.unit is not None
    parameter = state.parameters[i]
    pieces, piece = state.mesh.piece(replicated=state.options.is_replicated, outer_sharded=state.options.outer_sharded)
    begin, rows = rows_of(whole.size(parameter.shard_dim), pieces, piece)
    state.unit.shard(i).copy_(whole.narrow(parameter.shard_dim, begin, rows))


def _from_first_rank(tensor: torch.Tensor, index: FSDPDistributedIndex, *, expert: bool) -> None:
    group = index.get_dp_group(is_expert_parallel=expert)
    if group is not None and dist.get_world_size(group) > 1 and tensor.numel() > 0:
        dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)
