"""What has changed in the weights: receivers that apply it have the bits of a whole export, for less bytes."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import at_night, on_ranks
from support.megatron import batch, plain_model
from support.megatron import shard as shard_as_megatron
from support.strategies import a_step, every_strategy
from support.training import CASES, Options, seeded, sharded
from support.weights import BF16, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import libfsdp
from libfsdp import WeightChange, WeightSnapshot, apply_changes, full_weights

F8 = torch.float8_e4m3fn


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


class Receiver:
    """Has a copy of the weights, in another process as far as it can tell, and never sees the model."""

    def __init__(self, model: nn.Module, snapshot: WeightSnapshot, **options: Any) -> None:
        self.model, self.snapshot, self.options = model, snapshot, options
        self.weights = {name: torch.zeros_like(value) for name, value in whole(model, **options).items()}
        self.received_bytes = self.partial = 0

    def take(self, stop_at: int | None = None, **options: Any) -> float:
        """Applies all that has changed, or as many buckets, and then stops. Returns the changed fraction."""
        self.received_bytes = self.partial = 0
        with full_weights(self.model, since=self.snapshot, **self.options, **options) as changes:
            for k, bucket in enumerate(changes):
                if k == stop_at:
                    break
                for change in bucket:
                    self.partial += change.positions is not None
                    sent = [tensor for tensor in change[2:] if tensor is not None]
                    self.received_bytes += sum(tensor.nbytes for tensor in sent)
                    for tensor in sent:
                        assert bucket.flat is not None
                        assert tensor.data_ptr() % 64 == 0 or tensor.numel() == 0
                        assert tensor.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
                apply_changes(self.weights, [_sent(bucket)])
            return changes.changed_fraction

    def check(self) -> None:
        assert_same_bits(self.weights, whole(self.model, **self.options))


def _sent(bucket: list[WeightChange]) -> list[WeightChange]:
    """A bucket as another process gets it."""
    file = io.BytesIO()
    torch.save([[x.clone() if isinstance(x, Tensor) else x for x in change] for change in bucket], file)
    file.seek(0)
    return [WeightChange(*change) for change in torch.load(file, map_location="cpu")]


def own_shards(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]


def disturb(shard: Tensor, share: float, generator: torch.Generator, *, any_bits: bool) -> None:
    """Gives a share of a shard's elements other values, among them those that compare as equal, or never do."""
    flat = shard.view(-1)
    chosen = torch.rand(flat.shape, generator=generator) < share
    count = int(chosen.sum())
    if any_bits:
        bits = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator).to(torch.int32)
        values = bits.view(torch.float32)
        values[::3] = torch.tensor(float("nan"))
    else:
        values = torch.randn(count, generator=generator)
    values[1::3] = torch.tensor([0.0, -0.0]).repeat(count)[: len(values[1::3])]
    flat[chosen.to(flat.device)] = values.to(flat.device)


@pytest.mark.parametrize(
    ("size", "case", "updates", "replicas", "dtype", "where"),
    [
        (2, "mlp", 24, 1, None, None),
        (2, "tied", 24, 1, BF16, "cpu"),
        (4, "odd_shapes", 24, 2, None, None),
        at_night(2, "mlp", 200, 1, None, None),
    ],
)
@on_ranks("size")
def test_random_updates(case: str, updates: int, replicas: int, dtype: torch.dtype | None, where: str | None) -> None:
    model = sharded(case, Options(replicas=replicas))
    receiver = Receiver(model, WeightSnapshot(where), dtype=dtype)
    size = dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank() % (size // max(replicas, 1)))  # replicas stay the same
    seen: set[bool] = set()
    for update in range(updates):
        share = (0.0, 0.001, 0.01, 0.1, 0.3, 1.0)[update % 6]
        for k, own in enumerate(own_shards(model)):
            if (k + update) % 3 > 0:
                disturb(own, share, generator, any_bits=dtype is None)
        fraction = receiver.take(bucket_bytes=500 if update % 8 == 0 else 1 << 20)
        assert fraction == 1 if update == 0 else fraction <= max(2 * share, 0.1)
        seen.add(receiver.partial > 0)
        receiver.check()
    assert seen == {False, True}


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), (4, 2)])
@on_ranks("size")
def test_the_bytes_that_travel_and_come(replicas: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(512, 512) for _ in range(2))).to(device.TYPE)
    mesh = init_device_mesh(device.TYPE, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        libfsdp.fully_shard(layer, mesh=mesh if replicas > 1 else mesh["shard"])
    libfsdp.fully_shard(model, mesh=mesh if replicas > 1 else mesh["shard"])
    model(torch.zeros(1, 512, device=device.TYPE)).sum().backward()  # statistics begin with it
    generator = torch.Generator().manual_seed(rank % (size // replicas))

    def sent() -> int:
        stats = libfsdp.wire_stats(model)
        return stats["all_gather_bytes"] + stats["control_bytes"]

    for dtype in (None, BF16, F8):
        for receivers in ("all", "first"):
            receives = receivers == "all" or rank == 0
            before = sent()
            of_whole = sum(t.nbytes for t in whole(model, dtype=dtype, ranks=receivers).values())
            sent_whole = sent() - before
            receiver = Receiver(model, WeightSnapshot(), dtype=dtype, ranks=receivers)
            assert receiver.take() == 1
            for share, limit in ((0.01, 0.08), (0.1, 0.65), (1.0, 1.01), (0.0, 0.0)):
                for own in own_shards(model):
                    flat = own.view(-1)
                    chosen = torch.rand(flat.shape, generator=generator) < share
                    flat[chosen] = -2 * flat[chosen] - 1  # in every dtype another value
                before = sent()
                fraction = receiver.take()
                assert fraction == pytest.approx(share, rel=0.2, abs=0)
                assert receiver.received_bytes <= limit * of_whole
                told = 1200  # the bytes that ranks tell each other at most
                assert sent() - before <= limit * sent_whole + told
                assert (receiver.partial > 0) == (share in (0.01, 0.1) and receives)
                receiver.check()


@pytest.mark.parametrize("size", [2, at_night(4)])
@on_ranks("size")
def test_every_strategy() -> None:
    for k, (model, optimizer, _) in enumerate(every_strategy()):
        receivers = [
            Receiver(model, WeightSnapshot("cpu")),
            Receiver(model, WeightSnapshot(), dtype=BF16, ranks="first" if k % 2 else "all"),
        ]
        for receiver in receivers:
            assert receiver.take() == 1
            receiver.check()
        optimizer.param_groups[0]["lr"] = 1e-5
        a_step(model, "transformer", 1, optimizer)
        for receiver in receivers:
            fraction = receiver.take(bucket_bytes=3000)
            receiver.check()
        assert 0 < fraction < 0.3  # most updates are too small for bf16
        assert receivers[1].partial > 0 or (k % 2 and dist.get_rank() > 0)
        assert receivers[1].take() == 0
        # A stream without buckets has ended: nobody need take any, the model can be used, and the snapshot stays known.
        nothing = full_weights(model, since=receivers[1].snapshot, **receivers[1].options)
        assert len(nothing) == 0
        a_step(model, "transformer", 2, optimizer)
        assert list(nothing) == []
        assert receivers[1].take() < 0.5
        receivers[1].check()


def by_rows(_: nn.Parameter) -> Shard:
    return Shard(0)


def by_columns(parameter: nn.Parameter) -> Shard:
    return Shard(min(1, parameter.ndim - 1))


@pytest.mark.parametrize("size", [2, 4])
@on_ranks("size")
def test_positions_are_those_in_the_whole_tensor() -> None:
    """Single elements of parameters that are cut along rows, columns, and the middle of three dimensions."""
    for dim in (0, 1):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Conv1d(8, 12, 6), nn.Linear(8, 12)).to(device.TYPE)
        model[1].register_parameter("turn", nn.Parameter(torch.randn(4, 8, 5, dtype=torch.complex64)))
        model[1].register_buffer("count", torch.arange(100))
        libfsdp.fully_shard(model, shard_placement_fn=by_rows if dim == 0 else by_columns)
        snapshot = WeightSnapshot()
        for _ in full_weights(model, since=snapshot):
            pass
        before = whole(model)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for own in own_shards(model):
            flat = own.view(-1)
            flat[int(torch.randint(len(flat), (1,), generator=generator))] = 100 + dist.get_rank()
        model[1].count[17] = -1
        after = whole(model)
        come = {
            change.name: (change.positions.sort().values.tolist(), change.positions.dtype, change.values.clone())
            for bucket in full_weights(model, since=snapshot)
            for change in bucket
            if change.positions is not None
        }
        assert come.keys() >= {"0.weight", "1.weight", "1.turn", "1.count"}
        for name, (positions, dtype, values) in come.items():
            expected = (before[name] != after[name]).view(-1).nonzero().view(-1)
            assert positions == expected.tolist(), name
            assert dtype == torch.int32
            assert len(values) == len(positions)


@pytest.mark.parametrize(("at", "who"), [(0, 0), (2, 1), (5, 0)])
@on_ranks(2)
def test_after_a_stream_that_was_closed_early_everything_is_sent(at: int, who: int) -> None:
    """Some of what was given before the stop goes back to what it was: only a stream that sends everything is right then."""
    mine = dist.get_rank() == who
    model = sharded("mlp")
    receiver = Receiver(model, WeightSnapshot())
    receiver.take()
    before = [own.clone() for own in own_shards(model)]
    for own in own_shards(model):
        own.add_(1)
    seen: Exception | None = None
    try:
        receiver.take(stop_at=at if mine else None, bucket_bytes=1)
    except libfsdp.Error as error:
        seen = error
    if not mine and at < 5:
        assert "has stopped before bucket" in str(seen)
    for own, value in list(zip(own_shards(model), before, strict=True))[::2]:
        own.copy_(value)
    assert receiver.take() == 1
    receiver.check()
    assert receiver.take() == 0


@on_ranks(2)
def test_what_is_wrong_is_one_error_on_every_rank() -> None:
    rank = dist.get_rank()
    model = sharded("mlp")
    other = sharded("tied")
    snapshot, second = WeightSnapshot(), WeightSnapshot()

    def refused(text: str, of: nn.Module = model, **options: Any) -> None:
        with pytest.raises(libfsdp.Error, match=text):
            full_weights(of, **{"since": snapshot, **options})

    assert snapshot.nbytes == 0
    for one in (snapshot, second):
        for _ in full_weights(model, since=one):
            pass
    assert snapshot.nbytes == sum(own.nbytes for own in own_shards(model))
    refused("since must be a WeightSnapshot or None, got 'last'", since="last")
    refused(r"since was used for .*, where this stream has .*; .* give a new WeightSnapshot", of=other)
    refused(r"'layers.0.weight' \[\d+, \d+\] Float, .*, where this stream has .* BFloat16", dtype=BF16)
    refused("since was used for 'layers.0.weight'", names=["layers.0.bias"])
    refused("since was used for ranks all, where this stream has ranks the first", ranks="first")
    refused("rank 0 has 'since a snapshot after 1 streams .*', rank 1 has", since=snapshot if rank == 0 else second)
    refused("rank 0 has 'since a snapshot after 1 streams .* has 'since a snapshot after 0 streams'",
            since=snapshot if rank == 0 else WeightSnapshot())  # fmt: skip
    refused("rank 0 has 'since nothing', rank 1 has 'since a snapshot", since=None if rank == 0 else snapshot)
    refused("rank 0 has .*, rank 1 has 'cannot export: .*since was used for", dtype=None if rank == 0 else BF16)
    with pytest.raises(libfsdp.Error, match="pass them to apply_changes"):
        libfsdp.load_weights(seeded(CASES["mlp"]), full_weights(model, since=WeightSnapshot()))  # type: ignore[arg-type]
    third = full_weights(model, since=snapshot, bucket_bytes=1)
    assert third.changed_fraction == 0  # no refusal has changed what is known
    assert list(third) == []
    for name, value in model.state_dict(keep_vars=True).items():
        module = model.get_submodule(name.rpartition(".")[0])
        module.register_parameter(name.rpartition(".")[2], nn.Parameter(value.detach().double()))
    refused(r"'layers.0.weight' \[\d+, \d+\] Float, .*, where this stream has 'layers.0.weight' .* Double")


@on_ranks(2)
def test_a_snapshot_goes_on_with_a_resumed_model() -> None:
    """A snapshot says what receivers have, whatever the model is that goes on."""
    receiver = Receiver(sharded("mlp"), WeightSnapshot())
    receiver.take()
    receiver.model = sharded("mlp")
    assert receiver.take() == 0
    own_shards(receiver.model)[0][:1] = 7
    assert 0 < receiver.take() < 1
    receiver.check()


@on_ranks(2)
def test_changes_are_counted_and_given_back() -> None:
    model = sharded("mlp")
    receiver = Receiver(model, WeightSnapshot())
    before = libfsdp.memory_stats(model)
    receiver.take()
    own_shards(model)[0].view(-1)[:2] = 7
    changes = full_weights(model, since=receiver.snapshot)
    assert libfsdp.memory_stats(model)["total.live"] > before["total.live"]
    assert sum(len(bucket) for bucket in changes) == 1
    assert libfsdp.memory_stats(model)["total.live"] == before["total.live"]
    assert libfsdp.memory_stats(model)["gathered_parameters.live"] == before["gathered_parameters.live"]


@pytest.mark.parametrize(("size", "kind"), [(2, "fsdp"), (4, "hfsdp")])
@on_ranks("size")
def test_behind_megatrons_interface(kind: str) -> None:
    for strategy in ("optim", "optim_grads_params")[kind == "hfsdp" :]:
        model: Any = shard_as_megatron(plain_model(), strategy, kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        receiver = Receiver(model, WeightSnapshot(), dtype=BF16)
        for step in range(3):
            receiver.take()
            receiver.check()
            model(batch(step, dist.get_rank())).square().mean().backward()
            model.finish_grad_sync()
            optimizer.step()
            optimizer.zero_grad()
        assert 0 < receiver.take() < 1
        receiver.check()


# What a trainer and its receiver run, as docs/use/weights.md has it.
def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor], send: Any) -> None:
    snapshot = libfsdp.WeightSnapshot()
    for inputs in batches:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        changes = libfsdp.full_weights(model, dtype=torch.bfloat16, since=snapshot)
        print(f"{changes.changed_fraction:.1%} have changed")
        for bucket in changes:
            send(bucket)


def receive(generator: nn.Module, buckets: Any) -> None:
    libfsdp.apply_changes(generator, buckets)


@on_ranks(2)
def test_the_example_of_the_document() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device.TYPE)
    generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(BF16)
    libfsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = [torch.randn(3, 8, device=device.TYPE) for _ in range(4)]
    train(model, optimizer, batches, lambda bucket: receive(generator, [bucket]))
    assert_same_bits(dict(generator.state_dict()), whole(model, dtype=BF16))


def changes_of(name: str = "weight", **fields: Any) -> list[list[WeightChange]]:
    change = WeightChange(name, (3, 4), torch.tensor([1, 11], dtype=torch.int32), torch.tensor([1.5, -0.0]))
    return [[change._replace(**fields)]]


def test_changes_are_written_in_place_with_any_strides_and_converted() -> None:
    for like in (torch.zeros(3, 4), torch.zeros(4, 3).t(), torch.zeros(3, 4, dtype=BF16), torch.zeros(3, 4).to(F8)):
        weight = nn.Parameter(like.clone(memory_format=torch.preserve_format))
        address = weight.data_ptr()
        apply_changes({"here": weight}, changes_of(), rename=lambda name: {"weight": "here"}[name])
        assert weight.data_ptr() == address
        flat = weight.detach().float().reshape(-1)
        assert flat[1] == 1.5
        assert flat[11].signbit()
        assert flat.count_nonzero() == 1


def test_single_changes_and_modules() -> None:
    module = nn.Linear(4, 3, bias=False)
    apply_changes(module, (change for bucket in changes_of() for change in bucket))
    assert module.weight.view(-1)[1] == 1.5
    apply_changes(module, changes_of(positions=None, values=torch.full((3, 4), 2.0)))
    assert torch.equal(module.weight, torch.full((3, 4), 2.0))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "bias"}, "no parameter or buffer 'bias'"),
        ({"shape": (4, 3)}, r"'weight' is \[4, 3\], and here \[3, 4\]"),
        ({"positions": None}, r"'weight' has values \[2\]"),
        ({"positions": torch.zeros(2)}, "'weight' has positions torch.float32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"'weight' has 3 positions and values \[2\]"),
        ({"positions": torch.tensor([0, 12])}, "'weight' has 12 elements, and no position 12"),
        ({"positions": torch.tensor([-1, 0])}, "'weight' has 12 elements, and no position -1"),
    ],
)
def test_changes_that_do_not_fit(fields: dict[str, Any], text: str) -> None:
    module = nn.Linear(4, 3, bias=False)
    before = module.weight.detach().clone()
    good = changes_of()[0]
    with pytest.raises(libfsdp.Error, match="apply_changes: bucket 1: " + text):
        apply_changes(module, [good + changes_of(**fields)[0]])
    assert torch.equal(module.weight, before)


def test_what_is_no_change_and_what_is_no_memory() -> None:
    whole_weights: Any = [[("weight", torch.zeros(3))]]
    with pytest.raises(libfsdp.Error, match="expected a WeightChange, got"):
        apply_changes({}, whole_weights)
    with pytest.raises(libfsdp.Error, match="'weight' is on the meta device"):
        apply_changes(nn.Linear(4, 3, device="meta"), changes_of())
