"""Replay checks: clean steps are as without them, and one flipped bit is found on the rank and in the unit where it was."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import at_night, on_ranks
from support.ranks import RankError, StartRanks
from support.states import assert_equal
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import libfsdp
from libfsdp.megatron import fully_shard_model

Batch = dict[str, Any]


class Damage(torch.autograd.Function):
    """Passes a parameter on, and flips one bit of its gradient, once."""

    bit: int | None = None

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0].clone()
        if Damage.bit is not None:
            flip(gradient, Damage.bit)
            Damage.bit = None
        return gradient


def flip(tensor: torch.Tensor, at: int) -> None:
    data = tensor.detach().view(-1).view(torch.uint8)
    data[at % (8 * data.numel()) // 8] ^= 1 << (at % 8)


class Block(nn.Module):
    """With dropout, buffers that differ from rank to rank and are read, and a gradient that can be damaged."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(1))
        self.damaged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().float().abs().sum()
        weight: torch.Tensor = Damage.apply(self.weight) if self.damaged else self.weight
        y: torch.Tensor = self.dropout(self.norm(x @ weight)) * (1 + self.seen.to(x.dtype))
        return y


def blocks(options: dict[str, Any], replicas: int) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block() for _ in range(3)))
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("outer", "inner"))
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("inner",))
    for block in model:
        libfsdp.fully_shard(block, mesh=mesh, **options)
    return libfsdp.fully_shard(model, mesh=mesh, **options)


def forward_and_backward(model: Any, batch: Batch) -> float:
    loss = (model(batch["x"]) - batch["more"][0]).float().square().mean()
    loss.backward()
    return loss.item()


def batch_of(step: int) -> Batch:
    # Of another length on each rank, and views of a larger tensor.
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(12, 8, generator=generator)[1 : 5 + dist.get_rank()]
    return {"x": x, "more": [torch.ones(8)], "note": "as it is"}


def trained(options: dict[str, Any], replicas: int, accumulates: bool, every: int) -> list[Any]:
    """What three steps leave; without a check if `every` is 0."""
    model = blocks(options, replicas)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    check = libfsdp.ReplayCheck(model, every=every) if every else None
    torch.manual_seed(dist.get_rank())
    losses = []
    for step in range(3):
        for part in range(3 if accumulates else 1):
            model.set_requires_gradient_sync(not accumulates or part == 2)
            batch = batch_of(10 * step + part)
            if check is None:
                losses.append(forward_and_backward(model, batch))
            else:
                losses.append(check.run(lambda given: forward_and_backward(model, given), batch))
        optimizer.step()
        optimizer.zero_grad()
        if check is not None:
            check.remember_parameters()
    if check is not None:
        runs = 9 if accumulates else 3
        assert check.checked == runs // every - (every == 1)  # The first microbatch forms the model.
    return [*(p.to_local().clone() for p in model.parameters()), *model.buffers(), losses, torch.rand(1)]


@pytest.mark.parametrize("size", [2, 4])
@on_ranks("size")
def test_clean_steps_are_as_without_checks(size: int) -> None:
    bf16 = libfsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    cases: list[tuple[dict[str, Any], int, bool]] = [({}, 1, False), ({}, 1, True), ({"mp_policy": bf16}, 1, True)]
    cases += [({"reshard_after_forward": False}, 1, False)]
    if size == 4:
        cases += [({}, 2, True)]
    for options, replicas, accumulates in cases:
        expected = trained(options, replicas, accumulates, 0)
        for every in (1, 2):
            found = trained(options, replicas, accumulates, every)
            assert_equal(found, expected)


@pytest.mark.parametrize("size", [2, 3])
@on_ranks("size")
def test_flipped_bits_are_found() -> None:
    flips = 8
    chosen = random.Random(3)
    model = blocks({}, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    check = libfsdp.ReplayCheck(model, every=1)

    def step(number: int) -> str:
        try:
            check.run(lambda batch: forward_and_backward(model, batch), batch_of(number))
        except libfsdp.Error as error:
            optimizer.zero_grad()
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
        return ""

    assert step(0) == ""
    for number in range(1, flips + 1):
        damager, block, bit = chosen.randrange(dist.get_world_size()), chosen.randrange(3), chosen.randrange(1 << 30)
        here = dist.get_rank() == damager
        if number % 2:
            check.remember_parameters()
            shard = model[block].weight.to_local()
            if here:
                flip(shard, bit)
            error = step(number)
            if here:
                flip(shard, bit)
            assert "are not those that remember_parameters() has seen" in error
        else:
            model[block].damaged = True
            if here:
                Damage.bit = bit
            error = step(number)
            model[block].damaged = False
            assert f"from the batch of rank {damager} are wrong on rank {damager}" in error
        assert f"unit '{block}'" in error, error
        assert f"on rank {damager}" in error, error
        assert step(number) == ""


class Choice(nn.Module):
    """Two layers, of which a rank uses one, or one behind the other."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.layers[1].bias.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, picks: list[int]) -> torch.Tensor:
        for pick in picks:
            x = nn.functional.dropout(torch.tanh(self.layers[pick](x)), 0.1)
        return x


class Branches(nn.Module):
    """Units of which each microbatch uses some, in any order, several times, or in a region that is checkpointed."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8)
        self.choices = nn.ModuleList(Choice(chance.random() < 0.3) for _ in range(3))
        self.checkpointed = [chance.random() < 0.3 for _ in self.choices]

    def forward(self, x: torch.Tensor, used: list[int], picks: list[int]) -> torch.Tensor:
        x = self.start(x)
        for i in used:
            block = self.choices[i]
            x = checkpoint(block, x, picks, use_reentrant=False) if self.checkpointed[i] else block(x, picks)
        return x


def square_and_backward(model: Any, x: torch.Tensor, used: list[int], picks: list[int]) -> None:
    model(x, used, picks).square().sum().backward()


@functools.cache
def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    """One for all models: a mesh's groups have threads until its process ends."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))


def random_models_without_an_alarm(seeds: range) -> int:
    """Nothing is corrupted, whatever a microbatch uses, and the bits are those of steps without a check."""
    checked, size = 0, dist.get_world_size()
    for seed in seeds:
        results = []
        for every in (0, 1):
            chance, own = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
            torch.manual_seed(seed)
            model: Any = Branches(chance)
            shape = (2, size // 2) if size > 2 and chance.random() < 0.5 else (1, size)
            mesh = mesh_of(shape)
            options: dict[str, Any] = {"mesh": mesh if shape[0] > 1 else mesh["inner"]}
            options["reshard_after_forward"] = chance.random() < 0.7
            if chance.random() < 0.3:
                options["mp_policy"] = libfsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for block in model.choices:
                libfsdp.fully_shard(block, **options)
            libfsdp.fully_shard(model, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            check = libfsdp.ReplayCheck(model, every=every or 1000)
            torch.manual_seed(dist.get_rank())
            parts = chance.choice([1, 2, 3])
            for _ in range(4):
                for part in range(parts):
                    model.set_requires_gradient_sync(part == parts - 1 or seed % 2 == 0)
                    used = [chance.randrange(3) for _ in range(chance.randrange(4))]
                    picks = [own.randrange(2) for _ in range(own.randrange(1, 3))]
                    check.run(functools.partial(square_and_backward, model), torch.randn(3, 8), used, picks)
                optimizer.step()
                optimizer.zero_grad()
                check.remember_parameters()
            checked += check.checked
            results.append([p.to_local().clone() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), seed
    return checked


@pytest.mark.parametrize(
    ("size", "seeds"),
    [(2, range(6)), (4, range(6, 10)), (4, range(659, 660)), at_night(2, range(300)), at_night(4, range(300))],
)
def test_random_clean_models_give_no_alarm(ranks: StartRanks, size: int, seeds: range) -> None:
    for first in range(seeds.start, seeds.stop, 10):
        assert ranks(size).run(random_models_without_an_alarm, range(first, min(first + 10, seeds.stop)))[0] > 0


class Twice(nn.Module):
    """A block that is used twice, each time in a region with a backward of its own: its gradients arrive one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.between = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, uses_block: bool) -> torch.Tensor:
        for layer in (self.block, self.between, self.block) if uses_block else (self.between,):
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def twice_and_backward(model: Any, x: torch.Tensor, uses_block: bool) -> None:
    model(x, uses_block).square().sum().backward()


@on_ranks(2)
def test_gradients_that_arrive_twice_in_a_first_backward_give_no_alarm() -> None:
    """The ranks decide in it in which dtype they send, and change that at its end; a rehearsal decides as it did."""
    model: Any = Twice()
    for module in (model.block, model.between, model):
        libfsdp.fully_shard(module, mp_policy=libfsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    check = libfsdp.ReplayCheck(model, every=1)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).requires_grad_()
        check.run(functools.partial(twice_and_backward, model), x, step > 0)
    assert check.checked == 2  # The first microbatch forms the model.


def forward_and_sum_backward(model: Any, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


@on_ranks(2)
def test_writes_that_nobody_is_told_of_give_no_alarm() -> None:
    """Strategies keep whole parameters between steps, which the next forward replaces: what it frees is no damage."""
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        torch.manual_seed(0)
        plain: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        model: Any = fully_shard_model(plain, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy)
        check = libfsdp.ReplayCheck(model.module, every=1)
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            check.run(functools.partial(forward_and_sum_backward, model), x)
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
            model.zero_grad()
        assert check.checked == 2, strategy  # The first microbatch forms the model.


@on_ranks(2)
def test_shards_in_other_memory_give_no_alarm() -> None:
    model = blocks({}, 1)
    check = libfsdp.ReplayCheck(model, every=1)
    for step in range(3):
        check.run(functools.partial(forward_and_backward, model), batch_of(step))
        for parameter in model.parameters():
            parameter.to_local().share_memory_().data.mul_(0.5)
    assert check.checked == 2


@on_ranks(2)
def test_other_parameters_give_no_alarm() -> None:
    """Those of load_state_dict(assign=True), which the next forward takes; of another dtype, for which it forms another model."""
    model = blocks({}, 1)
    check = libfsdp.ReplayCheck(model, every=1)
    for step in range(6):
        dtype = torch.float32 if step < 3 else torch.float64
        check.run(functools.partial(forward_and_backward, model), {**batch_of(step), "x": batch_of(step)["x"].to(dtype)})
        values = {name: (2 * value).to(dtype if step < 2 else torch.float64) for name, value in model.state_dict().items()}
        model.load_state_dict(values, assign=True)
        model.zero_grad()
        check.remember_parameters()
    assert check.checked == 4, check.checked  # The first microbatch of a model forms it.


@on_ranks(1)
def test_what_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="is not sharded"):
        libfsdp.ReplayCheck(nn.Linear(2, 2), every=1)
    with pytest.raises(libfsdp.Error, match="every must be positive, got 0"):
        libfsdp.ReplayCheck(blocks({}, 1), every=0)


def one_rank_fails() -> None:
    model = blocks({}, 1)
    check = libfsdp.ReplayCheck(model, every=1)
    check.run(lambda batch: forward_and_backward(model, batch), batch_of(0))
    calls = 0

    def fails(batch: Batch) -> float:
        nonlocal calls
        calls += 1
        if calls == 2 and dist.get_rank() == 1:
            raise KeyError("of the program's own")
        return forward_and_backward(model, batch)

    check.run(fails, batch_of(1))


def test_an_exception_on_one_rank_ends_all(ranks: StartRanks) -> None:
    with pytest.raises(RankError, match="of the program's own"):
        ranks(2).run(one_rank_fails)
