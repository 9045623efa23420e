"""Plans that send only what has changed: bytes, bits, and what makes the next run whole."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.errors import raises_everywhere
from support.marks import on_ranks
from support.messages import Messages
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp import WantedBox, WeightSnapshot, transfer_plan

BF16 = torch.bfloat16
SHAPES = [(96, 64), (64, 96), (33, 40), (50,), (7, 3), (1,)]


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


class Sides:
    """Two ranks that train; two that have the columns of the first halves and of the second ones, and all of what has none."""

    def __init__(self, dtype: torch.dtype, into_dtype: torch.dtype | None = None) -> None:
        torch.set_default_device(device.of_rank(dist.get_rank()))
        mesh = DeviceMesh(device.TYPE, torch.arange(2, device="cpu"), mesh_dim_names=("shard",))
        self.trains = dist.get_rank() < 2
        self.model: Any = None
        self.parts: dict[str, tuple[Tensor, tuple[slice, ...]]] = {}
        wanted = []
        if self.trains:
            torch.manual_seed(0)
            self.model = Weights()
            libfsdp.fully_shard(self.model, mesh=mesh)
        else:
            index = dist.get_rank() - 2
            for i, shape in enumerate(SHAPES):
                size = shape[-1] // 2 if len(shape) == 2 else shape[-1]
                begin = index * size if len(shape) == 2 else 0
                into = torch.zeros((size, *shape[:-1]), dtype=into_dtype or dtype).movedim(0, -1)  # with other strides
                name = f"weights.{i}"
                self.parts[name] = into, (*(slice(None) for _ in shape[:-1]), slice(begin, begin + size))
                wanted.append(WantedBox(name, into, (*(0 for _ in shape[:-1]), begin), dtype))
            # A second tensor for a part of what the first one has.
            rows = torch.zeros(10, 5, dtype=into_dtype or dtype)
            self.parts["weights.0 again"] = rows, (slice(40, 50), slice(index * 32, index * 32 + 5))
            wanted.append(WantedBox("weights.0", rows, (40, index * 32), dtype))
            count = torch.zeros((), dtype=torch.long)
            self.parts["count"] = count, ()
            wanted.append(WantedBox("count", count))
        self.dtype = dtype
        self.wanted = wanted
        self.renew(dist.new_group())  # Of transfers alone.

    def renew(self, group: dist.ProcessGroup | None) -> None:
        """Makes the plan, or another one."""
        self.plan = transfer_plan(
            self.model, [2, 3], wanted=self.wanted, group=group, message_bytes=2048, timeout=timedelta(seconds=20)
        )

    def whole(self) -> dict[str, Tensor]:
        """The whole weights of now, on all ranks."""
        torch.manual_seed(0)
        result = {name: value.clone() for name, value in Weights().state_dict().items()}
        for name, value in self.model.state_dict().items() if self.trains else ():
            result[name].copy_(value.full_tensor() if isinstance(value, DTensor) else value)
        for value in result.values():
            dist.broadcast(value, 0)
        return result

    @torch.no_grad()
    def change(self, fraction: float, seed: int) -> None:
        if not self.trains:
            return
        generator = torch.Generator(device.TYPE).manual_seed(100 * seed + dist.get_rank())
        for weight in self.model.parameters():
            local = weight._local_tensor
            chosen = torch.rand(local.shape, generator=generator) < fraction
            local[chosen] = -2 * local[chosen] + 0.5
        self.model.count += 1

    def check(self) -> None:
        whole = self.whole()
        for name, (into, part) in self.parts.items():
            expected = whole[name.removesuffix(" again")][part]
            if name != "count":
                expected = expected.to(self.dtype)
            assert torch.equal(into, expected.to(into.dtype)), name

    def bytes_of_run(self, **options: Any) -> int:
        """The bytes that all ranks have sent."""
        self.plan.run(**options)
        sent = torch.tensor(self.plan.travelled_bytes)
        dist.all_reduce(sent)
        return int(sent)


@pytest.mark.parametrize(("into_dtype", "on"), [(None, None), (torch.float32, "cpu")], ids=["same", "converted"])
@on_ranks(4)
def test_bytes_that_travel(into_dtype: torch.dtype | None, on: str | None) -> None:
    sides = Sides(BF16, into_dtype)
    whole = sides.bytes_of_run()
    assert whole == sum(sides.plan.bytes_sent.values())
    sides.check()
    snapshot = WeightSnapshot(on)
    assert snapshot.nbytes == 0
    assert sides.bytes_of_run(since=snapshot) == whole  # The first one.
    sent = sum(n for (sender, _), n in sides.plan.bytes_sent.items() if sender == dist.get_rank())
    assert snapshot.nbytes == sent
    for seed, (fraction, most) in enumerate([(0.0, 0.02), (0.01, 0.08), (0.1, 0.65), (0.3, 1.01), (1.0, 1.01)]):
        sides.change(fraction, seed)
        now = sides.bytes_of_run(since=snapshot)
        assert now <= most * whole, (fraction, now / whole)
        assert now > fraction * whole
        sides.check()
    assert sides.bytes_of_run() == whole  # Without it all comes, as ever.


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@on_ranks(4)
def test_random_updates_give_the_bits_of_whole_runs(dtype: torch.dtype) -> None:
    sides = Sides(dtype)
    snapshot = WeightSnapshot()
    choose = random.Random(7)
    for seed in range(100):
        sides.change(choose.choice([0, 0, 0.001, 0.02, 0.2, 0.5]), seed)
        if sides.trains and choose.random() < 0.2:  # Bits, not values.
            with torch.no_grad():
                local = sides.model.weights[0]._local_tensor
                local.view(-1)[:5] = -0.0 if local.view(-1)[0].signbit().item() == 0 else 0.0
        sides.plan.run(since=snapshot)
        sides.check()
    if not sides.trains:
        return
    assert snapshot.nbytes > 0


@on_ranks(4)
def test_snapshots_and_whole_runs_may_take_turns() -> None:
    """An element that has again the value that it had when a snapshot was used last, and another one in between."""
    sides = Sides(BF16)
    one, other = WeightSnapshot(), WeightSnapshot()

    def fill(value: float) -> None:
        if sides.trains:
            with torch.no_grad():
                sides.model.weights[0]._local_tensor[:5] = value

    for between in (None, other, one):
        fill(1.0)
        sides.plan.run(since=one)
        fill(2.0)
        sides.plan.run(since=between)
        fill(1.0)
        sides.plan.run(since=one)
        sides.check()


@on_ranks(4)
def test_bits_are_compared() -> None:
    sides = Sides(torch.float32)
    snapshot = WeightSnapshot()
    values = [0.0, -0.0, float("nan"), float("inf"), -0.0, float("nan")]
    for value in values:
        if sides.trains:
            with torch.no_grad():
                sides.model.weights[0]._local_tensor[0, :3] = value
        sides.plan.run(since=snapshot)
        if not sides.trains:
            into, _ = sides.parts["weights.0"]
            expected = torch.tensor(value).view(torch.int32)
            first = dist.get_rank() == 2  # Columns from 0 on.
            if first:
                assert (into.contiguous().view(torch.int32)[0, :3] == expected).all(), value


@on_ranks(4)
def test_all_is_sent_after_a_run_that_has_failed() -> None:
    sides = Sides(BF16)
    snapshot = WeightSnapshot()
    whole = sides.bytes_of_run(since=snapshot)
    sides.change(0.05, 1)
    calls = 0

    def fail(sends: bool, peer: int, of_bytes: Tensor) -> None:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 1 and calls == 3:
            # The others wait for it no longer than their timeout, which closes the group's connections.
            raise RuntimeError("on purpose")

    sides.plan._timeout = timedelta(seconds=1)
    failed = r"has failed on rank|during the run of plan"
    with Messages(fail), pytest.raises(libfsdp.CommError, match=failed):
        sides.plan.run(since=snapshot)
    with pytest.raises(libfsdp.Error, match="an earlier run has failed"):
        sides.plan.run(since=snapshot)
    sides.renew(dist.new_group(timeout=timedelta(seconds=60)))
    assert sides.bytes_of_run(since=snapshot) == whole
    sides.check()
    sides.change(0.01, 2)
    assert sides.bytes_of_run(since=snapshot) < 0.08 * whole
    sides.check()


@on_ranks(4)
def test_a_snapshot_belongs_to_one_plan() -> None:
    sides = Sides(BF16)
    rank = dist.get_rank()
    whole = sides.bytes_of_run()
    snapshot, other = WeightSnapshot(), WeightSnapshot()

    def refused(text: str, since: Any, plan: Any = None) -> None:
        with raises_everywhere(libfsdp.Error, text):
            (plan or sides.plan).run(since=since)

    sides.plan.run(since=snapshot)
    refused(
        "rank 0 has a snapshot after 1 runs, and rank 3 has no snapshot", snapshot if rank < 3 else None
    )
    refused("rank 0 has a snapshot after 1 runs, and rank 1 has a snapshot after 0", snapshot if rank != 1 else other)
    refused("since must be a WeightSnapshot or None, got 5", 5 if rank == 2 else snapshot)
    plan = transfer_plan(sides.model, [2, 3])
    refused("rank 0 of the group: since was used for another plan, or for full_weights", snapshot, plan)
    assert sides.bytes_of_run(since=snapshot) < 0.02 * whole  # Nothing was lost.
    if sides.trains:
        with pytest.raises(libfsdp.Error, match="since was used for a transfer plan"):
            libfsdp.full_weights(sides.model, since=snapshot)
