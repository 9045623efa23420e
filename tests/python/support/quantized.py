"""A tensor that keeps TransformerEngine's protocol of quantized parameters, on any device: eight bits, and scales by several recipes."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from support import device as where


class Quantizer:
    """A scale for so many rows, from their largest value; by default, one for a tensor. `log` is what was done, in order."""

    log: list[str] = []  # noqa: RUF012  # of the class: all tell the same list

    def __init__(self, block: int | None = None) -> None:
        self.rowwise_usage = True
        self.columnwise_usage = True
        self.block = block

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def make_empty(self, shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Quantized:
        blocks = 1 if self.block is None else -(-shape[0] // self.block)
        scale_inv = torch.empty(blocks, *[1 for _ in shape[1:]], device=device)
        return Quantized(torch.empty(shape, dtype=torch.int8, device=device), scale_inv, dtype, self)

    def __call__(self, values: torch.Tensor) -> Quantized:
        made = self.make_empty(values.shape, dtype=values.dtype, device=values.device)
        self.update_quantized(values, made)
        return made

    def set_scales(self, values: torch.Tensor, out: Quantized) -> None:
        for block, scale_inv in zip(values.split(self.block or values.size(0)), out._scale_inv, strict=True):
            scale_inv.copy_(block.abs().amax().float().clamp(min=1e-6) / 127)

    def update_quantized(self, values: torch.Tensor, out: Quantized) -> None:
        self.log.append("quantize")
        self.set_scales(values, out)
        out._data.copy_((values.float() / out.scales()).round().clamp(-127, 127))
        out._transpose, out._transpose_invalid = None, True
        if self.columnwise_usage:
            out._create_transpose()


class OneScale(Quantizer):
    """A scale for the tensor. `amax` is the largest value that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(16.0, device=where.TYPE)
        self.amax = torch.zeros(1, device=where.TYPE)

    def make_empty(self, shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Quantized:
        data = torch.empty(shape, dtype=torch.int8, device=device)
        return Quantized(data, torch.empty(1, device=device), dtype, self)


class DelayedScaling:
    """Of TransformerEngine's recipe, the name."""


class DelayedQuantizer(OneScale):
    """The scale is known before; what was the largest value since the last roll() is recorded for later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def _get_compatible_recipe(self) -> type:
        return DelayedScaling

    def set_scales(self, values: torch.Tensor, out: Quantized) -> None:
        out._scale_inv.fill_(1 / self.scale)
        self.amax.copy_(torch.maximum(self.amax, values.abs().amax().float()))

    def roll(self) -> None:
        """What TransformerEngine does at the end of each forward: another scale, of the last three records, and a new record."""
        self.history = [float(self.amax), *self.history][:3]
        if max(self.history) > 0:
            self.scale.fill_(100 / max(self.history))
        self.amax.zero_()


class Float8CurrentScaling:
    """Of TransformerEngine's recipe, the name."""


class CurrentQuantizer(OneScale):
    """The scale is that of the values."""

    with_amax_reduction = False

    def _get_compatible_recipe(self) -> type:
        return Float8CurrentScaling

    def set_scales(self, values: torch.Tensor, out: Quantized) -> None:
        self.amax.copy_(values.abs().amax().float())
        self.scale.copy_((127 / self.amax.clamp(min=1e-6)).squeeze())
        out._scale_inv.fill_(1 / self.scale)


RECIPES = {"delayed": DelayedQuantizer, "current": CurrentQuantizer}


class Quantized(torch.Tensor):
    """Operators compute with what dequantize() gives."""

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _transpose: torch.Tensor | None
    _transpose_invalid: bool
    _quantizer: Quantizer

    @staticmethod
    def __new__(
        cls, data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, quantizer: Quantizer
    ) -> Quantized:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)
        made._data, made._scale_inv, made._quantizer = data, scale_inv, quantizer
        made._transpose, made._transpose_invalid = None, True
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            given = args[0]
            made = cls(given._data, given._scale_inv, given.dtype, given._quantizer)
            made._transpose, made._transpose_invalid = given._transpose, given._transpose_invalid
            return made
        args, kwargs = pytree.tree_map_only(cls, lambda one: one.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def dequantize(self) -> torch.Tensor:
        return (self._data.float() * self.scales()).to(self.dtype)

    def scales(self) -> torch.Tensor:
        """Of each row."""
        if self._scale_inv.ndim == 1:
            return self._scale_inv.reshape(1, 1).expand(self.size(0), 1)
        block = self._quantizer.block or self.size(0)
        return self._scale_inv.repeat_interleave(block, 0)[: self.size(0)]

    def _create_transpose(self) -> None:
        Quantizer.log.append("transpose")
        self._transpose, self._transpose_invalid = self._data.t().contiguous(), False


def quantized_parameter(
    values: torch.Tensor, *, preserved: bool = True, block: int | None = None, recipe: str | None = None
) -> nn.Parameter:
    """What quantized_model_init(preserve_high_precision_init_val=preserved) makes of a parameter."""
    quantizer = Quantizer(block) if recipe is None else RECIPES[recipe]()
    made = nn.Parameter(quantizer(values.detach()))
    if preserved:
        made._high_precision_init_val = values.detach().clone()
        made.get_high_precision_init_val = types.MethodType(lambda p: p._high_precision_init_val, made)

        def clear(p: Any) -> None:
            del p._high_precision_init_val
            del p.get_high_precision_init_val

        made.clear_high_precision_init_val = types.MethodType(clear, made)
    return made


class QuantizedLinear(nn.Module):
    """Computes with a quantized weight; its backward with the transposed copy, as on devices that can multiply in one order only."""

    def __init__(
        self,
        width: int,
        rows: int,
        dtype: torch.dtype,
        *,
        preserved: bool = True,
        block: int | None = None,
        recipe: str | None = None,
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.preserved = preserved
        self.block = block
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(rows, dtype=dtype))
        if not self.weight.is_meta:
            self.to(where.TYPE)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """On meta parameters stay as they are; else the weight becomes a quantized one."""
        if self.weight.is_meta:
            return
        values = torch.randn(self.weight.shape).to(self.weight) / self.weight.size(1) ** 0.5
        self.weight = quantized_parameter(values, preserved=self.preserved, block=self.block, recipe=self.recipe)
        with torch.no_grad():
            self.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Multiply.apply(x, self.weight) + self.bias)


class Multiply(torch.autograd.Function):
    """By a quantized weight's transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> Any:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.dequantize().t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight = ctx.weight
        if weight._transpose is None:
            weight._create_transpose()
        transposed = (weight._transpose.float() * weight.scales().t()).to(gradient.dtype)
        return gradient @ transposed.t(), gradient.t() @ ctx.saved_tensors[0]
