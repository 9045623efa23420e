"""When libfsdp's Python package communicates relative to computation, how much, and what it holds: all as numbers.

The model is four blocks of equal size between an embedding and a head, so five units; the root's parameters stay whole from forward into
backward, as FSDP2's do.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import on_ranks
from support.models import Case, Transformer, next_token_loss, tokens
from support.ranks import ComparedRanks, StartRanks, run_both
from support.training import Options, batch_of, make_optimizer, mesh_of, seeded, shard
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import libfsdp

Stats = dict[str, int]
BLOCKS = 4
UNITS = BLOCKS + 1
CASE = Case(lambda: Transformer(blocks=BLOCKS), tokens(2, 8), lambda m: list(m.blocks), next_token_loss)
bf16, fp32 = torch.bfloat16, torch.float32


def stats_of(model: Any) -> Stats:
    """The engine's counts so far, and what it holds now."""
    return {**libfsdp.wire_stats(model), **libfsdp.memory_stats(model)}


def whole_bytes(modules: list[nn.Module], dtype: torch.dtype, ranks: int) -> int:
    """Of the modules' parameters, with their rows rounded up to a number that divides by the ranks."""
    of_row = ((p.size(0), p[0].numel()) for m in modules for p in m.parameters())
    return sum(-(-rows // ranks) * ranks * numel * dtype.itemsize for rows, numel in of_row)


@dataclass
class Watched:
    """Counts at moments of one step, less those at its beginning, and what the engine held there."""

    moments: dict[str, Stats] = field(default_factory=dict)
    step: Stats = field(default_factory=dict)  # What a whole step adds.
    after: Stats = field(default_factory=dict)
    block_bytes: int = 0  # Of a block's parameters in the dtype of computation, whole.
    root_bytes: int = 0
    shard_bytes: int = 0  # Of this rank's rows of all parameters.
    parameters: int = 0

    def at(self, moments: list[str], name: str) -> list[int]:
        """A number at some moments."""
        return [self.moments[moment][name] for moment in moments]


def watch(options: Options, number: int) -> Watched:
    """Step `number`, after those before it: `forward i` is in the middle of block i, `backward i`, too."""
    row = dist.get_world_size() // options.replicas
    plain = seeded(CASE)
    compute = options.compute or fp32
    seen = Watched(block_bytes=whole_bytes([plain.get_submodule("blocks.0")], compute, row))
    seen.root_bytes = whole_bytes([plain], compute, row) - BLOCKS * seen.block_bytes
    model = shard(plain, CASE, "libfsdp", options)
    seen.shard_bytes = sum(p.to_local().nbytes for p in model.parameters())
    seen.parameters = len(list(model.parameters()))
    optimizer = make_optimizer(options, model.parameters())
    now: dict[str, Stats] = {}
    for i, block in enumerate(model.blocks):
        block.norms[0].register_forward_pre_hook(lambda *_, i=i: now.update({f"forward {i}": stats_of(model)}))
        block.up.register_full_backward_hook(lambda *_, i=i: now.update({f"backward {i}": stats_of(model)}))
    for step in range(number + 1):
        before = stats_of(model) if step > 0 else {}
        for micro in range(options.microbatches):
            if options.sync == "last":
                model.set_requires_gradient_sync(micro == options.microbatches - 1)
            CASE.loss(model, batch_of(CASE, step, micro, dist.get_rank())).backward()
            now[f"microbatch {micro}"] = stats_of(model)
        optimizer.step()
        optimizer.zero_grad()
    seen.after = stats_of(model)
    counts = [name for name in seen.after if "." not in name]
    since = {moment: {**of_it, **{n: of_it[n] - before.get(n, 0) for n in counts}} for moment, of_it in now.items()}
    seen.moments = since
    seen.step = {name: seen.after[name] - before.get(name, 0) for name in counts}
    return seen


Steps = Callable[..., list[Watched]]


@pytest.fixture(scope="module")
def watched(ranks: StartRanks) -> Steps:
    """Watched steps by rank, each made once."""
    return functools.cache(lambda options, number=2, world=2: ranks(world).run(watch, options, number))


RESHARD = Options(reshard=None)
KEEP = Options(reshard=False)
FORWARD = [f"forward {i}" for i in range(BLOCKS)]
BACKWARD = [f"backward {i}" for i in reversed(range(BLOCKS))]


def test_forward_gathers_one_block_ahead(watched: Steps) -> None:
    """In block i: the root, the blocks up to i, and the next one, which travels while i computes."""
    for seen in watched(RESHARD):
        assert seen.at(FORWARD, "all_gathers") == [3, 4, 5, 5]
        assert seen.at(FORWARD, "reduce_scatters") == [0, 0, 0, 0]


def test_the_first_forward_knows_no_order_and_gathers_what_it_enters(watched: Steps) -> None:
    """Counts go on from model to model on the same mesh; before its first forward, a model has none of its own."""
    for seen in watched(RESHARD, number=0):
        first = seen.moments["forward 0"]["all_gathers"]
        assert [count - first for count in seen.at(FORWARD, "all_gathers")] == [0, 1, 2, 3]


def test_backward_gathers_ahead_and_reduces_behind(watched: Steps) -> None:
    """The last block is still whole. A block is reduced when backward has left it, beside the computation of the next."""
    for seen in watched(RESHARD):
        assert seen.at(BACKWARD, "all_gathers") == [6, 7, 8, 8]
        assert seen.at(BACKWARD, "reduce_scatters") == [0, 1, 2, 3]
        assert seen.step["reduce_scatters"] == UNITS


def test_without_resharding_each_unit_travels_once(watched: Steps) -> None:
    for seen in watched(KEEP):
        assert seen.at(BACKWARD, "all_gathers") == [5, 5, 5, 5]
        assert (seen.step["all_gathers"], seen.step["reduce_scatters"]) == (UNITS, UNITS)


@pytest.mark.parametrize(
    "options",
    [RESHARD, KEEP, Options(compute=bf16, reduce=fp32), Options(compute=bf16), Options(reduce=bf16)],
    ids=["reshard", "keep", "bf16", "all_bf16", "bf16_wire"],
)
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_of_a_step(watched: Steps, options: Options, world: int) -> None:
    """Each gather sends this rank's rows to the others, each reduction the others' rows to them; the last block stays.

    In bf16 with sums in fp32, FSDP2 gathers each block twice, and reduces fp32: this is 0.75 of its bytes, and less.
    """
    for seen in watched(options, world=world):
        again = 0 if options.reshard is False else BLOCKS - 1
        gathered = seen.root_bytes + (BLOCKS + again) * seen.block_bytes
        assert seen.step["all_gather_bytes"] == gathered * (world - 1) // world
        compute = options.compute or fp32
        travels = min(compute, options.wire, key=lambda dtype: dtype.itemsize)  # In bf16 also where sums are in fp32.
        whole = (seen.root_bytes + BLOCKS * seen.block_bytes) * travels.itemsize // compute.itemsize
        assert seen.step["reduce_scatter_bytes"] == whole * (world - 1) // world
        if (options.compute, options.wire) == (bf16, fp32):
            blocks = BLOCKS * seen.block_bytes
            of_fsdp2 = seen.root_bytes + 2 * blocks + 2 * (seen.root_bytes + blocks)
            assert gathered + whole <= 0.76 * of_fsdp2


def test_two_blocks_and_the_root_are_whole_at_most(watched: Steps) -> None:
    for seen in watched(RESHARD):
        root, block = seen.root_bytes, seen.block_bytes
        ahead = root + 2 * block
        assert seen.at(FORWARD, "gathered_parameters.live") == [ahead, ahead, ahead, root + block]
        assert seen.at(BACKWARD, "gathered_parameters.live") == [ahead, ahead, ahead, root + block]
        assert seen.after["gathered_parameters.peak"] == ahead
        assert seen.after["unreduced_gradients.peak"] <= ahead


def test_without_resharding_all_is_whole_until_backward_has_left_it(watched: Steps) -> None:
    for seen in watched(KEEP):
        whole = seen.root_bytes + BLOCKS * seen.block_bytes
        left = [whole - i * seen.block_bytes for i in range(BLOCKS)]
        assert seen.at(BACKWARD, "gathered_parameters.live") == left
        assert seen.after["gathered_parameters.peak"] == whole


def test_bf16_halves_what_is_gathered(watched: Steps) -> None:
    """But for what is left free, so that each rank's rows of a parameter begin at a multiple of 64 bytes."""
    rows = 2 * len(list(seeded(CASE).parameters()))
    for wide, narrow in zip(watched(RESHARD), watched(Options(compute=bf16, reduce=fp32)), strict=True):
        half = wide.after["gathered_parameters.peak"] // 2
        assert half <= narrow.after["gathered_parameters.peak"] < half + 64 * rows


@pytest.mark.parametrize("options", [RESHARD, KEEP], ids=["reshard", "keep"])
def test_between_steps_there_are_shards_alone(watched: Steps, options: Options) -> None:
    """Each parameter's rows begin at a multiple of 64 bytes, and all ranks have memory for as many rows."""
    parameters = len(list(seeded(CASE).parameters()))
    for seen in watched(options):
        for kind in ("gathered_parameters", "unreduced_gradients", "communication", "main_gradients"):
            assert seen.after[f"{kind}.live"] == 0, kind
        most = (seen.root_bytes + BLOCKS * seen.block_bytes) // 2 + 64 * parameters
        assert seen.shard_bytes <= seen.after["main_parameters.live"] <= most
        assert seen.after["total.live"] == seen.after["main_parameters.live"]


def test_steady_steps_allocate_no_buffers(watched: Steps) -> None:
    """On a GPU, buffers lie in torch's caching allocator between steps."""
    for seen in watched(RESHARD):
        assert (seen.step["slot_allocations"] == 0) == (device.TYPE == "cpu")


def test_gradients_of_an_accumulation_travel_once(watched: Steps) -> None:
    """Backwards without synchronization send nothing."""
    for seen in watched(Options(microbatches=3, sync="last")):
        reduced = [seen.moments[f"microbatch {i}"]["reduce_scatters"] for i in range(3)]
        assert reduced == [0, 0, UNITS]


def test_offloaded_shards_are_not_on_the_device(watched: Steps) -> None:
    for seen in watched(Options(offload=True)):
        assert seen.after["total.live"] == 0
        assert seen.after["host.live"] >= seen.shard_bytes


def test_hsdp_gathers_and_reduces_within_a_row_and_adds_up_over_the_other_dimension(
    watched: Steps,
) -> None:
    """On 2 x 2 ranks, each sends half a unit within the row, and half of a shard's sums to its replica, twice."""
    for seen in watched(Options(replicas=2), world=4):
        gathered = seen.root_bytes + (2 * BLOCKS - 1) * seen.block_bytes
        whole = seen.root_bytes + BLOCKS * seen.block_bytes
        assert seen.step["all_gather_bytes"] == gathered // 2 + whole // 4
        assert seen.step["reduce_scatter_bytes"] == whole // 2 + whole // 4
        assert (seen.step["all_gathers"], seen.step["reduce_scatters"]) == (2 * BLOCKS + UNITS, 2 * UNITS)


@pytest.mark.parametrize("replicas", [3, 4])
def test_replicas_send_what_an_all_reduce_sends(watched: Steps, replicas: int) -> None:
    """However many they are: each element goes to who adds it up, and its sum to all others."""
    for seen in watched(Options(replicas=replicas), world=replicas):
        whole = seen.root_bytes + BLOCKS * seen.block_bytes
        for sent in (seen.step["all_gather_bytes"], seen.step["reduce_scatter_bytes"]):
            least = whole * (replicas - 1) / replicas
            # The last share may be shorter.
            assert least <= sent <= least + (replicas - 1) * 4 * seen.parameters


def count_collectives(implementation: str, options: Options) -> dict[str, int]:
    """Those of a third step, as torch's own tool sees them."""
    model = shard(seeded(CASE), CASE, implementation, options)
    for step in range(2):
        CASE.loss(model, batch_of(CASE, step, 0, dist.get_rank())).backward()
    with CommDebugMode() as seen:
        CASE.loss(model, batch_of(CASE, 2, 0, dist.get_rank())).backward()
    return {str(operator): count for operator, count in seen.get_comm_counts().items()}


@pytest.mark.parametrize("options", [RESHARD, KEEP], ids=["reshard", "keep"])
def test_comm_debug_mode_counts_as_many_collectives_as_with_fsdp2(
    compared_ranks: ComparedRanks, options: Options
) -> None:
    ours, theirs = run_both(compared_ranks, 2, count_collectives, options)
    assert ours == theirs
    assert sum(ours[0].values()) == (3 * BLOCKS + 2 if options.reshard is None else 2 * UNITS)


class Regions(nn.Module):
    """Six blocks, of which so many follow each other in each checkpointed region."""

    def __init__(self, in_region: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(6))
        self.in_region = in_region

    def _run(self, first: int, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[first : first + self.in_region]:
            x = block(x)  # Backward enters the last one of a region before it repeats the region.
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in range(0, len(self.blocks), self.in_region):
            x = checkpoint(self._run, first, x, use_reentrant=False)
        return x


def repeat_regions(in_region: int) -> tuple[list[int], int, list[torch.Tensor]]:
    """Reductions of each step, the most bytes of unreduced gradients behind a block of the last one, and the gradients."""
    model: Any = Regions(in_region)
    for block in model.blocks:
        libfsdp.fully_shard(block)
    libfsdp.fully_shard(model)
    lives: list[int] = []
    for block in model.blocks:
        block[0].register_full_backward_hook(
            lambda *_: lives.append(libfsdp.memory_stats(model)["unreduced_gradients.live"])
        )
    reductions, before = [], 0
    for _ in range(4):
        model.zero_grad()
        lives.clear()
        model(torch.ones(2, 24) * (1 + dist.get_rank())).sum().backward()
        now = libfsdp.wire_stats(model)["reduce_scatters"]
        reductions.append(now - before)
        before = now
    return reductions, max(lives), [p.grad.full_tensor() for p in model.parameters()]


@on_ranks(2)
def test_gradients_of_checkpointed_regions_are_reduced_on_departure() -> None:
    (reductions, peak, values), (_, alone, expected) = repeat_regions(2), repeat_regions(1)
    assert reductions[2:] == [6, 6]
    assert peak <= alone
    assert all(map(torch.equal, values, expected))


class LargeHead(nn.Module):
    """Its embedding and head have 8 MiB of gradients each, from which on a parameter of the root is reduced by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 512)
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        self.norm = nn.LayerNorm(512)
        self.head = nn.Linear(512, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x))


@on_ranks(2)
def test_a_large_head_is_reduced_before_the_blocks() -> None:
    torch.manual_seed(0)
    model: Any = LargeHead()
    whole = copy.deepcopy(model)
    for block in model.blocks:
        libfsdp.fully_shard(block)
    libfsdp.fully_shard(model)
    head = model.head.weight.numel() * 4
    live: list[int] = []
    # The last block's gradients have been reduced by then.
    model.blocks[1].register_full_backward_hook(
        lambda *_: live.append(libfsdp.memory_stats(model)["unreduced_gradients.live"])
    )
    reductions: list[int] = []
    for step in range(3):
        loss = model(torch.arange(8).add(step + dist.get_rank())).square().mean()
        before = stats_of(model)
        loss.backward()
        after = stats_of(model)
        reductions.append(after["reduce_scatters"] - before["reduce_scatters"])
        whole.zero_grad()
        for rank in range(2):
            whole(torch.arange(8).add(step + rank)).square().mean().div(2).backward()
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(ours.grad.full_tensor(), theirs.grad)
        model.zero_grad()
    assert reductions == [6, 6, 6]  # Three blocks; the norm, the head, and the embedding.
    assert live[0] >= head > max(live[1:])


@on_ranks(4)
def test_hfsdp_gathers_over_the_outer_ranks_once() -> None:
    """Each unit once over the outer ranks; over the inner ones each unit, and the first of two blocks again in backward."""
    mesh = mesh_of(2)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    options: dict[str, Any] = {"mesh": mesh, "outer_placements": "optim"}
    for layer in model[:2]:
        libfsdp.fully_shard(layer, **options)
    libfsdp.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    before = 0
    for _ in range(4):
        before = libfsdp.wire_stats(model)["all_gathers"] if model._get_fsdp_state().model else 0
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert libfsdp.wire_stats(model)["all_gathers"] - before == 3 + 4
