"""Weights for programs that ask first what will come: both say the same, as the interface of vLLM's trainer side has it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.training import CASES, batch_of, full, sharded
from support.weights import BF16, gathered
from torch import Tensor, nn

import libfsdp


def a_step(model: nn.Module, case_name: str) -> None:
    case = CASES[case_name]
    case.loss(model, batch_of(case, 0, 0, dist.get_rank())).backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)
    model.zero_grad()


def described(pairs: list[tuple[str, Tensor]]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]


@pytest.mark.parametrize("case", ["tied", "batch_norm", "nested"])
@on_ranks(2)
def test_metadata_and_iteration_say_the_same(case: str) -> None:
    model = sharded(case)
    some = list(model.state_dict())[1::2]
    kinds: list[dict[str, Any]] = [
        {},
        {"dtype": BF16, "bucket_bytes": 600},
        {"names": some},
        {"rename": "model.{}".format},
    ]
    for trained in (False, True):
        for kind in kinds:
            source = libfsdp.WeightSource(model, **kind)
            pairs = list(source)
            assert source.metadata() == described(pairs)
            # Also those of buckets that are gone by now.
            for name, tensor in pairs:
                own = name.removeprefix("model.") if "rename" in kind else name
                whole = full(model.state_dict()[own])
                assert torch.equal(tensor.cpu(), whole.to(tensor.dtype)), (trained, kind, name)
            assert len(pairs) == len(some if "names" in kind else model.state_dict())
        a_step(model, case)


@on_ranks(2)
def test_metadata_needs_no_other_rank() -> None:
    model = sharded("tied")
    source = libfsdp.WeightSource(model, ranks="first")
    before = None
    for _ in range(2):  # before the first forward, and after a step
        if dist.get_rank() == 0:  # nobody waits for the other rank
            found = source.metadata()
            assert before is None or libfsdp.wire_stats(model) == before
        dist.barrier()
        assert described(list(source)) == (found if dist.get_rank() == 0 else [])
        a_step(model, "tied")
        before = libfsdp.wire_stats(model)


@on_ranks(2)
def test_each_iteration_has_the_present_weights() -> None:
    model = sharded("mlp")
    source = libfsdp.WeightSource(model)
    first = dict(source)
    a_step(model, "mlp")
    second = dict(source)
    for name, value in model.state_dict().items():
        assert torch.equal(second[name].cpu(), full(value))
        assert not torch.equal(first[name], second[name])


class TheirSource(ABC):
    """What vLLM's trainer side asks of a source: what will come, with the attributes name, dtype and shape; and whole tensors
    in that order, anew for each iteration. All ranks iterate."""

    @abstractmethod
    def metadata(self) -> list[Any]: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class OurSource(libfsdp.WeightSource, TheirSource):
    """A class of theirs, for programs that ask for one."""


def packed(tensors: list[Tensor]) -> Tensor:
    return torch.cat([one.view(-1).view(torch.uint8) for one in tensors]).cpu()


class Sender:
    """A sender as vLLM's that packs: one rank sends what will come, and then packs of bytes, each of several tensors, which
    it collects before it copies any. The other ranks only iterate."""

    def __init__(self, source: TheirSource, pack_bytes: int, *, sends: bool) -> None:
        self.source = source
        self.pack_bytes = pack_bytes
        self.sends = sends

    def packs(self) -> tuple[list[Any], list[Tensor]]:
        coming, packs, collected = self.source.metadata(), [], []
        if not self.sends:
            for _ in self.source:
                pass
            return [], []
        size = 0
        for declared, (name, tensor) in zip(coming, self.source, strict=True):
            assert (declared.name, declared.dtype, declared.shape) == (name, tensor.dtype, tuple(tensor.shape))
            collected.append(tensor)
            size += tensor.nbytes
            if size > self.pack_bytes:
                packs.append(packed(collected))
                collected, size = [], 0
        if collected:
            packs.append(packed(collected))
        return coming, packs


def unpacked(coming: list[Any], packs: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The receiver's part: it knows what was declared, and bytes."""
    flat = torch.cat(packs)
    at = 0
    for declared in coming:
        size = declared.dtype.itemsize * torch.Size(declared.shape).numel()
        yield declared.name, flat[at : at + size].clone().view(declared.dtype).view(declared.shape)
        at += size
    assert at == flat.numel()


@pytest.mark.parametrize("pack_bytes", [0, 2000, 1 << 20])
@on_ranks(2)
def test_a_sender_that_packs(pack_bytes: int) -> None:
    model = sharded("tied")
    receiver = CASES["tied"].build()
    for ranks_of in ("first", "all"):
        a_step(model, "tied")
        source = OurSource(model, bucket_bytes=300, ranks=ranks_of)
        assert isinstance(source, TheirSource)
        coming, packs = Sender(source, pack_bytes, sends=dist.get_rank() == 0).packs()
        if dist.get_rank() == 0:
            libfsdp.load_weights(receiver, unpacked(coming, packs))
        expected = gathered(model)
        if dist.get_rank() == 0:
            for name, value in receiver.state_dict().items():
                assert torch.equal(value, expected[name]), name


@on_ranks(2)
def test_a_rank_that_stops() -> None:
    model = sharded("mlp")
    source = libfsdp.WeightSource(model, bucket_bytes=1)
    if dist.get_rank() == 1:
        next(iter(source))  # and is gone
    else:
        with pytest.raises(libfsdp.Error, match="rank 1 has stopped before bucket"):
            list(source)
    a_step(model, "mlp")
    assert len(list(source)) == 6


@on_ranks(2)
def test_what_is_wrong() -> None:
    model = sharded("mlp")

    def refused(text: str, **options: Any) -> None:
        source = libfsdp.WeightSource(model, **options)
        with pytest.raises(libfsdp.Error, match=text):
            source.metadata()
        if "rename" not in options:
            with pytest.raises(libfsdp.Error, match=text):
                list(source)

    refused("bucket_bytes must be an int, got None", bucket_bytes=None)
    refused("names must be a list of names, or None, got 'layers.0.bias'", names="layers.0.bias")
    refused("no parameter or buffer 'layers.9.bias'", names=["layers.0.bias", "layers.9.bias"])
    refused("'layers.0.weight' and 'layers.0.bias' would both be named 'x'", rename=lambda _: "x")
    with pytest.raises(ValueError, match="Linear is not sharded; call fully_shard on it first"):
        libfsdp.WeightSource(nn.Linear(2, 2))
