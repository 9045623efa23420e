"""QLoRA: four-bit weights of bitsandbytes travel and last as they are, under adapters of peft that are trained."""

from __future__ import annotations

import pytest
from support import clients, qlora, qlora_export
from support.comparison import differences
from support.marks import at_night
from support.ranks import ComparedRanks, StartRanks

pytestmark = pytest.mark.skipif(
    not clients.installed_packages("bitsandbytes", "peft", "transformers"),
    reason="not installed: bitsandbytes, peft and transformers",
)


@pytest.mark.parametrize(
    ("options", "world"),
    [
        ("", 2),
        at_night("double checkpointing", 4),
        ("double float32 policy offload", 2),
        ("bfloat16 policy checkpointing", 2),
        at_night("double", 2),
        at_night("policy", 2),
        at_night("float32", 4),
        at_night("bfloat16 offload", 4),
        at_night("double policy checkpointing offload", 4),
        at_night("float32 policy", 4),
    ],
)
def test_trains_as_in_one_process(ranks: StartRanks, options: str, world: int) -> None:
    """To the last bit: sums over ranks are made in pairs, divisions are by powers of two, and codes are copied."""
    losses, parameters = qlora.in_one_process(world, options)
    for rank, of_rank in enumerate(ranks(world).run(qlora.with_qlora, "libfsdp", options)):
        assert of_rank.losses == losses[rank]
        assert not (text := differences("final bits", of_rank.parameters, parameters, {})), text


@pytest.mark.parametrize(
    "options", ["double policy", at_night("bfloat16 policy checkpointing"), at_night("float32 offload")]
)
def test_trains_as_with_fsdp2(compared_ranks: ComparedRanks, options: str) -> None:
    """Where FSDP2 can: it casts codes that are stored in another floating-point dtype than the policy's."""
    theirs, ours = (compared_ranks[name](2).run(qlora.with_qlora, name, options) for name in ("fsdp2", "libfsdp"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.losses == other.losses
        assert not (text := differences("final bits", mine.parameters, other.parameters, {})), text


@pytest.mark.parametrize(
    ("options", "world"), [("float32 policy", 2), ("policy", 4), at_night("bfloat16", 2), at_night("", 2)]
)
def test_codes_travel_as_they_are(ranks: StartRanks, options: str, world: int) -> None:
    """A policy converts the other parameters alone."""
    for sent, expected in ranks(world).run(qlora.gathered_bytes, options):
        assert sent == expected


@pytest.mark.parametrize(
    ("options", "world"),
    [("double", 4), ("float32 policy checkpointing", 2), at_night("bfloat16 policy offload", 2), at_night("", 2)],
)
def test_class_and_state_survive(ranks: StartRanks, options: str, world: int) -> None:
    ranks(world).run(qlora.check_forms, options)


@pytest.mark.parametrize(
    ("options", "way", "world"),
    [
        ("double", "dcp", 2),
        ("double bfloat16 policy", "libfsdp", 2),
        ("double", "whole", 4),
        ("double", "pickle", 2),
        *(at_night("float32 policy offload", way, 2) for way in ("dcp", "libfsdp", "whole", "pickle")),
    ],
)
def test_checkpoints_go_on(ranks: StartRanks, options: str, way: str, world: int) -> None:
    ranks(world).run(qlora.check_checkpoint, options, way)


@pytest.mark.parametrize("options", ["double", at_night("bfloat16")])
def test_whole_state_dict_is_that_of_one_process(ranks: StartRanks, options: str) -> None:
    """With the parts of quant_state, by which transformers and bitsandbytes load it."""
    expected = {name: qlora.bits(tensor) for name, tensor in qlora.make(options).state_dict().items()}
    assert any(name.endswith(".nested_absmax" if options == "double" else ".absmax") for name in expected)
    whole = ranks(2).run(qlora.whole_state, options)[0]
    assert list(whole) == list(expected)
    assert not (text := differences("bits", whole, expected, {})), text


@pytest.mark.parametrize(
    ("how", "gathers"), [("kept", [1, 1, 1]), ("kept forever", [1, 1, 1]), at_night("freed", [6, 6, 6])]
)
def test_frozen_units_stay_for_the_microbatches_of_a_step(ranks: StartRanks, how: str, gathers: list[int]) -> None:
    """Four microbatches per step. The last of the two blocks stays from forward into backward by itself, as does the root.

    After an optimizer's step, all that is kept is gathered anew.
    """
    for sent, sizes in ranks(2).run(qlora.gathers_of_a_step, how):
        each = sizes["root"] + 3 * sizes["others"] // 2
        assert sent == [4 * each + count * sizes["codes"] for count in gathers]


@pytest.mark.parametrize(
    ("options", "world"), [("", 2), ("double float32", 2), at_night("double", 4), at_night("bfloat16 policy offload", 2)]
)
def test_loads_into_a_quantized_module(ranks: StartRanks, options: str, world: int) -> None:
    ranks(world).run(qlora_export.loads, options)


def test_what_does_not_fit_is_one_error(ranks: StartRanks) -> None:
    ranks(2).run(qlora_export.does_not_fit)


@pytest.mark.parametrize(("options", "world"), [("", 2), ("double float32", 2), at_night("double policy", 4)])
def test_a_plan_sends_codes_as_they_are(ranks: StartRanks, options: str, world: int) -> None:
    ranks(world).run(qlora_export.sent, options)
