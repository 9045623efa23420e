"""Whole weights with LoRA adapters merged on the way: those of peft's merge_and_unload(), and the model stays as it is."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import clients, lora
from support.marks import at_night, on_ranks
from support.weights import BF16, gathered, whole
from support.weights import assert_same as assert_same_in_order
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

import libfsdp

pytestmark = pytest.mark.skipif(
    not clients.installed_packages("transformers", "peft"), reason="not installed: transformers and peft"
)


assert_same = functools.partial(assert_same_in_order, in_order=False)


def merged(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    return whole(model, merge_adapters=True, **options)


def locals_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in model.named_parameters()}


def columns(parameter: nn.Parameter) -> Shard | None:
    size = dist.get_world_size()
    return Shard(1) if parameter.ndim == 2 and parameter.size(1) % size == 0 else None


def shardings() -> dict[str, dict[str, Any]]:
    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    plane = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return {
        "rows": {"mesh": line},
        "columns": {"mesh": line, "shard_placement_fn": columns},
        "replicated": {"mesh": line, "placements": "no_shard"},
        "hsdp": {"mesh": plane},
        "hfsdp": {"mesh": plane, "outer_placements": "optim_if_even"},
        "offload": {"mesh": line, "offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }


@pytest.mark.parametrize(
    ("size", "kind", "sharding"),
    [
        *((2, kind, "rows") for kind in ("llama", "gpt2", "bf16", "two", "saved")),
        (2, "gpt2", "columns"),
        (2, "bf16", "offload"),
        at_night(4, "llama", "rows"),
        at_night(4, "bf16", "hsdp"),
        at_night(4, "llama", "hfsdp"),
        at_night(4, "two", "columns"),
        at_night(4, "gpt2", "hfsdp"),
        at_night(4, "llama", "replicated"),
    ],
)
@on_ranks("size")
def test_as_peft(kind: str, sharding: str) -> None:
    """With adapters of few bits, to the bit: products are exact, and both sides round the same sums once for each adapter.

    (With several adapters and a base in bf16 or fp16, peft rounds after each of them, and we after the last.) With others,
    to a rounding in fp32, because a product of a part of the rows may be added up in another order.
    """
    options: dict[str, Any] = {
        "llama": {},
        "gpt2": {"family": "GPT2"},
        "bf16": {"dtype": BF16},
        "two": {"adapters": 2},
        "saved": {"modules_to_save": ["lm_head"]},
    }[kind]
    plain = lora.make(**options)
    model = lora.shard(lora.make(**options), **shardings()[sharding])
    for step in range(2):
        lora.a_step(model)
        if step == 1:
            lora.round_adapters(model)
        before = locals_of(model)
        expected = lora.merged_by_peft(plain, model)
        for bucket_bytes in (1 << 20, 3000):
            found = merged(model, bucket_bytes=bucket_bytes)
            if step == 1:
                assert_same(found, expected)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                rounding = 2 * torch.finfo(value.dtype).eps if value.is_floating_point() else 0
                torch.testing.assert_close(found[name], value, rtol=rounding, atol=4e-7)
        if step == 1 and kind != "bf16":  # there peft has rounded already
            assert_same(merged(model, dtype=BF16), expected, BF16)
        of_first = merged(model, ranks="first", bucket_bytes=3000)
        assert list(of_first) == (list(found) if dist.get_rank() == 0 else [])
        assert all(torch.equal(value, found[name]) for name, value in of_first.items())
        for name, value in locals_of(model).items():
            assert torch.equal(value, before[name]), name
    unmerged = gathered(model)
    stripped = {name.removeprefix("base_model.model.").replace("base_layer.", ""): v for name, v in unmerged.items()}
    changed = [name for name, value in expected.items() if not torch.equal(value, stripped.get(name, value))]
    assert len(changed) == 6


@pytest.mark.parametrize("size", [2, at_night(4)])
@on_ranks("size")
def test_the_least_bytes() -> None:
    """The wire has the base in the dtype that travels, and the adapters once; memory is that of two buckets and of these."""
    size = dist.get_world_size()
    model = lora.shard(lora.make())
    merged(model, names=["base_model.model.model.norm.weight"])  # which forms the engine
    own = {"base": 0, "adapters": 0}
    for name, value in locals_of(model).items():
        own["adapters" if "lora_" in name else "base"] += value.nbytes
    whole = max(p.nbytes for p in model.parameters())  # of a DTensor, all of it
    for dtype, divisor in ((None, 1), (BF16, 2)):
        before, memory = libfsdp.wire_stats(model), libfsdp.memory_stats(model)
        merged(model, dtype=dtype, bucket_bytes=4096)
        sent = libfsdp.wire_stats(model)["all_gather_bytes"] - before["all_gather_bytes"]
        assert sent == (size - 1) * (own["base"] // divisor + own["adapters"])
        after = libfsdp.memory_stats(model)
        assert after["gathered_parameters.live"] == memory["gathered_parameters.live"]
        adapters = sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)
        peak = after["gathered_parameters.peak"] - memory["gathered_parameters.live"]
        assert 2 * 4096 < peak <= 2 * max(4096, whole) + adapters + 2 * 4 * whole


@on_ranks(2)
def test_what_has_changed_in_merged_weights() -> None:
    model = lora.shard(lora.make())
    snapshot = libfsdp.WeightSnapshot()
    receiver: dict[str, Tensor] = {name: torch.zeros_like(v) for name, v in merged(model, dtype=BF16).items()}
    fractions = []
    for _ in range(3):
        lora.a_step(model)
        before = libfsdp.memory_stats(model)["gathered_parameters.live"]
        stream = libfsdp.full_weights(model, merge_adapters=True, dtype=BF16, since=snapshot)
        libfsdp.apply_changes(receiver, stream)
        fractions.append(stream.changed_fraction)
        assert libfsdp.memory_stats(model)["gathered_parameters.live"] == before
        assert_same(receiver, merged(model, dtype=BF16))
    assert fractions[0] == 1
    assert all(0 < fraction < 0.5 for fraction in fractions[1:]), fractions


@on_ranks(2)
def test_names_and_sources() -> None:
    plain = lora.make()
    model = lora.shard(lora.make())
    lora.a_step(model)
    lora.round_adapters(model)
    expected = lora.merged_by_peft(plain, model)
    weight = "base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"
    found = merged(model, names=[weight], rename="engine.{}".format)
    assert_same(
        found, {"engine.model.layers.1.self_attn.q_proj.weight": expected[weight[17:].replace("base_layer.", "")]}
    )
    source = libfsdp.WeightSource(model, merge_adapters=True, rename=lambda name: name.replace("model.", "m.", 1))
    pairs = list(source)
    assert [(n, t.dtype, tuple(t.shape)) for n, t in pairs] == source.metadata()
    assert_same(dict(pairs), {name.replace("model.", "m.", 1): value for name, value in expected.items()})
    generator: Any = lora.make().unload()
    libfsdp.load_weights(generator, libfsdp.full_weights(model, merge_adapters=True))
    assert_same(generator.state_dict(), expected)


@pytest.mark.parametrize(("at", "who"), [(0, 0), (3, 1), (5, 0)])
@on_ranks(2)
def test_a_rank_may_stop(at: int, who: int) -> None:
    """A rank stops before a bucket whose adapters would be gathered."""
    model = lora.shard(lora.make())
    stream = libfsdp.full_weights(model, merge_adapters=True, bucket_bytes=1)
    seen = None
    try:
        for k, _ in enumerate(stream):
            if dist.get_rank() == who and k == at:
                break
    except libfsdp.Error as error:
        seen = str(error)
    stream.close()
    assert (seen is None) == (dist.get_rank() == who)
    assert seen is None or f"rank {who} has stopped before bucket {at + 3} of" in seen
    lora.a_step(model)
    merged(model)


def refused(model: Any, text: str, **options: Any) -> None:
    """An error on every rank, after which the model can be used."""
    with pytest.raises(libfsdp.Error, match=text):
        libfsdp.full_weights(model, merge_adapters=True, **options)
    assert dict(next(libfsdp.full_weights(model)))


@on_ranks(2)
def test_what_cannot_be_merged() -> None:
    from peft import LoraConfig, get_peft_model

    one = dist.get_rank() == 1
    query = r"'base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight' can't be merged"
    refused(lora.shard(lora.make(use_dora=True)), f"{query} with its adapter: adapter 'default' is DoRA")
    biased = lora.make(target_modules=["c_attn"], lora_bias=True, family="GPT2")
    refused(lora.shard(biased), "c_attn.base_layer.weight' can't be merged .* has a bias")
    embedding = r"embed_tokens.base_layer.weight' can't be merged .* adapter 'default' is one of an embedding"
    refused(lora.shard(lora.make(target_modules=["embed_tokens"])), embedding)
    tied = r"can't be merged .* it is tied \(.*transformer.wte.weight, .*lm_head.base_layer.weight\)"
    refused(lora.shard(lora.make("GPT2", target_modules=["lm_head"], fan_in_fan_out=False)), tied)

    convolution: Any = get_peft_model(nn.Sequential(nn.Conv2d(2, 4, 3)), LoraConfig(target_modules=["0"]))
    libfsdp.fully_shard(convolution)
    refused(convolution, r"'base_model.model.0.base_layer.weight' can't be merged .* \(that of a convolution, say\)")

    model = lora.shard(lora.make())
    merges = lora.shard(lora.make())
    merges.base_model.model.model.layers[0].self_attn.q_proj.merged_adapters.append("default")
    refused(merges, f"{query} with its adapter: it is merged already; call unmerge_adapter")
    with model.disable_adapter():
        refused(model, f"{query} with its adapter: adapters are disabled")
    adapter = query[1:].split("base_layer")[0] + "lora_A.default.weight"
    refused(model, f"'{adapter}' is not sent: merge_adapters leaves adapters out", names=[adapter])
    refused(model, "the model has no parameter or buffer 'head'", names=["head"])

    different = lora.make(adapters=2)
    lora.shard(different)
    if one:
        different.base_model.set_adapter(["more1"])
    refused(different, r"rank 0 has '.* \+ 2 \* '.*lora_B.default.weight'.*, rank 1 has '.* \+ 0.5 \* '")
    plain: Any = nn.Sequential(nn.Linear(2, 2))
    libfsdp.fully_shard(plain)
    refused(plain, r"merge_adapters, but .*Sequential has no LoRA layers")
