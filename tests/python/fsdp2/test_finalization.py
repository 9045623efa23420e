"""Gradients that are reduced by finalize_backward, and whole parameters that keep their addresses, on two ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.training import three_units as model

import libfsdp


def backward(sharded: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    sharded(torch.randn(3, 4, generator=generator)).sum().backward()


def gradients(sharded: Any) -> list[torch.Tensor]:
    return [p.grad.full_tensor() for p in sharded.parameters()]


def has_none(sharded: Any) -> bool:
    return all(p.grad is None for p in sharded.parameters())


def reduced_each(sharded: Any) -> list[torch.Tensor]:
    backward(sharded, 1)
    backward(sharded, 2)
    return gradients(sharded)


def reduced_last(sharded: Any) -> list[torch.Tensor]:
    sharded.set_requires_gradient_sync(False)
    backward(sharded, 1)
    sharded.set_requires_gradient_sync(True)
    backward(sharded, 2)
    return gradients(sharded)


@on_ranks(2)
def test_finalize_backward() -> None:
    # Between backwards with synchronization, what departures have reduced stays as it is until the end.
    expected = reduced_each(model())
    manual = model()
    manual.set_manual_backward_finalization(True)
    manual(torch.ones(1, 4))  # makes the engine
    before = libfsdp.wire_stats(manual)["reduce_scatters"]
    backward(manual, 1)
    backward(manual, 2)
    assert has_none(manual)
    # Each backward departs from one unit on its way. The two that it ends in are reduced once, for both.
    assert libfsdp.wire_stats(manual)["reduce_scatters"] - before == 2
    assert manual.finalize_backward() is None
    assert libfsdp.wire_stats(manual)["reduce_scatters"] - before == 4
    for ours, value in zip(gradients(manual), expected, strict=True):
        torch.testing.assert_close(ours, value)

    # As pipeline stages do: without synchronization, which is set again for the end alone.
    expected = reduced_last(model())
    for asynchronous, stays in product((False, True), (False, True)):
        manual = model(reshard_after_forward=not stays)
        manual.set_manual_backward_finalization(True)
        manual.set_requires_gradient_sync(False)
        manual.set_reshard_after_backward(not stays)
        backward(manual, 1)
        backward(manual, 2)
        before = libfsdp.wire_stats(manual)["reduce_scatters"]
        assert (libfsdp.memory_stats(manual)["gathered_parameters.live"] > 0) == stays
        manual.set_requires_gradient_sync(True)
        manual.set_reshard_after_backward(True)  # That is done by the end, too.
        handle = manual.finalize_backward(async_op=asynchronous)
        if asynchronous:
            assert isinstance(handle, libfsdp.GradientReductionHandle)
            assert has_none(manual)
            with pytest.raises(RuntimeError, match="wait on the previous"):
                manual.finalize_backward()
            handle.wait()
            handle.wait()
        assert libfsdp.wire_stats(manual)["reduce_scatters"] - before == 3
        assert libfsdp.memory_stats(manual)["gathered_parameters.live"] == 0
        assert all(map(torch.equal, gradients(manual), expected))
        # Switched off again, backwards finish what they have.
        manual.set_manual_backward_finalization(False)
        manual.zero_grad()
        backward(manual, 1)
        assert not has_none(manual)

    # It serves without the switch, too.
    plain = model()
    plain.set_requires_gradient_sync(False)
    backward(plain, 1)
    backward(plain, 2)
    plain.set_requires_gradient_sync(True)
    plain.finalize_backward()
    assert all(map(torch.equal, gradients(plain), expected))


@on_ranks(2)
def test_what_finalize_backward_refuses() -> None:
    sharded = model()
    sharded.finalize_backward()  # nothing to do before the first forward
    sharded.finalize_backward(async_op=True).wait()
    found: list[str] = []

    def within(gradient: torch.Tensor) -> None:
        for call in (sharded.finalize_backward, lambda: sharded.set_manual_backward_finalization(True)):
            with pytest.raises(RuntimeError, match="inside of a backward") as raised:
                call()
            found.append(str(raised.value))

    output = sharded(torch.ones(1, 4))
    output.register_hook(within)
    output.sum().backward()
    assert len(found) == 2
    with pytest.raises(RuntimeError, match="must be called on the root"):
        sharded[0].finalize_backward()


@on_ranks(2)
def test_unsharded_storage_is_kept() -> None:
    expected = reduced_each(model())
    kept = model()
    kept.set_keep_unsharded_storage(True)
    addresses = []
    for _ in range(3):
        kept[0].unshard()
        addresses.append(kept[0].weight.data_ptr())
        value = kept[0].weight.detach().clone()
        kept[0].reshard()
        assert torch.equal(kept[0].weight.full_tensor(), value)
        with torch.no_grad():
            kept[0].weight.add_(1)  # The next gather brings what was written.
    assert len(set(addresses)) == 1
    with torch.no_grad():
        for _ in range(3):
            kept[0].weight.sub_(1)
    for ours, value in zip(reduced_each(kept), expected, strict=True):
        torch.testing.assert_close(ours, value)
    assert libfsdp.memory_stats(kept)["gathered_parameters.live"] > 0
    kept.set_keep_unsharded_storage(False)
    assert libfsdp.memory_stats(kept)["gathered_parameters.live"] == 0


@on_ranks(2)
def test_a_finalization_that_fails_leaves_no_gradients() -> None:
    # Gradients that add up are converted when they are reduced, which takes memory.
    policy = libfsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    manual = model(mp_policy=policy)
    manual.set_manual_backward_finalization(True)
    manual(torch.ones(1, 4))
    fails = False

    def memory(count: int) -> torch.Tensor:
        if fails:
            raise MemoryError("none left")
        return torch.empty(count, dtype=torch.uint8)

    manual._get_fsdp_state().model.engine.set_buffer_sources(memory, memory)
    manual.set_requires_gradient_sync(False)
    backward(manual, 1)
    manual.set_requires_gradient_sync(True)
    fails = True
    with pytest.raises((RuntimeError, MemoryError), match="none left"):
        manual.finalize_backward()
    fails = False
    # What that backward has left is dropped, as after a backward that failed; what follows is whole.
    assert has_none(manual)
    for number in (2, 3):
        backward(manual, number)
    manual.finalize_backward()
    expected = model(mp_policy=policy)
    for number in (2, 3):
        backward(expected, number)
    for ours, value in zip(gradients(manual), gradients(expected), strict=True):
        torch.testing.assert_close(ours, value, rtol=0.02, atol=0.02)  # Sums are rounded to bf16, once or twice.
