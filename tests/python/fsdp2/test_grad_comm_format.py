"""Gradients that messages send in 8 or 4 bits: equal to a reference that rounds each rank's contribution once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.hosts import can_pretend_hosts, pretended_host
from support.marks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import libfsdp
from libfsdp import GradCommFormat, MixedPrecisionPolicy, fully_shard
from libfsdp._comm import mesh as mesh_module

ROWS, COLUMNS = 8, 1000
FORMATS = [
    GradCommFormat(),
    GradCommFormat(bits=4, block=64, hadamard=True),
    GradCommFormat(bits=4, error_feedback=True),
]


@contextmanager
def ranks_on_hosts(ranks_per_host: int | None = None) -> Iterator[None]:
    """Within it, meshes are made anew. None: all ranks send messages."""
    world = mesh_module._own_world()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "meshes", {})
        patch.setattr(world, "groups", {})
        if ranks_per_host is None:
            patch.setenv("FSDP_SHARED_MEMORY", "0")
        else:
            patch.delenv("FSDP_SHARED_MEMORY", raising=False)
        with nullcontext() if ranks_per_host is None else pretended_host(dist.get_rank() // ranks_per_host):
            yield


class Dot(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.to(self.weight.dtype)).sum()


def gradient_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, COLUMNS, generator=generator) * 10 ** torch.randn(ROWS, 1, generator=generator)


def transformed(block: Tensor) -> Tensor:
    if block.numel() == 1:
        return block
    first, second = (transformed(half) for half in block.chunk(2))
    return torch.cat([first + second, first - second])


def rounded(values: Tensor, form: GradCommFormat) -> Tensor:
    """A contribution in fp32 as it arrives."""
    arrived = []
    for block in values.split(form.block):
        size = -(-block.numel() // 8) * 8 if not form.hadamard else max(8, 1 << (block.numel() - 1).bit_length())
        padded = torch.cat([block, block.new_zeros(size - block.numel())])
        norm = torch.tensor(1.0) / torch.tensor(float(size)).sqrt()
        if form.hadamard:
            padded = transformed(padded * norm)
        levels = 127 if form.bits == 8 else 7
        scale = padded.abs().max() / levels
        padded = (padded / scale).round().clamp(-levels, levels) * scale if scale > 0 else torch.zeros_like(padded)
        if form.hadamard:
            padded = transformed(padded * norm)
        arrived.append(padded[: block.numel()])
    return torch.cat(arrived)


def pairwise(terms: Sequence[Tensor]) -> Tensor:
    while len(terms) > 1:
        terms = [terms[i] + terms[i + 1] if i + 1 < len(terms) else terms[i] for i in range(0, len(terms), 2)]
    return terms[0]


class Sums:
    """The sums over some senders, of which each rounds what it sends to another one."""

    def __init__(self, form: GradCommFormat) -> None:
        self.form = form
        self.lost: dict[tuple[int, int], Tensor] = {}

    def of(self, regions: Sequence[Tensor], receiver: int) -> Tensor:
        """The sum of the senders' contributions, in fp32, on one of them."""
        terms = []
        for sender, region in enumerate(regions):
            if sender == receiver:
                terms.append(region)
                continue
            exact = region + self.lost.get((sender, receiver), torch.zeros_like(region))
            terms.append(rounded(exact, self.form))
            if self.form.error_feedback:
                self.lost[sender, receiver] = exact - terms[-1]
        return pairwise(terms)


def own_rows(gradients: Sequence[Tensor], ranks: int, rank: int) -> list[Tensor]:
    return [gradient.chunk(ranks)[rank].flatten().float() for gradient in gradients]


def local_gradient(model: Any) -> Tensor:
    gradient: Tensor = model.weight.grad.to_local()
    return gradient.flatten()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("policy", ["fp32", "computed", "bf16"])
@on_ranks(2, 4)
def test_each_message_is_rounded_once(form: GradCommFormat, policy: str) -> None:
    """A policy that computes in bf16 sends gradients as they were computed, from the second step on."""
    bf16 = torch.bfloat16
    policies = {
        "fp32": MixedPrecisionPolicy(),
        "computed": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32),
        "bf16": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16),
    }
    rank, size = dist.get_rank(), dist.get_world_size()
    sums = Sums(form)
    with ranks_on_hosts():
        model = fully_shard(Dot(), grad_comm_format=form, mp_policy=policies[policy])
        for step in range(3):
            model.zero_grad()
            model(gradient_of(rank, step)).backward()
            gradients = [gradient_of(r, step).to(torch.float32 if policy == "fp32" else bf16) for r in range(size)]
            expected = sums.of(own_rows(gradients, size, rank), rank) / size
            assert torch.equal(local_gradient(model), expected.to(bf16).float() if policy == "bf16" else expected)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.skipif(not can_pretend_hosts(), reason="this system refuses mount namespaces")
@on_ranks(4)
def test_hosts_round_their_sums(form: GradCommFormat) -> None:
    rank = dist.get_rank()
    sums = Sums(form)
    with ranks_on_hosts(2):
        model = fully_shard(Dot(), grad_comm_format=form)
        for step in range(3):
            model.zero_grad()
            model(gradient_of(rank, step)).backward()
            of_ranks = own_rows([gradient_of(r, step) for r in range(4)], 4, rank)
            expected = sums.of([of_ranks[0] + of_ranks[1], of_ranks[2] + of_ranks[3]], rank // 2) / 4
            assert torch.equal(local_gradient(model), expected)
        # A region of 2,000 elements has 15 blocks of 128 and one of 80, or 31 of 64 and one of 16.
        sent = {8: 15 * 132 + 84, 4: 15 * 68 + 44} if form.block == 128 else {4: 31 * 36 + 12}
        wire = libfsdp.wire_stats(model)
        of_neighbours = wire["all_gather_bytes"] - wire["shared_memory_bytes"] + wire["reduce_scatter_bytes"]
        before = of_neighbours, wire["reduce_scatter_bytes"]
        model(gradient_of(rank, 0)).backward()
        reduced = libfsdp.wire_stats(model)["reduce_scatter_bytes"] - before[1]
        assert reduced == sent[form.bits] + 2 * 2000 * 4  # To the other host, and read by the neighbour.


@pytest.mark.parametrize("form", FORMATS, ids=str)
@on_ranks(4)
def test_replicas_round_their_sums(form: GradCommFormat) -> None:
    """With HSDP: both hops send messages here. Each replica sums an equal share of a shard."""
    rank = dist.get_rank()
    outer, inner = rank // 2, rank % 2
    hops = [Sums(form), Sums(form)], Sums(form)
    with ranks_on_hosts():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(Dot(), mesh=mesh, grad_comm_format=form)
        for step in range(3):
            model.zero_grad()
            model(gradient_of(rank, step)).backward()
            partial = []
            for replica in range(2):
                of_row = [gradient_of(2 * replica + r, step) for r in range(2)]
                partial.append(hops[0][replica].of(own_rows(of_row, 2, inner), inner) / 4)
            shares = list(zip(*(one.chunk(2) for one in partial), strict=True))
            expected = torch.cat([hops[1].of(share, k) for k, share in enumerate(shares)])
            assert torch.equal(local_gradient(model), expected), (outer, inner, step)


@pytest.mark.parametrize("placements", ["no_shard", "optim", "optim_grads"])
@on_ranks(2)
def test_strategies_have_the_same_bits(placements: str) -> None:
    form = GradCommFormat(bits=4, stochastic_rounding=True, seed=3, error_feedback=True)

    def gradients(**options: Any) -> list[Tensor]:
        model = fully_shard(Dot(), grad_comm_format=form, **options)
        results = []
        for step in range(3):
            model.zero_grad()
            model(gradient_of(dist.get_rank(), step)).backward()
            grad = model.weight.grad
            results.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone())
        return results

    with ranks_on_hosts():
        expected, again, others = gradients(), gradients(), gradients(placements=placements)
    assert all(map(torch.equal, expected, again))
    assert all(map(torch.equal, expected, others))


@on_ranks(2)
def test_several_reductions_add_up() -> None:
    form = GradCommFormat(bits=4, error_feedback=True)
    rank = dist.get_rank()
    sums = Sums(form)
    with ranks_on_hosts():
        model = fully_shard(Dot(), grad_comm_format=form)
        for step in range(2):  # Both reduce.
            model(gradient_of(rank, step)).backward()
        expected = [sums.of(own_rows([gradient_of(r, step) for r in range(2)], 2, rank), rank) / 2 for step in range(2)]
        assert torch.equal(local_gradient(model), expected[0] + expected[1])
        model.zero_grad()
        model.set_requires_gradient_sync(False)  # What adds up is rounded once.
        model(gradient_of(rank, 2)).backward()
        model.set_requires_gradient_sync(True)
        model(gradient_of(rank, 3)).backward()
        added = [gradient_of(r, 2) + gradient_of(r, 3) for r in range(2)]
        assert torch.equal(local_gradient(model), sums.of(own_rows(added, 2, rank), rank) / 2)


@on_ranks(2)
def test_seeds_and_steps_draw_other_numbers() -> None:
    with ranks_on_hosts():
        gradients = []
        for seed in (0, 1):
            model = fully_shard(Dot(), grad_comm_format=GradCommFormat(stochastic_rounding=True, seed=seed))
            for _ in range(2):
                model.zero_grad()
                model(gradient_of(dist.get_rank(), 0)).backward()
                gradients.append(local_gradient(model).clone())
    for i, one in enumerate(gradients):
        assert not any(torch.equal(one, other) for other in gradients[:i])


@on_ranks(2)
def test_a_replay_check_changes_nothing() -> None:
    """It reduces a second time, with the same random numbers and what had been lost before."""
    form = GradCommFormat(bits=4, stochastic_rounding=True, error_feedback=True)

    def gradients(checks: bool) -> list[Tensor]:
        model = fully_shard(Dot(), grad_comm_format=form)
        check = libfsdp.ReplayCheck(model, every=1)
        results = []
        for step in range(3):
            model.zero_grad()
            batch = gradient_of(dist.get_rank(), step)
            if checks:
                check.run(lambda x: model(x).backward(), batch)
            else:
                model(batch).backward()
            results.append(local_gradient(model).clone())
        assert check.checked == (2 if checks else 0)  # The first microbatch forms the model.
        return results

    with ranks_on_hosts():
        assert all(map(torch.equal, gradients(checks=True), gradients(checks=False)))


def spoiled(value: float) -> Tensor:
    x = gradient_of(0, 0)
    x[-1, 500] = value
    return x


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@on_ranks(2)
def test_nan_arrives_and_is_not_kept(value: float) -> None:
    form = GradCommFormat(bits=4, error_feedback=True)
    rank = dist.get_rank()
    with ranks_on_hosts():
        model = fully_shard(Dot(), grad_comm_format=form, report_nan_in_param_grad=True)
        # Only a report that comes from the sum sees the block of an infinity.
        with pytest.raises(libfsdp.Error, match="weight"):
            model(spoiled(value) if rank == 0 else gradient_of(1, 0)).backward()
        quiet = fully_shard(Dot(), grad_comm_format=form)
        quiet(spoiled(value) if rank == 0 else gradient_of(1, 0)).backward()
        assert local_gradient(quiet).isnan().sum() == (128 if rank == 1 else 0)
        quiet.zero_grad()
        quiet(gradient_of(rank, 1)).backward()
        assert local_gradient(quiet).isfinite().all()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError("on purpose")


@on_ranks(2)
def test_memory_of_error_feedback() -> None:
    rank = dist.get_rank()
    kept = ROWS // 2 * COLUMNS * 4

    def communication(model: Any) -> int:
        live: int = libfsdp.memory_stats(model)["communication.live"]
        return live

    with ranks_on_hosts():
        model = fully_shard(Dot(), grad_comm_format=GradCommFormat(bits=4, error_feedback=True))
        plain = fully_shard(Dot(), grad_comm_format=GradCommFormat(bits=4))
        for one in (model, plain):
            one(gradient_of(rank, 0)).backward()
        assert (communication(model), communication(plain)) == (kept, 0)
        # A backward that fails forgets what was lost, with all gradients.
        x = Fails.apply(torch.ones(()).requires_grad_()) * gradient_of(rank, 1)
        with pytest.raises(ValueError, match="on purpose"):
            model(x).backward()
        model.zero_grad()
        model(gradient_of(rank, 0)).backward()
        gradients = own_rows([gradient_of(r, 0) for r in range(2)], 2, rank)
        assert torch.equal(local_gradient(model), Sums(GradCommFormat(bits=4)).of(gradients, rank) / 2)


@on_ranks(2)
def test_plans_count_the_same() -> None:
    form = GradCommFormat(bits=4, hadamard=True, error_feedback=True)
    with ranks_on_hosts():
        model = fully_shard(Dot(), grad_comm_format=form)
        before = 0
        for step in range(3):
            if step == 2:
                before = libfsdp.wire_stats(model)["reduce_scatter_bytes"]
                libfsdp.reset_peak_memory_stats(model)
            model(gradient_of(dist.get_rank(), step)).backward()
            model.zero_grad()
        sent = libfsdp.wire_stats(model)["reduce_scatter_bytes"] - before
        mesh = libfsdp.PlannedMesh(ranks=2, device_type="cpu", shared_memory=False, rank=dist.get_rank())
        plan = libfsdp.plan(Dot(), mesh, grad_comm_format=form)
        assert plan.wire["reduce_scatter_bytes"] == sent == 31 * 68 + 4 + 16
        for name in ("communication.live", "communication.peak", "unreduced_gradients.peak"):
            assert plan.memory[name] == libfsdp.memory_stats(model)[name], name


@on_ranks(2)
def test_what_is_refused() -> None:
    for options, text in (({"bits": 2}, "2 bits"), ({"block": 33}, "multiple of 32"), ({"block": 96, "hadamard": True}, "power of two")):
        with pytest.raises(ValueError, match=text):
            GradCommFormat(**options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="hadamard is 1"):
        GradCommFormat(hadamard=1)  # type: ignore[arg-type]
    with pytest.raises(libfsdp.Error, match="'weight' are sent in float64"):
        fully_shard(Dot().double(), grad_comm_format=GradCommFormat())


@on_ranks(2, fresh=True)
def test_ranks_with_other_formats() -> None:
    form = GradCommFormat(stochastic_rounding=True, seed=dist.get_rank())
    model = fully_shard(Dot(), grad_comm_format=form)
    with pytest.raises(libfsdp.Error, match=r"(?s)rank 0 has .*with seed 0.*rank 1 has .*with seed 1"):
        model(gradient_of(0, 0))
