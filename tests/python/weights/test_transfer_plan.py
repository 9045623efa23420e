"""Weights that go from ranks that train to ranks with another division: bytes, memory, replicas, errors, and ranks that do not come."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.errors import raises_everywhere
from support.marks import on_ranks
from support.messages import Messages
from support.ranks import RankError, StartRanks
from support.training import full
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import libfsdp
from libfsdp import WantedBox, transfer_plan

BF16 = torch.bfloat16
HIDDEN, HEADS, FEEDS = 24, 8, 40


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HEADS), nn.Linear(HIDDEN, HEADS)
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, FEEDS, bias=False), nn.Linear(HIDDEN, FEEDS, bias=False)
        self.down = nn.Linear(FEEDS, HIDDEN, bias=False)
        self.norm = nn.Linear(1, 3)  # with fewer rows than ranks
        self.register_buffer("count", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.o(self.q(x) * torch.cat([self.k(x), self.v(x), self.k(x)], -1)) + x
        return self.down(self.gate(x).tanh() * self.up(x)) * self.norm(x[..., :1]).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@functools.cache
def mesh_of(trainers: int, replicas: int = 1) -> DeviceMesh:
    """The first ranks; the others help to make it."""
    ranks = torch.arange(trainers, device="cpu")
    if replicas == 1:
        return DeviceMesh(device.TYPE, ranks, mesh_dim_names=("shard",))
    return DeviceMesh(device.TYPE, ranks.view(replicas, -1), mesh_dim_names=("replicate", "shard"))


class Trainer:
    """A model on the first ranks; on others, nothing."""

    def __init__(self, trainers: int, replicas: int = 1) -> None:
        torch.set_default_device(device.of_rank(dist.get_rank()))
        mesh = mesh_of(trainers, replicas)
        self.trains = dist.get_rank() < trainers
        torch.manual_seed(0)
        self.plain = {name: value.clone() for name, value in Model().state_dict().items()}
        self.model: Any = None
        self.steps = 0
        if self.trains:
            torch.manual_seed(0)
            self.model = Model()
            for layer in self.model.layers:
                libfsdp.fully_shard(layer, mesh=mesh)
            libfsdp.fully_shard(self.model, mesh=mesh)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.steps += 1
        if not self.trains:
            return
        torch.manual_seed(1 + dist.get_rank() + 10 * self.steps)
        loss = self.model(torch.randint(16, (2, 7))).square().mean()
        assert loss.isfinite()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> dict[str, Tensor]:
        """The whole weights of now, on all ranks of the default group, by way of rank 0."""
        result = {name: value.clone() for name, value in self.plain.items()}
        with torch.no_grad():
            for name, value in self.model.state_dict().items() if self.trains else ():
                result[name].copy_(value.full_tensor() if isinstance(value, DTensor) else value)
        for value in result.values():
            dist.broadcast(value, 0)
        return result


class Allocations(TorchDispatchMode):
    """The bytes of the largest memory that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def counted(plan: libfsdp.TransferPlan) -> dict[tuple[int, int], int]:
    """Runs a plan, and returns the bytes that this rank has sent, by sender and receiver."""
    sent: dict[tuple[int, int], int] = defaultdict(int)
    messages = {True: 0, False: 0}

    def count(sends: bool, peer: int, of_bytes: Tensor) -> None:
        messages[sends] += 1
        assert of_bytes.nbytes <= plan.largest_bytes
        if sends:
            sent[dist.get_rank(), peer] += of_bytes.nbytes

    with Messages(count), Allocations() as allocations:
        plan.run()
    assert max(messages.values()) <= plan.rounds  # In each, one message each way.
    assert allocations.largest <= 2 * plan.largest_bytes
    return dict(sent)


class Engine:
    """An inference engine's part of the weights: fused rows of q, k and v, and of gate and up, and columns of o and down."""

    def __init__(self, index: int, size: int, dtype: torch.dtype) -> None:
        self.index, self.size, self.dtype = index, size, dtype
        self.tensors: dict[str, Tensor] = {}
        self.wanted: list[WantedBox] = []
        for layer in (f"layers.{i}." for i in range(2)):
            self.rows(layer, "qkv", {"q": HIDDEN, "k": HEADS, "v": HEADS}, HIDDEN)
            self.rows(layer, "gate_up", {"gate": FEEDS, "up": FEEDS}, HIDDEN)
            for name, columns in (("o", HIDDEN), ("down", FEEDS)):
                mine = columns // size
                into = torch.full((HIDDEN, mine), -1.0, dtype=dtype)
                self.tensors[layer + name] = into
                self.wanted.append(WantedBox(f"{layer}{name}.weight", into, (0, index * mine)))
            for name in ("norm.weight", "q.bias"):
                self.tensors[layer + name] = torch.empty((3, 1) if name == "norm.weight" else (HIDDEN,), dtype=dtype)
                self.wanted.append(WantedBox(layer + name, self.tensors[layer + name]))
            self.tensors[layer + "count"] = torch.empty(5, dtype=torch.long)
            self.wanted.append(WantedBox(layer + "count", self.tensors[layer + "count"]))

    def rows(self, layer: str, fused: str, parts: dict[str, int], columns: int) -> None:
        into = torch.full((sum(parts.values()) // self.size, columns), -1.0, dtype=self.dtype)
        self.tensors[layer + fused] = into
        begin = 0
        for name, rows in parts.items():
            mine = rows // self.size
            self.wanted.append(WantedBox(f"{layer}{name}.weight", into[begin : begin + mine], (self.index * mine, 0)))
            begin += mine

    def check(self, whole: dict[str, Tensor]) -> None:
        def rows(*names: str) -> Tensor:
            return torch.cat([whole[f"{name}.weight"].chunk(self.size)[self.index] for name in names])

        for name, value in self.tensors.items():
            layer = name[: len("layers.0.")]
            if name.endswith("qkv"):
                expected = rows(layer + "q", layer + "k", layer + "v")
            elif name.endswith("gate_up"):
                expected = rows(layer + "gate", layer + "up")
            elif name.endswith((".o", ".down")):
                expected = whole[f"{name}.weight"].chunk(self.size, 1)[self.index]
            else:
                expected = whole[name]
            assert torch.equal(value, expected.to(value.dtype)), name


def to_an_engine(replicas: int, dtype: torch.dtype, message_bytes: int) -> dict[tuple[int, int], int]:
    trainer = Trainer(4, replicas)
    engine = None if trainer.trains else Engine(dist.get_rank() - 4, 2, dtype)
    wanted = engine.wanted if engine else []
    plan = transfer_plan(trainer.model, [4, 5], wanted=wanted, message_bytes=message_bytes)
    assert plan.largest_bytes <= message_bytes
    for _ in range(2):
        trainer.step()
        whole = trainer.whole()
        sent = counted(plan)
        assert sent == {pair: n for pair, n in plan.bytes_sent.items() if pair[0] == dist.get_rank()}
        if engine:
            engine.check(whole)
    if engine:  # Each byte has come once.
        total = sum(n for (_, receiver), n in plan.bytes_sent.items() if receiver == dist.get_rank())
        assert total == sum(value.nbytes for value in engine.tensors.values())
        boxes = [box for _, receiver, of_message in plan.boxes if receiver == dist.get_rank() for box in of_message]
        assert len({(name, *offsets) for name, offsets, _, _ in boxes}) == len(boxes)
    trainer.step()
    return plan.bytes_sent


@pytest.mark.parametrize("message_bytes", [200, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_four_ranks_that_train_to_two_of_an_engine(ranks: StartRanks, dtype: torch.dtype, message_bytes: int) -> None:
    ranks(6).run(to_an_engine, 1, dtype, message_bytes)


def test_replicas_share_the_work(ranks: StartRanks) -> None:
    pairs = ranks(6).run(to_an_engine, 2, torch.float32, 256)[0]
    sent = [sum(n for (sender, _), n in pairs.items() if sender == rank) for rank in range(4)]
    for shard in (0, 1):
        assert abs(sent[shard] - sent[2 + shard]) <= 256, sent
    assert max(sent) < 1.1 * min(sent), sent


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_ranks_that_train_and_receive(dtype: torch.dtype) -> None:
    """Ranks that train want weights, too: all of them, overlapping, some twice, and under the second name of a tied one."""
    trainer = Trainer(2)
    q, gate = "layers.1.q.weight", "layers.0.gate.weight"
    tensors = {
        gate: torch.empty(HIDDEN, FEEDS, dtype=dtype).t(),  # whose columns lie in one stretch, and no box of rows
        "embedding.weight": torch.empty(16, HIDDEN, dtype=dtype),
        "head.weight": torch.empty(16, HIDDEN, dtype=dtype),
        q: torch.empty(HIDDEN, HIDDEN, dtype=dtype),
    }
    wide = torch.empty(HIDDEN, HIDDEN - 5, dtype=torch.float64)
    wanted = [WantedBox(name, into) for name, into in tensors.items()]
    wanted.append(WantedBox(q, wide, offsets=(0, 5), dtype=dtype))
    plan = transfer_plan(trainer.model, [0, 1], wanted=wanted)
    trainer.step()
    whole = trainer.whole()
    sent = counted(plan)
    for name, value in tensors.items():
        assert torch.equal(value, whole[name].to(dtype)), name
    assert torch.equal(wide, whole[q][:, 5:].to(dtype).double())
    half = (16 + HIDDEN + FEEDS) * HIDDEN * dtype.itemsize // 2  # what the other rank has, once
    assert sent == {(dist.get_rank(), 1 - dist.get_rank()): half}


def refused(text: str, function: Callable[[], Any], kind: type[Exception] = libfsdp.Error) -> None:
    """Every rank gets the same error."""
    with raises_everywhere(kind, text):
        function()


def then_it_works(trainer: Trainer) -> None:
    trainer.step()
    into = torch.empty(HIDDEN, HIDDEN)
    wanted = [] if trainer.trains else [WantedBox("layers.0.o.weight", into)]
    plan = transfer_plan(trainer.model, [2], wanted=wanted)
    whole = trainer.whole()
    plan.run()
    if not trainer.trains:
        assert torch.equal(into, whole["layers.0.o.weight"])


@on_ranks(3)
def test_errors_reach_all_ranks_and_training_goes_on() -> None:
    trainer = Trainer(2)
    rank = dist.get_rank()

    def plan_of(*boxes: WantedBox, receivers: Any = (2,), **options: Any) -> Callable[[], Any]:
        wanted = [] if trainer.trains else boxes
        return lambda: transfer_plan(trainer.model, receivers, wanted=wanted, **options)

    o = "layers.0.o.weight"
    good = WantedBox(o, torch.empty(2, 3))
    refused("rank 2 wants 'o.weight', which no rank has", plan_of(good, WantedBox("o.weight", torch.empty(2, 3))))
    refused(
        f"rank 2 wants the box of sizes [2, 3] at [23, 0] of '{o}', which has the shape [24, 24]",
        plan_of(WantedBox(o, torch.empty(2, 3), (23, 0))),
    )
    refused("rank 2 wants the box of sizes [6] at [0]", plan_of(WantedBox(o, torch.empty(6))))
    refused("is wanted at [1], but goes into a tensor of the shape [2, 3]", plan_of(WantedBox(o, good.into, (1,))))
    refused(f"'{o}' in Int, but it is Float", plan_of(WantedBox(o, torch.empty(2, 3, dtype=torch.int32))))
    refused(
        "is to travel as torch.int64 into a tensor of torch.float32", plan_of(WantedBox(o, good.into, dtype=torch.long))
    )
    refused("is to go into a NoneType", plan_of(WantedBox(o, None)))
    for into in (torch.zeros(1, 1).expand(2, 2), torch._neg_view(torch.zeros(2, 2)), torch.zeros(2, 2).to_sparse()):
        refused(f"'{o}' is to go into a tensor that can't be written in place", plan_of(good, WantedBox(o, into)))
    refused("rank 2 of the group: it wants 1 boxes, but is none of the receivers [0]", plan_of(good, receivers=[0]))
    refused(
        "rank 0 has receivers [0] and message_bytes 33554432, and rank 1 has receivers [1] and",
        plan_of(receivers=[0] if rank == 0 else [1]),
    )
    refused("message_bytes 64, and rank 2 has", plan_of(good, message_bytes=64 if rank < 2 else 32))
    refused("receivers must be ranks of the group, below 3, got [3]", plan_of(receivers=3))
    refused("receivers must be ranks of the group, below 3, got ['a']", plan_of(receivers="a" if rank == 1 else [2]))
    refused("timeout must be a timedelta, got 5", plan_of(timeout=5 if rank == 1 else timedelta(seconds=60)))
    refused("at least 16, got 15", plan_of(good, message_bytes=15))
    refused("Linear is not sharded", lambda: transfer_plan(nn.Linear(1, 1) if rank == 1 else None, [2]))
    then_it_works(trainer)
    plan = plan_of(good)()
    refused("come for a plan, and rank 1 for a run of plan", lambda: plan.run() if rank else plan_of(good)())
    others = plan_of(good)()
    refused("come for a run of plan", lambda: (plan if rank else others).run())
    if trainer.trains:
        trainer.model.to(torch.float64)
    refused("rank 0 of the group: the model's shards are not those", plan.run)
    if trainer.trains:
        trainer.model.to(torch.float32)
    then_it_works(trainer)


@pytest.mark.parametrize("who", [0, 1, 2])
@on_ranks(3)
def test_a_rank_that_does_not_come_in_time(who: int) -> None:
    trainer = Trainer(2)
    into = torch.empty(HIDDEN, HIDDEN)
    wanted = [] if trainer.trains else [WantedBox("layers.0.o.weight", into)]

    def act(function: Callable[[], Any]) -> Callable[[], Any]:
        def late() -> None:
            if dist.get_rank() == who:
                dist.barrier()
            try:
                function()
            finally:
                if dist.get_rank() != who:
                    dist.barrier()

        return late

    short = timedelta(seconds=0.3)
    text = f"rank {who} of the group did not arrive within 0.3 s"
    refused(text, act(lambda: transfer_plan(trainer.model, [2], wanted=wanted, timeout=short)), libfsdp.CommError)
    plan = transfer_plan(trainer.model, [2], wanted=wanted, timeout=timedelta(seconds=20))
    plan._timeout = short
    refused(text, act(plan.run), libfsdp.CommError)
    plan._timeout = timedelta(seconds=20)
    trainer.step()
    whole = trainer.whole()
    plan.run()
    if not trainer.trains:
        assert torch.equal(into, whole["layers.0.o.weight"])


def dies(when: str) -> None:
    """The receiver dies. The others train on, and say so by their failure, which ranks() reports."""
    trainer = Trainer(2)
    wanted = (
        [] if trainer.trains else [WantedBox(n, torch.empty(v.shape, dtype=v.dtype)) for n, v in trainer.plain.items()]
    )
    plan = transfer_plan(trainer.model, [2], wanted=wanted, timeout=timedelta(seconds=2), message_bytes=512)
    if dist.get_rank() == 2:
        if when == "halfway":
            calls = iter(range(5))

            def end(sends: bool, peer: int, of_bytes: Tensor) -> None:
                if next(calls, None) is None:
                    os._exit(3)

            with Messages(end):
                plan.run()
        os._exit(3)
    with pytest.raises(libfsdp.CommError) as caught:
        plan.run()
    trainer.step()
    raise AssertionError(f"trained on after: {caught.value}")


@pytest.mark.parametrize("when", ["before", "halfway"])
def test_a_receiver_that_dies(ranks: StartRanks, when: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(3).run(dies, when)
    text = str(caught.value)
    assert "rank 2 of 3: died with exit code 3" in text
    for rank in (0, 1):
        of_rank = text.partition(f"rank {rank} of 3:")[2].partition("of 3:")[0]
        assert "trained on after: transfer_plan: rank 2 of the group did not arrive within 2 s" in of_rank, text


# The example of docs/use/weights.md.
def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    plan = transfer_plan(model, receivers=[2, 3])
    for tokens in batches:
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plan.run()


def generate(qkv: Tensor, o: Tensor, index: int, updates: int) -> None:
    rows = len(qkv) // 3  # of q, of k and of v
    wanted = [
        WantedBox(f"attention.{name}.weight", into, offsets=(index * rows, 0))
        for name, into in zip("qkv", qkv.chunk(3), strict=True)
    ]
    wanted.append(WantedBox("attention.o.weight", o, offsets=(0, index * o.size(1))))
    plan = transfer_plan(None, receivers=[2, 3], wanted=wanted)
    for _ in range(updates):
        plan.run()
        # ... generate with the new weights


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "qkvo"})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, o = self.attention.values()
        return o(q(x) * k(x) + v(x))


@on_ranks(4)
def test_the_example() -> None:
    rank = dist.get_rank()
    mesh = mesh_of(2)
    whole = torch.empty(4, 8, 8)
    if rank < 2:
        torch.manual_seed(0)
        model = Attention()
        libfsdp.fully_shard(model, mesh=mesh)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.randn(3, 8) for _ in range(2)])
        whole = torch.stack([full(layer.weight) for layer in model.attention.values()])
    else:
        qkv, o = torch.empty(3 * 4, 8, dtype=BF16), torch.empty(8, 4, dtype=BF16)
        generate(qkv, o, rank - 2, 2)
    dist.broadcast(whole, 0)
    if rank >= 2:
        mine = [weight.chunk(2)[rank - 2] for weight in whole[:3]]
        assert torch.equal(qkv, torch.cat(mine).to(BF16))
        assert torch.equal(o, whole[3].chunk(2, 1)[rank - 2].to(BF16))
