"""Unsharded weights of a sharded model, in a stream of buckets."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.distributed.tensor import DTensor

from libfsdp import _C
from libfsdp._core.model import form, states_in
from libfsdp._core.packed_weights import is_of_packed, packed_among
from libfsdp._weights.adapters import adapters_of
from libfsdp._weights.changed_weights import ChangedWeights, WeightSnapshot
from libfsdp._weights.tensor_parallel import assembly_of, dims_of, further_dims, meshes_of_all
from libfsdp._weights.weight_iterator import WeightIterator
from libfsdp._weights.weight_names import names_of_tensors, names_that_come

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from libfsdp._core.model import MemberState

Receivers = Literal["all", "first", "one_per_host"]
_RECEIVERS = {
    "all": _C.WeightReceivers.ALL,
    "first": _C.WeightReceivers.FIRST,
    "one_per_host": _C.WeightReceivers.ONE_PER_HOST,
}


class WeightBucket(list[tuple[str, torch.Tensor]]):
    """Names with unsharded tensors, in the order of ``state_dict()``.

    Attributes:
        flat: the buffer of which the tensors are views: one dimension, bytes; each tensor begins at a multiple of 64
            bytes. None on ranks that do not receive.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], flat: torch.Tensor | None) -> None:
        super().__init__(weights)
        self.flat = flat


class FullWeights(WeightIterator[WeightBucket]):
    """An iterator of buckets, and a context manager that closes it: see full_weights."""

    def _bucket_of(self, bucket: _C.WeightBucket) -> WeightBucket:
        return WeightBucket(bucket.weights, bucket.flat)


@overload
def full_weights(
    model: nn.Module,
    *,
    bucket_bytes: int = 128 << 20,
    dtype: torch.dtype | None = None,
    names: Collection[str] | None = None,
    ranks: Receivers = "all",
    rename: Callable[[str], str] | None = None,
    merge_adapters: bool = False,
    since: None = None,
) -> FullWeights: ...


@overload
def full_weights(
    model: nn.Module,
    *,
    bucket_bytes: int = 128 << 20,
    dtype: torch.dtype | None = None,
    names: Collection[str] | None = None,
    ranks: Receivers = "all",
    rename: Callable[[str], str] | None = None,
    merge_adapters: bool = False,
    since: WeightSnapshot,
) -> ChangedWeights: ...


def full_weights(
    model: nn.Module,
    *,
    bucket_bytes: int = 128 << 20,
    dtype: torch.dtype | None = None,
    names: Collection[str] | None = None,
    ranks: Receivers = "all",
    rename: Callable[[str], str] | None = None,
    merge_adapters: bool = False,
    since: WeightSnapshot | None = None,
) -> FullWeights | ChangedWeights:
    """Returns the unsharded parameters and buffers of a sharded model, bucket by bucket, under the names of ``state_dict()``.

    Each bucket is a list of names with tensors over one buffer. While a program has one bucket, the next one is gathered. The memory, two
    buckets, counts as gathered parameters; a bucket's tensors lose it when the next bucket is requested, and using them then is an error,
    so clone tensors that you keep. A tied parameter is sent once, and listed under all its names, one after the other. The values are those
    of the shards, which are read and not changed. Call it between steps or between microbatches.

    Pieces of tensor parallelism, and of experts that are DTensors on a mesh of their own, are assembled, too.

    All ranks take all buckets, or stop. A rank may stop at any time, by ``close()``, by the end of a ``with``, or by an
    exception in a ``for``: it waits until the others have requested their next bucket, which raises an Error on those
    that continue. Training can continue. If the model is used before the end, the iterator is closed, which is an
    Error, too.

    Args:
        model: the root, or a module that has sharded modules below it.
        bucket_bytes: the largest size of a bucket. A larger tensor has a bucket of its own.
        dtype: floating-point tensors are converted to it before they are sent; by default they keep that of the shards. Four-bit
            weights of bitsandbytes, and what is saved of their quant_state, are never converted.
        names: the names of ``state_dict()`` to send; by default all.
        ranks: which ranks receive: "all", "first" (of the mesh), or "one_per_host". The others send what they have, and
            get buckets without tensors.
        rename: returns the receiver's name for one of ``state_dict()``; with merge_adapters, for one of the base model.
        merge_adapters: a weight with LoRA adapters of peft is sent as W + scale * B A, of all active adapters, under its name in the base
            model; adapters are not sent. The model is not changed. Each rank computes the sum for its own part, in fp32, from complete
            adapters, and rounds it once.
        since: the values of the receivers. Buckets are then lists of WeightChange, for the tensors whose bits have
            changed: single elements with their positions if these have fewer bytes, and otherwise the complete tensor.
            Each rank keeps the changes of its shards until the end.

    Raises:
        Error: on every rank, if an argument is wrong, a name is unknown, or the ranks' arguments differ; inside of a
            backward; if the snapshot is of streams of another kind; if ``rename`` gives a name twice; for adapters that are
            no such product (DoRA, those of embeddings and convolutions), or that are merged already.
        ValueError: if the model is not sharded.
    """
    states = [(state, enclosing) for _, state, enclosing in states_in(model)]
    if not states:
        raise ValueError(f"{type(model).__name__} is not sharded; call fully_shard on it first")
    problem = problem_of(bucket_bytes, dtype, names, ranks)
    if since is not None and not isinstance(since, WeightSnapshot):
        problem = problem or f"full_weights: since must be a WeightSnapshot or None, got {since!r}"
    values: dict[str, Any] = {}
    try:
        values = model.state_dict(keep_vars=True)  # Modules then have shards.
        for model_of_states in {state.model for state, _ in states}:
            if model_of_states is not None:
                model_of_states.adopt_registered()
    except RuntimeError as error:
        problem = problem or str(error)
    engines: list[_C.HookedModel] = []
    for state, enclosing in states:
        if state.model is None and enclosing is None:
            form(state, provisional=True)
        if state.model is not None and state.model.engine not in engines:
            engines.append(state.model.engine)
    entries: list[_C.WeightEntry] = []
    merged: list[_C.WeightAdapter] = []
    received: dict[str, str] = {}
    meshes: list[_C.DeviceMesh] = []
    try:
        # Of all parameters, whatever is asked for: ranks must agree on whom they ask.
        of_units = {id(p.sharded) for state, _ in states for p in state.parameters if p.owner is None}
        all_tensors = values.values() or (*model.parameters(), *model.buffers())
        others = (p for p in all_tensors if id(p) not in of_units)
        meshes = meshes_of_all([state for state, _ in states], others)
        if not problem:
            members = [state for state, _ in states]
            adapters = adapters_of(model, values, members) if merge_adapters else None
            received = names_that_come(values, names, rename, adapters)
            merged = adapters.merged_into(received) if adapters else []
            chosen = {*received, *(name for one in merged for name in (one.up, one.down))}
            entries = _entries_of({name: value for name, value in values.items() if name in chosen}, members)
    except _C.Error as error:
        problem = str(error)
    for state, _ in states:
        if state.post_optim_event is not None:  # The next forward waits for it, too.
            torch.get_device_module(state.mesh.device.type).current_stream().wait_event(state.post_optim_event)
    options = _C.FullWeightsOptions(
        bucket_bytes=1 if problem else bucket_bytes,
        dtype=None if problem else dtype,
        ranks=_RECEIVERS["all" if problem else ranks],
        adapters=merged,
        since=since._snapshot if isinstance(since, WeightSnapshot) else None,
    )
    stream = _C.WeightStream(engines, meshes, entries, received, options, problem)
    return FullWeights(stream) if since is None else ChangedWeights(stream)


def problem_of(bucket_bytes: Any, dtype: Any, names: Any, ranks: Any) -> str:
    """Returns what is wrong with the arguments, as far as the engine does not check it; empty if nothing is."""
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int):
        return f"full_weights: bucket_bytes must be an int, got {bucket_bytes!r}"
    if dtype is not None and not isinstance(dtype, torch.dtype):
        return f"full_weights: dtype must be a torch.dtype or None, got {dtype!r}"
    if names is not None and (
        isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(name, str) for name in names)
    ):
        return f"full_weights: names must be a list of names, or None, got {names!r}"
    if ranks not in _RECEIVERS:
        return f"full_weights: ranks must be one of {', '.join(map(repr, _RECEIVERS))}, got {ranks!r}"
    return ""


def _entries_of(values: dict[str, Any], states: list[MemberState]) -> list[_C.WeightEntry]:
    """Returns the tensors of a state dict. Its values are the parameters and buffers themselves, so that tied ones are known.

    Raises:
        Error: for a tensor that the engine can't put together.
    """
    sharded = {
        id(p.sharded): (state, i, p) for state in states for i, p in enumerate(state.parameters) if p.owner is None
    }
    packed = packed_among(values)
    entries: list[_C.WeightEntry] = []
    for names in names_of_tensors(values):
        name, value = names[0], values[names[0]]
        state, i, parameter = sharded.get(id(value), (None, 0, None))
        unit = None
        if state is None or parameter is None or parameter.spec is None:
            shape, dims = value.shape, dims_of(value._spec) if isinstance(value, DTensor) else []
            own = _plain(name, value)
            own_shape = own.shape
        else:
            dims = further_dims(parameter, state)
            shape = parameter.spec.shape if dims else parameter.shape
            own, own_shape, unit = _plain(name, parameter.local), parameter.shape, state.unit
        assembly = assembly_of(name, shape, own_shape, dims)
        as_is = is_of_packed(name, packed)
        entry = _C.WeightEntry(names=names, shape=shape, own=own, value=value, as_is=as_is, assembly=assembly)
        if unit is not None and parameter is not None:
            entry.set_unit(unit, i, parameter.shard_dim)
        entries.append(entry)
    return entries


def _plain(name: str, value: torch.Tensor) -> torch.Tensor:
    """Returns the values that this rank has of a tensor as an ordinary tensor over the same memory.

    Raises:
        Error: if there is none.
    """
    tensor = value.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    while type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, attribute) for attribute in tensor.__tensor_flatten__()[0]]
        if len(inner) != 1 or inner[0].shape != tensor.shape or inner[0].dtype != tensor.dtype:
            break
        tensor = inner[0]  # it adds nothing but how the parameter is gathered
    if type(tensor) is not torch.Tensor:
        raise _C.Error(
            f"full_weights: '{name}' is a {type(tensor).__name__}, whose values are no ordinary tensor; use its full_tensor(), "
            "or name the others in names"
        )
    if tensor.is_meta:
        raise _C.Error(f"full_weights: '{name}' is on the meta device: call model.to_empty(device=...) before")
    return tensor
