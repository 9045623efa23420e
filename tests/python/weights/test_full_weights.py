"""Whole weights in a stream: those of state_dict(), gathered by FSDP2's way too, with the least bytes; and consumers that stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support import device
from support.extended import EightBits
from support.marks import at_night, on_ranks
from support.strategies import a_step, every_strategy
from support.training import CASES, DEFAULT, Options, batch_of, full, make_optimizer, seeded, shard, sharded
from support.weights import BF16, assert_exported, assert_same, gathered, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import libfsdp


@pytest.mark.parametrize(
    ("size", "case", "options"),
    [
        *((2, case, DEFAULT) for case in ("mlp", "one_unit", "tied", "batch_norm", "nested", "odd_shapes", "unused")),
        (2, "transformer", DEFAULT),
        (2, "transformer", Options(compute=BF16, reduce=torch.float32)),
        (2, "transformer", Options(offload=True)),
        (2, "transformer", Options(reshard=False)),
        *((4, case, options) for case in ("tied", "odd_shapes") for options in (DEFAULT, Options(replicas=2))),
    ],
)
@on_ranks("size")
def test_the_state_dict(case: str, options: Options) -> None:
    plain = {name: value.cpu() for name, value in seeded(CASES[case]).state_dict().items()}
    model = sharded(case, options)
    assert_same(whole(model), plain)  # before the first forward
    optimizer = make_optimizer(options, model.parameters())
    for step in range(2):
        a_step(model, case, step, optimizer)
        expected = gathered(model)
        assert_same(whole(model), expected)
    assert not torch.equal(next(iter(expected.values())), next(iter(plain.values())))
    for bucket_bytes in (1, 1000):
        assert_exported(model, expected, bucket_bytes)
    a_step(model, case, 2, optimizer)
    assert_same(whole(model), gathered(model))


@pytest.mark.parametrize("size", [2, at_night(4)])
@on_ranks("size")
def test_every_strategy() -> None:
    for model, optimizer, _ in every_strategy():
        assert_exported(model, gathered(model), 700)
        a_step(model, "transformer", 1, optimizer)
        assert_same(whole(model), gathered(model))


@on_ranks(2)
def test_extended_and_complex_parameters_and_buffers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 5), nn.Linear(5, 3))
    model[1].weight = nn.Parameter(EightBits(model[1].weight.detach()))
    model[2].register_parameter("turn", nn.Parameter(torch.randn(3, 2, dtype=torch.complex64)))
    model[2].register_buffer("scratch", torch.ones(3), persistent=False)
    model[2].register_buffer("count", torch.arange(3))
    expected = {name: (v.data_ if isinstance(v, EightBits) else v).clone() for name, v in model.state_dict().items()}
    for layer in model:
        libfsdp.fully_shard(layer)
    libfsdp.fully_shard(model)
    for options in ({}, {"bucket_bytes": 8}):
        assert_same(whole(model, **options), expected)
    kept = {name for name, value in expected.items() if not value.is_floating_point()}
    for name, value in whole(model, dtype=BF16).items():
        assert value.dtype == (expected[name].dtype if name in kept else BF16)


@on_ranks(2)
def test_modules_whose_root_is_not_sharded() -> None:
    case = CASES["transformer"]
    model: Any = seeded(case)
    expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    for block in model.blocks:
        libfsdp.fully_shard(block)
    assert_same(whole(model), expected)
    assert_same(whole(model, bucket_bytes=900, ranks="first"), expected if dist.get_rank() == 0 else {})
    part = whole(model.blocks[1])
    assert_same(part, {name: expected["blocks.1." + name] for name in part})
    model(torch.zeros(2, 8, dtype=torch.long, device=device.TYPE)).sum().backward()
    assert_same(whole(model), expected)


@on_ranks(2)
def test_parameters_that_were_assigned() -> None:
    """State that was assigned since the last forward, of another dtype at last, for which units are made again."""
    model = sharded("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    a_step(model, "mlp", 0, optimizer)
    for dtype in (torch.float32, torch.float64):
        state = {name: (2 * value.detach()).to(dtype) for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        expected = {name: full(value) for name, value in state.items()}
        assert_same(whole(model), expected)
        assert_same(gathered(model), expected)
    model(torch.randn(5, 6, dtype=torch.float64)).sum().backward()
    assert_same(whole(model), expected)


@pytest.mark.parametrize("case", ["mlp", "tied"])
@pytest.mark.parametrize("size", [2, 4])
@on_ranks("size")
def test_the_least_bytes_and_two_buckets(case: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = sharded(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    a_step(model, case, 0, optimizer)
    own = sum(p._local_tensor.numel() * 4 for p in model.parameters())
    largest = max(p.numel() * 4 for p in model.parameters())

    def sent(**options: Any) -> int:
        before, memory = libfsdp.wire_stats(model), libfsdp.memory_stats(model)
        whole(model, **options)
        after = libfsdp.memory_stats(model)
        assert after["gathered_parameters.live"] == memory["gathered_parameters.live"]
        assert after["total.live"] == memory["total.live"]
        return libfsdp.wire_stats(model)["all_gather_bytes"] - before["all_gather_bytes"]

    for bucket_bytes in (1, 600, 1 << 20):
        assert sent(bucket_bytes=bucket_bytes) == (size - 1) * own  # nothing of the padding of uneven shards
        assert sent(bucket_bytes=bucket_bytes, dtype=BF16) == (size - 1) * own // 2
        assert sent(bucket_bytes=bucket_bytes, ranks="first") == (0 if rank == 0 else own)
    live = libfsdp.memory_stats(model)["gathered_parameters.live"]
    peak = 0
    with libfsdp.full_weights(model, bucket_bytes=300) as weights:
        for bucket in weights:
            assert bucket.flat is not None
            assert len({tensor.data_ptr() for _, tensor in bucket}) == 1 or bucket.flat.numel() <= 300
            peak = max(peak, libfsdp.memory_stats(model)["gathered_parameters.live"] - live)
    assert 0 < peak <= 2 * ((largest + 63) // 64 * 64)


@pytest.mark.parametrize("reshard", [None, False])
@on_ranks(2)
def test_between_microbatches(reshard: bool | None) -> None:
    case, results = CASES["transformer"], []
    for exports in (False, True):
        model = sharded("transformer", Options(reshard=reshard))
        optimizer = make_optimizer(DEFAULT, model.parameters())
        before = gathered(model)
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            case.loss(model, batch_of(case, 0, micro, dist.get_rank())).backward()
            if exports:
                assert_same(whole(model, bucket_bytes=4000), before)
        optimizer.step()
        results.append(gathered(model))
    assert_same(results[1], results[0])


class TheirOwn(Exception):
    """What a consumer raises."""


@pytest.mark.parametrize(
    ("how", "at", "who"),
    [
        *((how, *one) for how in ("closes", "raises", "sleeps") for one in ((0, 0), (1, 1), (3, 0), (4, 1), (5, 0))),
        *(("leaves", *one) for one in ((0, 1), (2, 0), (4, 1))),
    ],
)
@on_ranks(2)
def test_a_rank_may_stop_or_wait(how: str, at: int, who: int) -> None:
    """A forward ends a stream that is left open."""
    model, twin = (sharded("mlp") for _ in range(2))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    for one, optimizer in zip((model, twin), optimizers, strict=True):
        a_step(one, "mlp", 0, optimizer)
    mine = dist.get_rank() == who
    expected: Any = None
    if mine and how != "sleeps":
        expected = {"raises": TheirOwn, "leaves": libfsdp.Error}.get(how)
    elif how != "sleeps" and at + 1 < 6:
        expected = libfsdp.Error
    seen: BaseException | None = None
    weights = libfsdp.full_weights(model, bucket_bytes=1)
    assert len(weights) == 6
    try:
        for k, _ in enumerate(weights):
            if not mine or k != at:
                continue
            if how == "sleeps":
                time.sleep(0.3)
            elif how == "raises":
                raise TheirOwn
            else:
                break
        if mine and how == "closes":
            weights.close()
        if mine and how == "leaves":
            a_step(model, "mlp", 1, optimizers[0])
    except (TheirOwn, libfsdp.Error) as error:
        seen = error
    if how == "raises":
        weights.close()  # of those that hold it in a variable
    assert type(seen) is (expected or type(None)), seen
    if mine and how == "leaves":
        assert f"left open before bucket {min(at + 3, 6)} of 6" in str(seen)
    elif expected is libfsdp.Error:
        assert f"rank {who} has stopped before bucket {min(at + 3, 6)} of 6" in str(seen)
    for step in (1, 2):
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            a_step(one, "mlp", step, optimizer)
    assert_same(gathered(model), gathered(twin))
    assert_same(whole(model), gathered(twin))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, _: dict[str, Any]) -> None:
    optimizer.step()


def loads_a_state_dict(model: nn.Module, _: torch.optim.Optimizer, earlier: dict[str, Any]) -> None:
    model.load_state_dict(earlier)


def loads(model: nn.Module, _: torch.optim.Optimizer, earlier: dict[str, Any]) -> None:
    libfsdp.load(earlier["folder"], model)


def copies_into_a_parameter(model: nn.Module, _: torch.optim.Optimizer, __: dict[str, Any]) -> None:
    with torch.no_grad():
        list(model.parameters())[-1].mul_(2)


def copies_into_a_shard(model: nn.Module, _: torch.optim.Optimizer, __: dict[str, Any]) -> None:
    with torch.no_grad():
        cast(DTensor, list(model.parameters())[-1]).to_local().mul_(2)


def copies_into_a_buffer(model: nn.Module, _: torch.optim.Optimizer, __: dict[str, Any]) -> None:
    model.counted.add_(1)


Write = Callable[[nn.Module, torch.optim.Optimizer, Any], None]
WRITES = [steps, loads_a_state_dict, loads, copies_into_a_parameter, copies_into_a_shard, copies_into_a_buffer]


@pytest.mark.parametrize(
    ("size", "write", "at", "who", "source"),
    [
        # All ranks load.
        *((2, write, 2, who, False) for write in WRITES for who in (None, 1) if write is not loads or who is None),
        *((4, copies_into_a_shard, at, 1, False) for at in (0, 5)),  # behind the first bucket, and before the last
        *((2, write, 1, None, True) for write in (steps, copies_into_a_shard)),
    ],
)
@on_ranks("size")
def test_a_write_between_two_buckets_is_an_error_on_all_ranks(
    write: Write, at: int, who: int | None, source: bool, tmp_path: Path
) -> None:
    """Some rank or all of them write to the model: nobody gets weights of two moments."""
    folder = tmp_path / "checkpoint"
    model = seeded(CASES["mlp"])
    model.register_buffer("counted", torch.zeros(4))
    model = shard(model, CASES["mlp"], "libfsdp", DEFAULT)
    optimizer = make_optimizer(DEFAULT, model.parameters())
    a_step(model, "mlp", 0, optimizer)
    libfsdp.save(folder, model)
    earlier: Any = {k: v.detach().clone() for k, v in model.state_dict().items()}
    a_step(model, "mlp", 1, optimizer)
    CASES["mlp"].loss(model, batch_of(CASES["mlp"], 0, 2, dist.get_rank())).backward()
    before = whole(model)
    mine = who is None or dist.get_rank() == who
    is_noticed = write in (steps, loads_a_state_dict, loads)  # by the one who writes
    got: dict[str, torch.Tensor] = {}
    seen: BaseException | None = None
    weights: Any = (libfsdp.WeightSource if source else libfsdp.full_weights)(model, bucket_bytes=1)
    taken = 0
    try:
        for bucket in weights:
            got |= {n: t.clone() for n, t in ([bucket] if source else bucket)}
            taken += 1
            if taken == at + 1 and mine:
                write(model, optimizer, {"folder": folder} if write is loads else earlier)
    except libfsdp.Error as error:
        seen = error
    assert isinstance(seen, libfsdp.Error), seen
    if not mine:
        assert f"rank {who} has {'stopped' if is_noticed else 'failed'} before bucket" in str(seen)
    elif is_noticed:
        assert "was left open before bucket" in str(seen)
    else:
        assert "was written while the weights were exported" in str(seen)
    assert set(got) < set(before)
    assert_same(got, {name: before[name] for name in got})
    after = whole(model)
    assert_same(after, gathered(model))
    if is_noticed:  # Nothing was written.
        assert_same(after, before)


@on_ranks(2)
def test_an_exception_closes_a_stream_without_a_name() -> None:
    """The iterator is collected as the exception leaves the loop, which closes it."""
    model = sharded("mlp")
    seen: BaseException | None = None
    try:
        for k, _ in enumerate(libfsdp.full_weights(model, bucket_bytes=1)):
            if dist.get_rank() == 0 and k == 1:
                raise TheirOwn
    except (TheirOwn, libfsdp.Error) as error:
        seen = error
    assert type(seen) is (TheirOwn if dist.get_rank() == 0 else libfsdp.Error)
    assert_same(whole(model), gathered(model))


@on_ranks(2)
def test_a_tensor_of_an_earlier_bucket_is_an_error() -> None:
    model = sharded("mlp")
    kept = [bucket[0][1] for bucket in libfsdp.full_weights(model, bucket_bytes=1)]
    for tensor in kept:
        with pytest.raises(RuntimeError, match=r"belongs to an earlier bucket|storage"):
            tensor.add(1)


@on_ranks(2)
def test_what_is_wrong_is_one_error_on_every_rank() -> None:
    rank = dist.get_rank()
    model = sharded("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    a_step(model, "mlp", 0, optimizer)

    def refused(text: str, **options: Any) -> None:
        with pytest.raises(libfsdp.Error, match=text):
            libfsdp.full_weights(model, **options)
        a_step(model, "mlp", 1, optimizer)

    refused("bucket_bytes is 0", bucket_bytes=0)
    refused("bucket_bytes must be an int, got 1.5", bucket_bytes=1.5)
    refused("dtype must be a torch.dtype or None, got 'bf16'", dtype="bf16")
    refused("dtype Long is no floating-point dtype", dtype=torch.int64)
    refused("names must be a list of names, or None, got 'layers.0.bias'", names="layers.0.bias")
    refused("no parameter or buffer 'layers.9.bias'", names=["layers.0.bias", "layers.9.bias"])
    refused("ranks must be one of 'all', 'first', 'one_per_host', got 'rank 0'", ranks="rank 0")
    refused("rank 0 has 'bucket_bytes 5', rank 1 has 'bucket_bytes 6'", bucket_bytes=5 + rank)
    refused("no parameter or buffer 'layers.1'", names=[f"layers.{rank}.bias"] if rank == 0 else ["layers.1"])
    refused("rank 0 has 'ranks all', rank 1 has 'ranks the first'", ranks="all" if rank == 0 else "first")
    refused("bucket_bytes must be an int", bucket_bytes=None if rank == 0 else 9)
    some = whole(model, names=["layers.2.bias", "layers.0.weight"])
    assert_same(some, {name: value for name, value in gathered(model).items() if name in some})
    assert len(some) == 2
    assert whole(model, names=[]) == {}

    def fails_on_one(name: str) -> str:
        if rank == 1:
            raise KeyError(name)
        return name

    refused("rename failed for 'layers.0.weight': KeyError: 'layers.0.weight'", rename=fails_on_one)
    refused("rename must return a name, and returned None for 'layers.0.weight'", rename=lambda _: None)
    refused(
        "'layers.0.weight' and 'layers.1.weight' would both be named 'weight'", rename=lambda name: name.split(".")[-1]
    )
    refused("rank 0 has ''0.layers.0.weight' .*, rank 1 has ''1.layers.0.weight'", rename=f"{rank}.{{}}".format)
    refused("rename failed for 'layers.0.weight': TypeError", rename=5)
    with pytest.raises(ValueError, match="Linear is not sharded; call fully_shard on it first"):
        libfsdp.full_weights(nn.Linear(2, 2))

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            with pytest.raises(libfsdp.Error, match="inside of a backward"):
                libfsdp.full_weights(model)
            return gradient

    InBackward.apply(model(torch.randn(5, 6))).sum().backward()


@on_ranks(2)
def test_names_of_the_receiver() -> None:
    """names are those of the model; what comes has the receiver's, a tied parameter all of them."""
    for case in ("tied", "batch_norm"):
        model = sharded(case)
        a_step(model, case, 0, torch.optim.SGD(model.parameters(), lr=0.1))
        expected = {f"engine.{name}": value for name, value in gathered(model).items()}
        found = whole(model, rename="engine.{}".format, bucket_bytes=700)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        some = list(expected)[1::2]
        only = whole(model, rename="engine.{}".format, names=[name.removeprefix("engine.") for name in some])
        assert only.keys() == set(some)
    snapshot = libfsdp.WeightSnapshot()
    for _ in range(2):
        for bucket in libfsdp.full_weights(model, rename="engine.{}".format, since=snapshot):
            assert all(change.name in expected for change in bucket)
    with pytest.raises(libfsdp.Error, match=r"since was used for 'engine\."):
        libfsdp.full_weights(model, since=snapshot)
