"""Programs of others that import FSDP2, with libfsdp behind its names: the same numbers as with FSDP2 itself, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import clients, float8, lightning_clients, trainer_clients
from support.clients import Trained
from support.comparison import differences
from support.marks import at_night, needs_in_torch
from support.ranks import ComparedRanks, StartRanks

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
    theirs, ours = (compared_ranks[name](world).run(program, name, *options) for name in ("fsdp2", "libfsdp"))
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        where = f"rank {rank}: "
        assert mine.losses == other.losses, f"{where}losses {mine.losses}, not {other.losses}"
        assert mine.notes == other.notes
        for step, (a, b) in enumerate(zip(mine.gradients, other.gradients, strict=True)):
            assert not (text := differences(f"{where}step {step}: gradient", a, b, {})), text
        assert not (text := differences(f"{where}final value", mine.parameters, other.parameters, {})), text
    result: list[Trained] = ours
    return result


@needs["accelerate"]
@pytest.mark.parametrize("options", ["", at_night("bf16 full"), "efficient checkpointing", at_night("offload"), "offload bf16 full"])
def test_accelerate(compared_ranks: ComparedRanks, options: str) -> None:
    for of_rank in check_same(compared_ranks, clients.with_accelerate, *options.split()):
        assert of_rank.notes["class"] == "FSDPLlamaForCausalLM"
        assert of_rank.notes["loaded as saved"]


@needs["accelerate"]
@pytest.mark.parametrize("options", [at_night("hsdp"), at_night("hsdp bf16 full"), at_night("hsdp offload checkpointing")])
def test_accelerate_on_replicas(compared_ranks: ComparedRanks, options: str) -> None:
    """Two replicas of two shards: sums of two numbers in both directions, so they have one order."""
    for of_rank in check_same(compared_ranks, clients.with_accelerate, *options.split(), world=4):
        assert of_rank.notes["placements"] == "(Replicate(), Shard(dim=0))"
        assert of_rank.notes["loaded as saved"]


@needs["accelerate"]
@pytest.mark.parametrize("options", [at_night(""), "bf16 checkpointing"])
def test_transformers_trainer(compared_ranks: ComparedRanks, options: str) -> None:
    for of_rank in check_same(compared_ranks, clients.with_trainer, *options.split()):
        assert of_rank.notes["class"] == "FSDPLlamaForCausalLM"
        assert of_rank.notes["resumed"]


@needs["accelerate"]
@pytest.mark.parametrize("options", [at_night("hsdp offload")])
def test_transformers_trainer_on_replicas(compared_ranks: ComparedRanks, options: str) -> None:
    for of_rank in check_same(compared_ranks, clients.with_trainer, *options.split(), world=4):
        assert of_rank.notes["placements"] == "(Replicate(), Shard(dim=0))"
        assert of_rank.notes["resumed"]


@needs_distributed_config
@pytest.mark.parametrize("options", ["", "bf16", at_night("untied")])
def test_transformers_distributed_config(compared_ranks: ComparedRanks, options: str) -> None:
    for of_rank in check_same(compared_ranks, clients.with_distributed_config, *options.split()):
        assert of_rank.notes["tied"] == ("untied" not in options)
        assert of_rank.notes["loaded as saved"]


@needs_distributed_config
@pytest.mark.parametrize("options", [at_night("hsdp")])
def test_transformers_distributed_config_on_replicas(compared_ranks: ComparedRanks, options: str) -> None:
    for of_rank in check_same(compared_ranks, clients.with_distributed_config, options, world=4):
        assert of_rank.notes["loaded as saved"]


@needs["peft"]
@pytest.mark.parametrize("options", [at_night(""), "bf16"])
def test_peft_lora(compared_ranks: ComparedRanks, options: str) -> None:
    for of_rank in check_same(compared_ranks, clients.with_peft, *options.split()):
        assert of_rank.notes["trained"] == len(of_rank.notes["adapter"]) == 8


@needs["lightning"]
@pytest.mark.parametrize("options", [at_night(""), "meta"])
def test_lightning_fabric(compared_ranks: ComparedRanks, options: str) -> None:
    for of_rank in check_same(compared_ranks, lightning_clients.with_fabric, *options.split()):
        assert of_rank.notes["class"] == "FSDPLlamaForCausalLM"
        assert of_rank.notes["loaded as saved"]


@needs["lightning"]
@pytest.mark.parametrize("options", [at_night(""), "full"])
def test_lightning_trainer(compared_ranks: ComparedRanks, options: str) -> None:
    for of_rank in check_same(compared_ranks, lightning_clients.with_trainer, *options.split()):
        assert of_rank.notes["class"] == "FSDPLlamaForCausalLM"
        assert of_rank.notes["steps"] == clients.STEPS * 2
        assert of_rank.notes["resumed"]
        assert of_rank.notes["losses again"]


@needs["torchtitan"]
@needs_in_torch(torch.distributed.fsdp, "DataParallelMeshDims")  # which torchtitan imports
@pytest.mark.parametrize("options", ["compile", at_night("tied"), at_night("bf16")])
def test_torchtitan(compared_ranks: ComparedRanks, options: str) -> None:
    """It sets gradient_divide_factor to 1."""
    check_same(compared_ranks, clients.with_torchtitan, *options.split())


@needs["transformers"]
@pytest.mark.parametrize("options", [at_night(""), at_night("bf16 checkpointing")])
def test_transformers_own(compared_ranks: ComparedRanks, options: str) -> None:
    for of_rank in check_same(compared_ranks, trainer_clients.with_transformers, *options.split()):
        assert of_rank.notes["class"] == "FSDPLlamaForCausalLM"


@needs["trl"]
@pytest.mark.parametrize("options", [at_night(""), at_night("bf16")])
def test_trl(compared_ranks: ComparedRanks, options: str) -> None:
    for of_rank in check_same(compared_ranks, trainer_clients.with_trl, *options.split()):
        assert of_rank.notes["warnings"] == []


@needs["automodel"]
@pytest.mark.parametrize("options", [at_night("")])
def test_automodel(compared_ranks: ComparedRanks, options: str) -> None:
    check_same(compared_ranks, trainer_clients.with_automodel, *options.split())


@needs["verl"]
@pytest.mark.parametrize("options", [at_night("prefetch"), at_night("keep")])
def test_verl(compared_ranks: ComparedRanks, options: str) -> None:
    check_same(compared_ranks, trainer_clients.with_verl, *options.split())


@needs["torchtune"]
@pytest.mark.parametrize("options", [at_night("")])
def test_torchtune(compared_ranks: ComparedRanks, options: str) -> None:
    check_same(compared_ranks, trainer_clients.with_torchtune, *options.split())


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
