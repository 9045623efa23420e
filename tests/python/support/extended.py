"""A tensor subclass whose gathers travel as eight bits and a scale for each row, as float8 libraries do theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree


class EightBits(torch.Tensor):
    """Wraps a tensor of full precision. Its two methods are FSDP2's extension; `seen` is what they were told."""

    seen: list[dict[str, Any]] = []  # noqa: RUF012  # of the class: all tensors tell the same list
    pads = True

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> EightBits:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.data_ = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        unwrapped = pytree.tree_map_only(cls, lambda x: x.data_, (args, kwargs or {}))
        result = func(*unwrapped[0], **unwrapped[1])
        return pytree.tree_map_only(torch.Tensor, cls, result)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> EightBits:
        return EightBits(inner["data_"])

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        self.seen.append({"mesh": mesh, "size": outer_size, "stride": outer_stride, "module": module, "out": None})
        rows = -(-outer_size[0] // mesh.size()) if self.pads else self.data_.size(0)
        scale = torch.ones(rows, 1)
        eight = torch.zeros(rows, *outer_size[1:], dtype=torch.int8)
        if self.data_.numel() > 0:
            mine = scale[: self.data_.size(0)]
            mine.copy_(self.data_.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127)
            eight[: self.data_.size(0)].copy_((self.data_ / mine).round().to(torch.int8))
        # The scales have the padded number of rows, and are as wide as the rule for uneven shards asks.
        return (eight, scale.expand(rows, outer_size[1]).contiguous()), ("eight bits", outer_size)

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        self.seen[-1]["out"] = out
        self.seen[-1]["arrived"] = all_gather_outputs
        eight, scale = all_gather_outputs
        name, size = metadata
        assert name == "eight bits"
        whole = (eight * scale)[: size[0]].to(param_dtype)
        if out is None:
            return whole, (eight, scale, whole)
        with _unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


class EightBitsOld(EightBits):
    """With the older signature."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        rows = self.data_.size(0) * mesh.size()  # even shards only
        return super().fsdp_pre_all_gather(mesh, torch.Size([rows, self.data_.size(1)]), None, None, None)


def patch_as_half(local: torch.Tensor) -> None:
    """Gives a plain tensor the extension, as its own methods: it travels in bfloat16."""

    def before(
        mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (local.detach().to(torch.bfloat16),), None

    @torch.no_grad()
    def after(arrived: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is None:
            whole = arrived[0].to(dtype)
            return whole, (arrived[0], whole)
        with _unsafe_preserve_version_counter(out):
            out.copy_(arrived[0])
        return None

    local.fsdp_pre_all_gather = before
    local.fsdp_post_all_gather = after
