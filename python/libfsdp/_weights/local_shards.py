"""This rank's shards of a model by address."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from libfsdp import _C
from libfsdp._checkpoint.items import chunk_of
from libfsdp._core.model import states_in
from libfsdp._core.readers import reading_of
from libfsdp._core.sharded_parameter import Place, local_of, share_memory

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from libfsdp._core.model import MemberState


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of a parameter: a chunk of the unsharded tensor.

    Attributes:
        name: the name in ``state_dict()``.
        dtype: the dtype of the shard, not the one in which modules compute.
        shape: the shape of the unsharded tensor.
        offsets: where the chunk begins in the unsharded tensor, in elements of each dimension.
        sizes: the sizes of the chunk, which is empty if this rank has nothing.
        tensor: the values of the chunk, a view of the shard's memory. Do not write to it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor


class LocalShards(list[LocalShard]):
    """This rank's shards of a model, in the order of ``state_dict()``: see local_shards.

    It keeps the model alive.

    Attributes:
        generation: a number that grows when a later ``local_shards`` of the same module has found other addresses.
    """

    def __init__(self, model: nn.Module, shards: dict[str, LocalShard], places: dict[str, Place]) -> None:
        super().__init__(shards.values())
        self.generation = _generation_of(model, self)
        self._model = model
        self._places = [(places[name], shard.tensor) for name, shard in shards.items()]

    def is_valid(self) -> bool:
        """Returns True while the shards are where they were. Otherwise, their memory stays, but the model does not use it."""
        # The unsharded parameter, which modules have while they compute, stands for the shard.
        forms = {
            id(form): parameter.sharded
            for state in _states_of(self._model)
            for parameter in state.parameters
            for form in (parameter.whole, parameter.post_forward)
            if form is not None
        }

        def now(place: Place) -> torch.Tensor | None:
            value = place.module._parameters.get(place.name)
            return forms.get(id(value), value)

        return all((value := now(place)) is not None and _is_at(local_of(value), to) for place, to in self._places)

    def reading(self) -> AbstractContextManager[None]:
        """Returns a context in which writers wait: steps of optimizers, ``load``, and ``load_state_dict`` of ``FSDPModule``.

        Several threads may read at once. On a thread that reads, writers raise an Error, because they would wait for
        themselves. The program's own writes (in place, under ``no_grad``) do not wait. Enter it between steps: if another
        thread trains, the program orders the two.

        Waiting is the host's. On a device, a reader on another stream first waits for an event of the stream of the last step (other
        hardware, for the device), and the context ends after its reads have.

        Raises:
            Error: if the shards are no longer valid.
        """
        if not self.is_valid():
            raise _C.Error("local_shards: the shards have moved since; call local_shards again")
        return reading_of(_states_of(self._model))


# The generation of a module's shards, and their places in memory when it was given. The weak references keep the numbers of storages from
# being used again.
_Places = list[tuple[str, int, int, StorageWeakRef]]
_generations: weakref.WeakKeyDictionary[nn.Module, tuple[int, _Places]] = weakref.WeakKeyDictionary()


def _generation_of(model: nn.Module, shards: list[LocalShard]) -> int:
    now = [
        (one.name, one.tensor.data_ptr(), one.tensor.nbytes, StorageWeakRef(one.tensor.untyped_storage()))
        for one in shards
    ]
    generation, before = _generations.get(model, (0, []))
    if now != before:
        generation += 1
    _generations[model] = (generation, now)
    return generation


def local_shards(model: nn.Module) -> LocalShards:
    """Returns this rank's shards of all parameters by address, for readers that register memory once. It copies nothing and sends nothing.

    The shards are those that optimizers update, in their dtype, under the names of ``state_dict()``. A parameter that each rank has
    (ignored, or not sharded) is complete; a tied one is listed under each of its names, with the same tensor. Addresses stay through steps,
    loads and exports. Memory moves when parameters get another dtype or device, when one of them begins to be trained, or by ``to_empty``
    of a model without memory: ``is_valid()`` is then false, and the next ``local_shards`` has a greater ``generation``.

    Args:
        model: the root, or a module that has sharded modules below it.

    Raises:
        Error: for a parameter without memory (meta device), or whose shard is no ordinary tensor.
        ValueError: if the model is not sharded.
    """
    states = _states_of(model)
    if not states:
        raise ValueError(f"{type(model).__name__} is not sharded; call fully_shard on it first")
    values = model.state_dict(keep_vars=True)  # Modules then have shards.
    # What the program has assigned becomes the shards now, and not in the next forward.
    if any(not state.shows_its_parameters() for state in states):
        for of_states in {state.model for state in states if state.model is not None}:
            of_states.adopt_registered()
        for state in states:
            if state.model is None:
                state.adopt_registered()
        values = model.state_dict(keep_vars=True)
    found = {name: value for name, value in values.items() if isinstance(value, nn.Parameter)}
    return LocalShards(model, {name: _shard_of(name, value) for name, value in found.items()}, _places_of(model, found))


def _states_of(model: nn.Module) -> list[MemberState]:
    return [state for _, state, _ in states_in(model)]


def _places_of(model: nn.Module, values: dict[str, nn.Parameter]) -> dict[str, Place]:
    """Returns where modules have the parameters."""
    places = {
        id(value): Place(module, name)
        for module in model.modules()
        for name, value in module._parameters.items()
        if value is not None
    }
    return {name: places[id(value)] for name, value in values.items()}


def _shard_of(name: str, value: nn.Parameter) -> LocalShard:
    local = local_of(value).detach()
    if type(local) is not torch.Tensor:
        raise _C.Error(
            f"local_shards: the shard of '{name}' is a {type(local).__name__}, whose values are no ordinary tensor; use full_weights, "
            "or its full_tensor()"
        )
    if local.is_meta:
        raise _C.Error(f"local_shards: '{name}' is on the meta device: call model.to_empty(device=...) before")
    is_cut = isinstance(value, DTensor) and local.numel() > 0
    offsets = chunk_of(value, local) if is_cut else [0] * value.ndim
    if offsets is None:
        raise _C.Error(
            f"local_shards: this rank's part of '{name}' ({value.placements}) is no box of the tensor; use full_weights"
        )
    return LocalShard(name, local.dtype, tuple(value.shape), tuple(offsets), tuple(local.shape), local)


def _is_at(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """True if they are the same memory. (The storage of `place` lives, so that no other one has its number.)"""
    return share_memory(tensor, place) and tensor.data_ptr() == place.data_ptr() and tensor.dtype == place.dtype
