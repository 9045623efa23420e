"""Lists the parts of a model's and an optimizer's state that this rank holds, with their names and places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate

from libfsdp import _C

MODEL = "model"
OPTIMIZER = "optim"
_EXTRA_STATE = "_extra_state"
# The parts of names that wrappers add, and that state dicts of checkpoints do not have.
_OF_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass
class Item:
    """A tensor of the state, with the part of it that this rank holds.

    Attributes:
        path: its path in nested dictionaries; the key is the path joined by dots.
        shape: the shape of the whole tensor.
        offsets: the offsets of the box that this rank holds.
        values: the values of that box, as a view into the state.
        writes: whether this rank may write its part. One rank of the tensor's mesh may, if several hold the same part.
        ranks: the number of ranks of the tensor's mesh; 1 for a plain tensor. Ranks outside of it may hold the same part.
    """

    path: tuple[str, ...]
    shape: list[int]
    offsets: list[int]
    values: torch.Tensor
    writes: bool = True
    ranks: int = 1

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def part(self) -> str:
        """Names the part that this rank holds: equal on ranks that hold the same part. Each rank has all of a plain tensor."""
        return self.key if self.ranks == 1 else f"{self.key} {self.offsets} {list(self.values.shape)}"


@dataclass
class ModelState:
    """The state of a model.

    Attributes:
        items: parameters and persistent buffers, each once.
        aliases: other names of tied parameters and shared buffers, and the name of their item.
        extra: the extra state of modules, by key.
        names: the names of parameters, by their id.
    """

    items: list[Item]
    aliases: dict[str, str]
    extra: dict[str, Any]
    names: dict[int, str]


def model_state(
    model: nn.Module, make_item: Callable[[tuple[str, ...], torch.Tensor], Item] | None = None
) -> ModelState:
    """Returns the state of a sharded model, with the names of its state dict.

    Args:
        make_item: makes the items; None: item_of.

    Raises:
        Error: for values that a checkpoint can't hold.
    """
    state = model.state_dict()  # Modules show shards then.
    first_names: dict[int, str] = {}
    found = ModelState([], {}, {}, {})
    of_object: dict[str, int] = {}
    for name, tensor in _tensors_of(model):
        of_object[clean(name)] = id(tensor)
        if isinstance(tensor, nn.Parameter):
            found.names.setdefault(id(tensor), clean(name))
    for name, value in state.items():
        name = clean(name)
        key = f"{MODEL}.{name}"
        if name.rpartition(".")[2] == _EXTRA_STATE:
            found.extra[key] = value
            continue
        if not isinstance(value, torch.Tensor):
            raise _C.Error(f"'{key}' of the model's state dict is no tensor, but a {type(value).__name__}")
        first = first_names.setdefault(of_object.get(name, id(value)), key)
        if first != key:
            found.aliases[key] = first
            continue
        found.items.append((make_item or item_of)((MODEL, name), value))
    return found


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def clean(name: str) -> str:
    """Returns a name without the parts that wrappers add."""
    for part in _OF_WRAPPERS:
        name = name.replace(part, "")
    return name


def values_of(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a tensor.

    Raises:
        Error: if it is not a plain tensor with memory, or a sum that is pending.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    local = local.detach()
    if type(local) not in (torch.Tensor, nn.Parameter):
        raise _C.Error(
            f"'{key}' is a {type(local).__name__}, whose values have no place in this checkpoint; use torch.distributed.checkpoint"
        )
    if local.is_meta:
        raise _C.Error(f"'{key}' is on the meta device: call model.to_empty(device=...) before")
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise _C.Error(f"'{key}' has the placements {tensor.placements}: a sum that is pending")
    return local


def chunk_of(tensor: DTensor, local: torch.Tensor) -> list[int] | None:
    """Returns where the local tensor begins in a DTensor; None if it is not one chunk of it.

    Parts of any size provide their places by the protocol of torch.distributed.checkpoint.
    """
    chunks = tensor.__create_chunk_list__()
    return list(chunks[0].offsets) if len(chunks) == 1 and chunks[0].sizes == local.shape else None


def item_of(path: tuple[str, ...], tensor: torch.Tensor) -> Item:
    """Makes the item of a tensor.

    Raises:
        Error: if it is not a plain tensor, or if it is not known where this rank's part lies.
    """
    key = ".".join(path)
    local = values_of(key, tensor)
    shape = list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Item(path, shape, [0] * len(shape), local)
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        return Item(path, shape, [0] * len(shape), local, writes=False)
    if local.numel() == 0:
        return Item(path, shape, [0] * len(shape), local, 0 in shape, mesh.size())
    offsets = chunk_of(tensor, local)
    if offsets is None:
        raise _C.Error(f"'{key}': this rank's part is no box of the tensor; use torch.distributed.checkpoint")
    # If several ranks hold the same part, the first one writes it.
    replicas = [d for d, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    writes = all(mesh.get_local_rank(d) == 0 for d in replicas)
    return Item(path, shape, offsets, local, writes, mesh.size())


@dataclass
class OptimizerState:
    """The state of a model's optimizers.

    Attributes:
        items: the tensors of their state.
        values: the numbers of their state, by path.
        groups: for each of their groups, the names of the parameters.
        names: the names of their parameters, by id.
    """

    items: list[Item]
    values: dict[tuple[str, ...], Any]
    groups: list[list[str]]
    names: dict[int, str]


def optimizer_state(optimizers: list[torch.optim.Optimizer], names: dict[int, str]) -> OptimizerState:
    """Returns the state of optimizers, with the names of torch.distributed.checkpoint's get_optimizer_state_dict.

    Args:
        optimizers: optimizers of torch.
        names: the names of the model's parameters.

    Raises:
        Error: if they have parameters of other models, or state of which it is not known how it is cut.
    """
    found = OptimizerState([], {}, [], {})
    for optimizer, group in ((one, group) for one in optimizers for group in one.param_groups):
        found.groups.append([])
        for p in group["params"]:
            if id(p) not in names:
                raise _C.Error(
                    f"the optimizer has a parameter of the shape {list(p.shape)} that is none of the model's: make it of "
                    "model.parameters() after fully_shard"
                )
            found.groups[-1].append(names[id(p)])
            found.names[id(p)] = names[id(p)]
            for kind, value in optimizer.state.get(p, {}).items():
                _add_state(found, (OPTIMIZER, "state", names[id(p)], kind), p, value)
    return found


def _add_state(found: OptimizerState, path: tuple[str, ...], p: nn.Parameter, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        found.values[path] = value
        return
    item = item_of(path, value)
    if isinstance(p, DTensor) and not isinstance(value, DTensor):
        if value.numel() > 1 and any(not isinstance(placement, Replicate) for placement in p.placements):
            raise _C.Error(
                f"'{item.key}' is a plain tensor beside a sharded parameter: it does not say which part of the whole it is; use "
                "torch.distributed.checkpoint"
            )
        # Ranks without elements of the parameter may not count its updates.
        item.writes = p._local_tensor.numel() > 0 or 0 in p.shape
    found.items.append(item)
