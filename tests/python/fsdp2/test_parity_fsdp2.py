"""Training with libfsdp's Python package against torch's FSDP2 and against a plain replica in one process.

The same runs with FSDP2 as the implementation check the harness itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import assert_follows_replica, assert_same_runs, one_order
from support.marks import needs_transformers
from support.models import CASES as OWN_MODELS
from support.ranks import PRELOADED, ComparedRanks, run_both
from support.training import CASES, REDUCES_IN_OWN_DTYPE, Options, Run, api, mesh_of, train

# What is common to its models takes most of their imports.
PRELOADED.append("transformers.models.llama.modeling_llama")
bf16, fp32 = torch.bfloat16, torch.float32
NIGHTLY = "FSDP_NIGHTLY" in os.environ  # Each model with each of the options (make nightly).

# Each on two ranks, where all sums have one order and results are equal to the last bit.
OPTIONS = {
    "default": Options(),
    "sgd": Options(optimizer="sgd"),
    "reshard": Options(reshard=True),
    "no_reshard": Options(reshard=False),
    "bf16": Options(compute=bf16, reduce=fp32),
    "bf16_wire": Options(compute=bf16),
    "fp32_on_bf16_wire": Options(reduce=bf16),
    "offload": Options(offload=True),
    "reduce_each": Options(microbatches=3),
    "reduce_last": Options(microbatches=3, sync="last"),
    "reduce_last_bf16": Options(microbatches=3, sync="last", compute=bf16, reduce=fp32),
    "mark_last": Options(microbatches=2, mark_last=True),
    "reduce_last_no_reshard": Options(microbatches=2, sync="last", mark_last=True, reshard=False),
    "clip": Options(clip=0.01),
}
# On four ranks, each of which may add up in an order of its own.
OPTIONS_ON_4 = {
    "default": Options(),
    "reshard_to_2": Options(reshard=2),
    "hsdp": Options(replicas=2),
    "hsdp_no_reshard": Options(replicas=2, reshard=False),
    "hsdp_reduce_last": Options(replicas=2, microbatches=2, sync="last"),
    "bf16": Options(compute=bf16, reduce=fp32),
    "clip": Options(clip=0.01),
    "offload": Options(offload=True),
    "hsdp_offload": Options(replicas=2, offload=True),
    "hsdp_bf16": Options(replicas=2, compute=bf16, reduce=fp32),
    "reduce_each": Options(microbatches=2),
}


def trains(case: str, options: Options) -> bool:
    """Batch norm has no kernel for bf16 with running statistics in fp32; FSDP2 fails where no rank has used a unit, in bf16."""
    if options.compute is None:
        return True
    return case != "batch_norm" and (case, options.sync) != ("unused", "last")


def fsdp2_has_other_sums(case: str, options: Options) -> bool:
    """FSDP2 of torch 2.15 adds up the gradients of a unit's two calls in another dtype than before, which rounds differently."""
    return REDUCES_IN_OWN_DTYPE and CASES[case].called_twice and (options.compute or options.reduce) is not None


def every(options: dict[str, Options], chosen: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each model with each of the options, but for those that are chosen already."""
    return [
        (case, name) for case in CASES for name in options if (case, name) not in chosen and trains(case, options[name])
    ]


def one_order_on_two(case: str, options: Options) -> bool:
    """Whether both must add up the same numbers in the same order."""
    return one_order(case, options, 2) and not fsdp2_has_other_sums(case, options)


def pairs(wanted: Callable[[str, Options], bool] = lambda case, options: True) -> list[object]:
    """Each model with the default options, and each of the options with the transformer and one other model."""
    chosen = [(case, "default") for case in CASES]
    chosen += [("transformer", name) for name in OPTIONS if name != "default"]
    chosen += [("nested", name) for name in ("no_reshard", "bf16", "reduce_last")]
    chosen += [("unused", "reduce_last"), ("unused", "bf16"), ("batch_norm", "reduce_last"), ("tied", "no_reshard")]
    chosen += [("odd_shapes", "offload"), ("hf_llama", "bf16"), ("hf_mixtral", "bf16"), ("hf_t5", "bf16")]
    chosen += [("hf_gpt2", "offload"), ("hf_qwen2", "reduce_last"), ("hf_bert", "no_reshard"), ("hf_vit", "reshard")]
    if NIGHTLY:
        chosen += every(OPTIONS, chosen)
    return [as_parameter(case, name) for case, name in chosen if wanted(case, OPTIONS[name])]


def pairs_on_4() -> list[object]:
    """Shapes that four ranks cut unevenly, and each of the options."""
    chosen = [(case, "default") for case in ("mlp", "odd_shapes", "unused", "hf_qwen2")]
    chosen += [("transformer", name) for name in OPTIONS_ON_4] + [("odd_shapes", "hsdp")]
    chosen += [("hf_llama", "hsdp"), ("hf_mixtral", "reshard_to_2"), ("hf_gpt2", "bf16"), ("hf_t5", "hsdp_reduce_last")]
    chosen += [("hf_bert", "offload"), ("hf_vit", "hsdp_offload")]
    if NIGHTLY:
        chosen += every(OPTIONS_ON_4, chosen)
    return [as_parameter(case, name) for case, name in chosen]


def as_parameter(case: str, options: str) -> object:
    """With a readable id, and the condition that the model has."""
    return pytest.param(case, options, id=f"{case}-{options}", marks=() if case in OWN_MODELS else needs_transformers)


def not_compared(case: str, options: Options) -> bool:
    """Where FSDP2 has the same bits as libfsdp, which follows the replica, it follows, too."""
    return (NIGHTLY or not one_order_on_two(case, options)) and not fsdp2_has_other_sums(case, options)


def of(implementation: str, world: int, chosen: list[Any]) -> list[Any]:
    """Adds the implementation and the number of ranks to these models and options."""
    return [
        pytest.param(implementation, world, *one.values, id=f"{implementation}-{world}-{one.id}", marks=one.marks)
        for one in chosen
    ]


Runs = Callable[[str, str, Options, int], list[Run]]


@pytest.fixture(scope="module")
def runs(compared_ranks: ComparedRanks) -> Runs:
    """Training runs by rank, each made once."""
    return functools.cache(
        lambda case, name, options, world: compared_ranks[name](world).run(train, case, name, options)
    )


ALONE_ON_4 = pairs_on_4() if NIGHTLY else [as_parameter("odd_shapes", "hsdp"), as_parameter("mlp", "default")]
FOLLOW = of("libfsdp", 2, pairs()) + of("libfsdp", 4, pairs_on_4())
CHECKS_THE_HARNESS = of("fsdp2", 2, pairs(not_compared)) + of("fsdp2", 4, ALONE_ON_4)


@pytest.mark.parametrize(("implementation", "world", "case", "options"), FOLLOW + CHECKS_THE_HARNESS)
def test_follows_the_replica(runs: Runs, implementation: str, world: int, case: str, options: str) -> None:
    chosen = (OPTIONS if world == 2 else OPTIONS_ON_4)[options]
    assert_follows_replica(case, chosen, runs(case, implementation, chosen, world))


@pytest.mark.parametrize(("case", "options"), pairs(one_order_on_two))
def test_equals_fsdp2_on_two_ranks(runs: Runs, case: str, options: str) -> None:
    chosen = OPTIONS[options]
    assert_same_runs(runs(case, "libfsdp", chosen, 2), runs(case, "fsdp2", chosen, 2))


def shard_a_scalar(implementation: str) -> str:
    """What fully_shard says to a parameter without dimensions."""
    model = torch.nn.Linear(3, 3)
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the texts are compared)
        api(implementation).fully_shard(model, mesh=mesh_of(1))
    return str(raised.value)


def test_a_scalar_parameter_is_the_same_error(compared_ranks: ComparedRanks) -> None:
    ours, theirs = run_both(compared_ranks, 2, shard_a_scalar)
    assert ours == theirs
    assert "scale" in ours[0]
