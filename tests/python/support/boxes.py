"""Whole tensors of the boxes that ranks have."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import libfsdp


def reassembled(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters, of the boxes of all ranks. Where ranks have the same elements of shards, these are equal."""
    own = [
        (one.name, one.shape, one.dtype, one.offsets, one.sizes, one.tensor.cpu().clone())
        for one in libfsdp.local_shards(model)
    ]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, own)
    found: dict[str, Tensor] = {}
    for parts in zip(*of_all, strict=True):
        name, shape, dtype = parts[0][:3]
        whole, there = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for other, of_shape, of_dtype, offsets, sizes, tensor in parts:
            assert (other, of_shape, of_dtype) == (name, shape, dtype)
            assert tuple(tensor.shape) == sizes
            box = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
            assert sizes == shape or torch.equal(whole[box][there[box]], tensor[there[box]])
            whole[box], there[box] = tensor, True
        assert there.all(), name
        if own[len(found)][4] == shape:  # Ranks train ignored parameters each for itself.
            whole = own[len(found)][5]
        found[name] = whole
    return found
