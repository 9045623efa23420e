"""What QLoRA's tests of exports run on each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import libfsdp
from support import qlora

BF16 = torch.bfloat16


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The bits of a model that is not sharded, with those of quant_state."""
    return {name: value.detach().clone().contiguous().view(torch.uint8) for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def refused(collective: Callable[[], object]) -> str:
    try:
        collective()
    except libfsdp.Error as error:
        return str(error)
    raise AssertionError("no error")


def trained(options: str) -> tuple[Any, dict[str, Tensor]]:
    """A sharded model after a step, and the bits of what it is as a whole."""
    model = qlora.shard(qlora.make(options), "libfsdp", options)
    qlora.train(model, qlora.optimizer_of(model), range(1))
    plain = qlora.make(options)
    with torch.no_grad():
        for (_, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            if q.requires_grad:
                p.copy_(q.full_tensor())
    return model, state_of(plain)


def loads(options: str) -> None:
    model, expected = trained(options)
    other = qlora.make(options, seed=1)
    places = {name: p.data_ptr() for name, p in other.named_parameters()}
    scales = {id(m): m.weight.quant_state.absmax.data_ptr() for m in qlora.packed(other)}
    changed = [name for name, value in state_of(other).items() if not torch.equal(value[:9], expected[name][:9])]
    assert any(name.endswith("absmax") for name in changed)
    # Codes and scales do not travel in another dtype, whatever is asked for.
    for dtype in (None, torch.float32):
        libfsdp.load_weights(other, libfsdp.full_weights(model, dtype=dtype, bucket_bytes=5000))
        assert_same(state_of(other), expected)
    assert {name: p.data_ptr() for name, p in other.named_parameters()} == places
    assert {id(m): m.weight.quant_state.absmax.data_ptr() for m in qlora.packed(other)} == scales
    tokens = qlora.ids(7, 0)
    with torch.no_grad():
        assert torch.equal(other(input_ids=tokens).logits, other(input_ids=tokens).logits)
        plain = qlora.make(options)
        plain.load_state_dict(other.state_dict(), strict=False)
        libfsdp.load_weights(plain, other.state_dict().items())
        assert torch.equal(plain(input_ids=tokens).logits, other(input_ids=tokens).logits)
    codes = {name for name, p in model.named_parameters() if getattr(p, "quant_state", None) is not None}
    assert codes
    source = libfsdp.WeightSource(model, dtype=BF16)
    told = source.metadata()
    assert told == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    kept = [one.dtype for one in told if any(one.name == name or one.name.startswith(name + ".") for name in codes)]
    assert BF16 not in kept or "bfloat16" in options
    for bucket in libfsdp.full_weights(model, dtype=BF16):
        for name, tensor in bucket:
            if name in codes:
                assert torch.equal(tensor.contiguous().view(torch.uint8), expected[name])


def does_not_fit() -> None:
    """All ranks get the error, and training goes on."""
    model, _ = trained("")

    def load(into: nn.Module, **options: Any) -> str:
        stream = libfsdp.full_weights(model, **options)
        text = refused(lambda: libfsdp.load_weights(into, stream))
        qlora.train(model, qlora.optimizer_of(model), range(1))
        return text

    weight = "base_model.model.model.layers.0.self_attn.k_proj.weight"
    # The module stores codes in another dtype.
    text = load(qlora.make("float32"), names=[weight])
    assert f"'{weight}' is [1024, 1] of torch.uint8, and here [256, 1] of torch.float32, codes of quantized numbers" in text
    # It has scales that are quantized, and the model has not.
    text = load(qlora.make("double"), names=[weight, weight + ".absmax"])
    assert f"'{weight}.absmax' has the dtype torch.float32, and here torch.uint8: it is not converted" in text
    # It is not quantized.
    text = load(nn.Sequential())
    assert "no parameter or buffer" in text
    other = qlora.make("")
    qlora.packed(other)[0].weight.quant_state.blocksize = 32
    text = load(other)
    assert "has blocksize 64, and here 32: quantize the module alike" in text
    # On one rank only: the others are told.
    other = qlora.make("")
    if dist.get_rank() == 1:
        other.base_model.model.model.embed_tokens.weight = nn.Parameter(torch.ones(3))
    text = load(other, bucket_bytes=2000)
    assert ("and here [3]" if dist.get_rank() == 1 else "rank 1 has stopped before") in text


def sent(options: str) -> None:
    """Rank 1 wants all of it, as two receivers of halves would, and in other dtypes."""
    model, expected = trained(options)
    shapes = {name: (value.shape, value.dtype) for name, value in qlora.make(options).state_dict().items()}
    if "double" in options:  # The JSON has a number, of as many digits as it takes.
        shapes = {name: shape for name, shape in shapes.items() if ".quant_state." not in name}
    wanted = []
    if dist.get_rank() == 1:
        for name, (shape, dtype) in shapes.items():
            into = torch.empty(shape, dtype=dtype)
            half = shape[0] // 2
            wanted.append(libfsdp.WantedBox(name, into[:half]))
            wanted.append(libfsdp.WantedBox(name, into[half:], offsets=(half, *[0] * (len(shape) - 1))))
    plan = libfsdp.transfer_plan(model, receivers=[1], wanted=wanted)
    for _ in range(2):
        plan.run()
        for first, second in zip(wanted[::2], wanted[1::2], strict=True):
            both = torch.cat([first.into, second.into]).contiguous().view(torch.uint8)
            assert torch.equal(both, expected[first.name]), first.name
    weight = "base_model.model.model.layers.0.self_attn.k_proj.weight"
    shape, dtype = shapes[weight]
    if dtype.is_floating_point:
        for into, travels in ((torch.empty(shape, dtype=BF16), None), (torch.empty(shape, dtype=BF16), dtype)):
            box = [libfsdp.WantedBox(weight, into, dtype=travels)] if dist.get_rank() == 1 else []
            text = refused(partial(libfsdp.transfer_plan, model, receivers=[1], wanted=box))
            assert f"rank 1 wants '{weight}' converted, but its elements are codes of quantized numbers" in text
            assert "want them in Float, into a tensor of this dtype" in text
    qlora.train(model, qlora.optimizer_of(model), range(1, 2))
