"""Programs of others that import FSDP2, with libfsdp behind its names: the same numbers as with FSDP2 itself, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import clients, float8, lightning_clients, trainer_clients
from support.clients import Trained
from support.comparison import differences
from support.marks import needs_in_torch
from support.ranks import ComparedRanks, StartRanks, run_both

needs = {
    name: pytest.mark.skipif(not clients.installed_packages(*packages), reason=f"not installed: {' '.join(packages)}")
    for name, packages in {
        "accelerate": ("accelerate", "transformers"),
        "peft": ("peft", "transformers"),
        "lightning": ("lightning", "transformers"),
        "torchtitan": ("torchtitan",),
        "torchao": ("torchao",),
        "transformers": ("transformers",),
        "trl": ("trl", "datasets", "accelerate"),
        "automodel": ("nemo_automodel",),
        "verl": ("verl", "ray", "tensordict"),
        "torchtune": ("torchtune",),
    }.items()
}

needs_distributed_config = pytest.mark.skipif(not clients.has_transformers(5, 24), reason="needs transformers 5.24")


def check_same(
    compared_ranks: ComparedRanks, program: Callable[..., Trained], *options: str, world: int = 2
) -> list[Trained]:
    """Runs a program with both, compares all that it saw, and gives what it saw with libfsdp."""
    ours, theirs = run_both(compared_ranks, world, program, *options)
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        where = f"rank {rank}: "
        assert mine.losses == other.losses, f"{where}losses {mine.losses}, not {other.losses}"
        assert mine.notes == other.notes
        for step, (a, b) in enumerate(zip(mine.gradients, other.gradients, strict=True)):
            assert not (text := differences(f"{where}step {step}: gradient", a, b, {})), text
        assert not (text := differences(f"{where}final value", mine.parameters, other.parameters, {})), text
    return ours


LLAMA = {"class": "FSDPLlamaForCausalLM"}
# Two replicas of two shards: sums of two numbers in both directions, so they have one order.
REPLICAS = {"placements": "(Replicate(), Shard(dim=0))"}
SAVED, RESUMED = {"loaded as saved": True}, {"resumed": True}
ADAPTER = {"trained": 8}  # The parameters that have gradients.
EPOCH = {"steps": 2 * clients.STEPS, "losses again": True}
imports_data_parallel_dims = needs_in_torch(torch.distributed.fsdp, "DataParallelMeshDims")
# The program, the number of ranks, its options by day, those of the night, and what it notes.
CLIENTS: list[tuple[Any, Callable[..., Trained], int, list[str], list[str], dict[str, Any]]] = [
    (needs["accelerate"], clients.with_accelerate, 2, ["", "efficient checkpointing"], ["bf16 full"], LLAMA | SAVED),
    (needs["accelerate"], clients.with_accelerate, 2, ["offload bf16 full"], ["offload"], LLAMA | SAVED),
    (needs["accelerate"], clients.with_accelerate, 4, [], ["hsdp", "hsdp bf16 full", "hsdp offload checkpointing"], REPLICAS | SAVED),
    (needs["accelerate"], clients.with_trainer, 2, ["bf16 checkpointing"], [""], LLAMA | RESUMED),
    (needs["accelerate"], clients.with_trainer, 4, [], ["hsdp offload"], REPLICAS | RESUMED),
    (needs_distributed_config, clients.with_distributed_config, 2, ["", "bf16"], [], {"tied": True} | SAVED),
    (needs_distributed_config, clients.with_distributed_config, 2, [], ["untied"], {"tied": False} | SAVED),
    (needs_distributed_config, clients.with_distributed_config, 4, [], ["hsdp"], SAVED),
    (needs["peft"], clients.with_peft, 2, ["bf16"], [""], ADAPTER),
    (needs["lightning"], lightning_clients.with_fabric, 2, ["meta"], [""], LLAMA | SAVED),
    (needs["lightning"], lightning_clients.with_trainer, 2, ["full"], [""], LLAMA | EPOCH | RESUMED),
    # It sets gradient_divide_factor to 1.
    ([needs["torchtitan"], imports_data_parallel_dims], clients.with_torchtitan, 2, ["compile"], ["tied", "bf16"], {}),
    (needs["transformers"], trainer_clients.with_transformers, 2, [], ["", "bf16 checkpointing"], LLAMA),
    (needs["trl"], trainer_clients.with_trl, 2, [], ["", "bf16"], {"warnings": []}),
    (needs["automodel"], trainer_clients.with_automodel, 2, [], [""], {}),
    (needs["verl"], trainer_clients.with_verl, 2, [], ["prefetch", "keep"], {}),
    (needs["torchtune"], trainer_clients.with_torchtune, 2, [], [""], {}),
]


def each_client() -> Iterator[Any]:
    """With each of its options."""
    for needed, program, world, by_day, at_night, notes in CLIENTS:
        marks = needed if isinstance(needed, list) else [needed]
        for options in (*by_day, *at_night):
            night = [] if options in by_day else [pytest.mark.nightly]
            yield pytest.param(program, world, options, notes, marks=marks + night, id=f"{program.__name__} {options}")


@pytest.mark.parametrize(("program", "world", "options", "notes"), list(each_client()))
def test_the_same_as_with_fsdp2(
    compared_ranks: ComparedRanks, program: Callable[..., Trained], world: int, options: str, notes: dict[str, Any]
) -> None:
    for of_rank in check_same(compared_ranks, program, *options.split(), world=world):
        assert {name: of_rank.notes[name] for name in notes} == notes


@pytest.mark.parametrize(
    "options",
    [
        "",
        pytest.param(
            "own", marks=needs_in_torch(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params")
        ),
    ],
)
def test_one_rank_has_no_images(compared_ranks: ComparedRanks, options: str) -> None:
    """Nobody waits for it, and its zeros count in the means."""
    expected = clients.images_in_one_process(2, *options.split())
    # Where no rank has any, FSDP2 has gradients of zero, if told to reduce what is unused; plain training and libfsdp have none.
    if options:
        same = check_same(compared_ranks, clients.with_images, "own")
    else:
        same = compared_ranks["libfsdp"](2).run(clients.with_images, "libfsdp")
    for of_rank in same:
        for mine, other in zip(of_rank.gradients, expected.gradients, strict=True):
            assert not (text := differences("gradient", mine, other, {})), text


@needs["torchao"]
@pytest.mark.parametrize("options", ["", "precompute"])
def test_torchao_float8_all_gather(ranks: StartRanks, options: str) -> None:
    """FSDP2 can't do this on Gloo, whose all-gather has no float8. So it is compared with training without sharding."""
    expected = float8.torchao_in_one_process(2)
    for trained, gathered in ranks(2).run(float8.with_torchao, *options.split()):
        for mine, other in zip(trained.gradients, expected.gradients, strict=True):
            assert not (text := differences("gradient", mine, other, {})), text
        assert not (text := differences("final value", trained.parameters, expected.parameters, {})), text
        assert gathered == 6 * 16 * 32 // 2, "each element takes one byte"
