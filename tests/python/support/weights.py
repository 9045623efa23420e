"""Exports of whole weights, and comparisons with what they have to be."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import libfsdp
from support.training import full

BF16 = torch.bfloat16


def whole(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """All weights of a stream, copied; nothing comes twice."""
    found: dict[str, Tensor] = {}
    for bucket in libfsdp.full_weights(model, **options):
        for name, tensor in bucket:
            assert name not in found
            assert tensor.is_contiguous()
            assert bucket.flat is not None
            assert tensor.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
            found[name] = tensor.cpu().clone()
    return found


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, put together as programs do it with FSDP2."""
    return {name: full(value) for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def assert_same(
    found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype | None = None, in_order: bool = True
) -> None:
    """Demands the same names and values, in a dtype, and the same order. "head.weight" may be tied, and come earlier."""
    assert found.keys() == expected.keys()
    first, second = ([name for name in names if name != "head.weight"] for names in (found, expected))
    assert first == second or not in_order
    for name, value in expected.items():
        wanted = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        assert found[name].dtype == wanted.dtype, name
        assert torch.equal(found[name], wanted), name


def assert_exported(model: nn.Module, expected: dict[str, Tensor], bucket_bytes: int, in_order: bool = True) -> None:
    """Compares exports in two sizes of buckets, in bf16, and to the first rank alone."""
    assert_same(whole(model), expected, in_order=in_order)
    assert_same(whole(model, bucket_bytes=bucket_bytes), expected, in_order=in_order)
    assert_same(whole(model, dtype=BF16), expected, BF16, in_order)
    of_first = whole(model, ranks="first", bucket_bytes=bucket_bytes)
    assert_same(of_first, expected if dist.get_rank() == 0 else {}, in_order=in_order)
