"""Parameters whose tensors define how they are gathered, by ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from libfsdp._core.function_calls import weak_method

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from libfsdp import _C
    from libfsdp._core.quantized_form import QuantizedForm
    from libfsdp._core.sharded_parameter import ShardedParameter
    from libfsdp._core.sharding_options import ShardingOptions


def is_extended(local: torch.Tensor) -> bool:
    """True if the tensor, or its class, defines how it is gathered.

    Raises:
        AssertionError: if it has one of the two methods only.
    """
    pre, post = hasattr(local, "fsdp_pre_all_gather"), hasattr(local, "fsdp_post_all_gather")
    if pre != post:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions: "
            f"{type(local)} has only one of them"
        )
    return pre


def refuse_extended(parameters: Iterable[ShardedParameter], options: ShardingOptions, *, is_size: bool) -> None:
    """Refuses options that extended parameters can't have.

    Raises:
        NotImplementedError: if there are such parameters, and such options.
    """
    extended = [p for p in parameters if p.extended]
    quantized = all(p.quantized is not None for p in extended)
    gathered = ("optim", "optim_grads", "optim_grads_params") if quantized else ("optim_grads_params",)
    reasons = (
        (is_size, "with a number for reshard_after_forward"),
        (options.placements not in gathered, f"with placements '{options.placements}'"),
        (options.outer_sharded and not quantized, "with outer_placements 'optim'"),
        (
            any(p.computes_in is not None and p.quantized is None for p in extended),
            "with a main_params_dtype other than theirs",
        ),
        (any(p.gather_format is not None for p in extended), "together with a gather_format"),
        (
            any(p.shard_dim != 0 for p in extended),
            "for parameters that are cut along another dimension than the first",
        ),
    )
    for refused, when in reasons:
        if refused and extended:
            names = [p.name for p in extended]
            raise NotImplementedError(f"fsdp_pre_all_gather (of parameters {names}) is not supported {when}")


def copy_of_rows(local: torch.Tensor, begin: int, rows: int, *, to_host: bool) -> torch.Tensor:
    """Copies rows of a tensor of any class to memory of their own."""
    piece = local.narrow(0, begin, rows)
    copy = local.new_zeros(piece.size())
    if rows > 0:
        copy.copy_(piece)
    return copy.cpu() if to_host and not copy.is_meta else copy


@dataclass
class _Gather:
    """The gather of one parameter, from the shards to the unsharded parameter.

    Attributes:
        index: the index of the parameter in the unit.
        padded: the shape of the first rank's main parameters.
        outputs: the tensors that receive the gather, flat, one for each tensor that is sent; their memory comes and
            goes.
        inputs: the tensors that are being sent.
        sizes: the sizes of the tensors that the extension gave to be sent.
        metadata: the value that the extension's first function passes to its second.
        encoded: whether ranks send a quantized parameter in quantized form.
        shard: if the outer ranks cut shards, too: the tensors that this inner rank sends, or its rows if
            `shard_encoded` is False.
        shard_encoded: whether the outer ranks have quantized their parts of `shard`.
        inner: the memory of the unsharded parameter that the extension has allocated, with its size in bytes.
    """

    index: int
    parameter: ShardedParameter
    padded: torch.Size
    outputs: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    sizes: list[torch.Size] = field(default_factory=list)
    metadata: Any = None
    encoded: bool = False
    shard: list[torch.Tensor] = field(default_factory=list)
    shard_encoded: bool = False
    inner: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)


def _padded(tensor: torch.Tensor, local: torch.Tensor, padded: torch.Size) -> torch.Tensor:
    """Pads a shard with zeros to the number of rows that the first rank has, unless the extension has padded it."""
    missing = padded[0] - local.size(0)
    if missing == 0 or tensor.ndim != local.ndim or tensor.size(0) != local.size(0):
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _encode(gather: _Gather, rows: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors to send for a quantized parameter's rows: their quantized form, if rows can be quantized separately."""
    assert gather.parameter.quantized is not None
    encoded = gather.parameter.quantized.encode(rows, gather.parameter.shape)
    gather.encoded = encoded is not None
    return [rows] if encoded is None else encoded


class ExtendedParameters:
    """The extended parameters of one unit. The engine calls start, finish and free, on whatever thread gathers."""

    def __init__(
        self,
        parameters: dict[int, ShardedParameter],
        shard_mesh: DeviceMesh,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        adopt_whole: Callable[[int, torch.Tensor], None],
        *,
        outer_pieces: int,
    ) -> None:
        """Makes the gathers of the parameters.

        Args:
            parameters: the parameters by their positions in the unit.
            adopt_whole: called with a parameter's unsharded tensor when it is first made.
            outer_pieces: the number of pieces into which the outer ranks cut each shard.
        """
        self._mesh = shard_mesh
        self._device = device
        self._policy = policy
        self._adopt_whole = weak_method(adopt_whole)
        self._outer_pieces = outer_pieces
        pieces = shard_mesh.size() * outer_pieces
        self._gathers = [
            _Gather(i, p, torch.Size([-(-p.shape[0] // pieces), *p.shape[1:]])) for i, p in parameters.items()
        ]
        self._unit: _C.ShownUnit | None = None
        self._writes: torch.Tensor | None = None  # its version shows writes to main parameters
        self._writes_seen = -1
        self._writes_sent = -1

    def attach_to(self, unit: _C.ShownUnit) -> None:
        """Makes the unit gather these parameters by this object, which the unit does not keep alive."""
        self._unit = unit
        if any(gather.parameter.quantized is not None for gather in self._gathers):
            self._writes = unit.watch_writes(self._gathers[0].index)
        unit.set_extension(weak_method(self.start), weak_method(self.finish), weak_method(self.free))

    @torch.inference_mode(False)  # Tensors that are made here also serve training.
    @torch.no_grad()
    def start(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the tensors to gather, as bytes: pairs of the whole, which is filled, and this rank's part of it."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        quantized = self._quantized_inputs()
        for gather in self._gathers:
            inputs = quantized.get(gather.index) or self._inputs_of(gather)
            gather.sizes = [tensor.size() for tensor in inputs]
            gather.inputs = [_as_bytes(tensor) for tensor in inputs]
            if not gather.outputs:
                gather.outputs = [
                    torch.empty(tensor.numel() * self._mesh.size(), dtype=tensor.dtype, device=self._device)
                    for tensor in inputs
                ]
            for output in gather.outputs:
                output.untyped_storage().resize_(output.nbytes)
            for output, tensor in zip(gather.outputs, gather.inputs, strict=True):
                pairs.append((output.view(torch.uint8), tensor))
        return pairs

    def _quantized_inputs(self) -> dict[int, Sequence[torch.Tensor]]:
        """Returns the tensors that this rank sends for each quantized parameter, by its position in the unit."""
        gathers = [gather for gather in self._gathers if gather.parameter.quantized is not None]
        if not gathers:
            return {}
        assert self._writes is not None
        now = self._writes._version
        written = now != self._writes_seen
        rows: list[torch.Tensor] = []
        if written or self._outer_pieces == 1:
            rows = [self._rows_of(gather) for gather in gathers]
        if written:
            self._renew(gathers, rows)
        if self._outer_pieces > 1:  # The result of the outer gathers serves until main parameters are written again.
            if written:
                self._gather_shards(gathers, rows)
            rows = [gather.shard[0] for gather in gathers]
        sent: dict[int, Sequence[torch.Tensor]] = {}
        for gather, own in zip(gathers, rows, strict=True):
            if gather.shard_encoded:
                gather.encoded, sent[gather.index] = True, gather.shard
            else:
                sent[gather.index] = _encode(gather, own)
        self._writes_sent = now
        return sent

    def _rows_of(self, gather: _Gather) -> torch.Tensor:
        """Returns this rank's main parameters in the dtype of the computation, before they are quantized."""
        local = gather.parameter.local.to(self._device)
        return _padded(local.to(gather.parameter.compute_dtype(self._policy)), local, gather.padded)

    def _renew(self, gathers: list[_Gather], rows: list[torch.Tensor]) -> None:
        """Notifies the forms that new values are quantized from now on.

        Values that all ranks need are exchanged for all parameters together.
        """
        asking: list[QuantizedForm] = []
        largest: list[torch.Tensor] = []
        for gather, own in zip(gathers, rows, strict=True):
            form = gather.parameter.quantized
            assert form is not None
            value = form.renew(own, gather.parameter.shape, gather.parameter.whole)
            if value is not None:
                asking.append(form)
                largest.append(value.float())
        if not asking:
            return
        assert self._unit is not None
        known = torch.cat(largest)
        for outer, ranks in ((True, self._outer_pieces), (False, self._mesh.size())):
            if ranks > 1:
                every = known.new_empty(ranks, len(asking))
                self._unit.gather_now([(_as_bytes(every), _as_bytes(known))], outer)
                known = every.amax(0)
        for form, value in zip(asking, known, strict=True):
            form.set_largest(value)

    def _gather_shards(self, gathers: list[_Gather], rows: list[torch.Tensor]) -> None:
        """Gathers shards over the outer ranks, in eight bits if the rows of one rank can be quantized separately."""
        assert self._unit is not None
        pairs = []
        for gather, own in zip(gathers, rows, strict=True):
            parts = _encode(gather, own)
            gather.shard_encoded = gather.encoded
            if not gather.shard:
                gather.shard = [part.new_empty(part.size(0) * self._outer_pieces, *part.shape[1:]) for part in parts]
            pairs += [(_as_bytes(whole), _as_bytes(part)) for whole, part in zip(gather.shard, parts, strict=True)]
        self._unit.gather_now(pairs, True)

    def _inputs_of(self, gather: _Gather) -> tuple[torch.Tensor, ...]:
        parameter = gather.parameter
        local = parameter.local if parameter.local.device == self._device else parameter.local.to(self._device)
        before: Any = local.fsdp_pre_all_gather
        signature = inspect.signature(before)
        count = len(signature.parameters)
        if count not in (1, 5):
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather: {signature}\nExpects fsdp_pre_all_gather(self, mesh: DeviceMesh, "
                "outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, "
                "mp_policy: MixedPrecisionPolicy), or the older one with mesh alone"
            )
        if count == 1:
            inputs, gather.metadata = before(self._mesh)
        else:
            stride = torch.empty(parameter.shape, device="meta").stride()
            inputs, gather.metadata = before(
                self._mesh, parameter.shape, stride, parameter.places[0].module, self._policy
            )
        return tuple(_padded(tensor, local, gather.padded) for tensor in inputs)

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self) -> None:
        """Called when the data have arrived. Makes the unsharded parameters, or fills those that exist."""
        for gather in self._gathers:
            parameter = gather.parameter
            arrived = tuple(
                output.view(-1, *size[1:]) for output, size in zip(gather.outputs, gather.sizes, strict=True)
            )
            if gather.encoded:
                self._decode(gather, list(arrived))
                continue
            if parameter.quantized is not None:
                self._quantize(gather, parameter.quantized, arrived[0].narrow(0, 0, parameter.shape[0]))
                continue
            dtype = parameter.compute_dtype(self._policy)
            after: Any = parameter.local.fsdp_post_all_gather
            if parameter.whole is None:
                whole, inner = after(arrived, gather.metadata, dtype)
                if whole.size() != parameter.shape:
                    stride = torch.empty(parameter.shape, device="meta").stride()
                    whole = torch.as_strided(whole, parameter.shape, stride, storage_offset=0)
                self._adopt(gather, whole, inner)
            else:
                for storage, size in gather.inner:
                    storage.resize_(size)
                # The values are the same that autograd has saved, so this must not count as a write.
                with _unsafe_preserve_version_counter(parameter.whole):
                    after(arrived, gather.metadata, dtype, out=parameter.whole)
            gather.inputs = []
            gather.metadata = None
        self._writes_seen = self._writes_sent  # Only now, because a gather that failed must be repeated.

    def _adopt(self, gather: _Gather, whole: torch.Tensor, inner: Iterable[torch.Tensor]) -> None:
        known = {output.untyped_storage()._cdata for output in gather.outputs}
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in inner}
        gather.inner = [(s, s.nbytes()) for data, s in storages.items() if data not in known]
        self._adopt_whole(gather.index, whole)

    def _quantize(self, gather: _Gather, form: QuantizedForm, values: torch.Tensor) -> None:
        """Quantizes the values that arrived, whose memory is then free."""
        whole = gather.parameter.whole
        if whole is None:
            self._adopt(gather, *form.make(values))
        else:
            for storage, size in gather.inner:
                storage.resize_(size)
            with _unsafe_preserve_version_counter(whole):
                form.fill(values, whole)
        for output in gather.outputs:
            output.untyped_storage().resize_(0)
        gather.inputs = []

    def _decode(self, gather: _Gather, arrived: list[torch.Tensor]) -> None:
        parameter = gather.parameter
        assert parameter.quantized is not None
        if parameter.whole is None:
            dtype = parameter.compute_dtype(self._policy)
            self._adopt(gather, parameter.quantized.decode(parameter.name, arrived, parameter.shape, dtype), [])
        else:
            parameter.quantized.decoded(parameter.name, arrived, parameter.whole)
        gather.inputs = []

    def free(self) -> None:
        """Frees the unsharded parameters' memory."""
        for gather in self._gathers:
            gather.inputs = []
            gather.metadata = None
            for output in gather.outputs:
                output.untyped_storage().resize_(0)
            for storage, _ in gather.inner:
                storage.resize_(0)
            if gather.parameter.quantized is not None and gather.parameter.whole is not None:
                gather.parameter.quantized.freed(gather.parameter.whole)
