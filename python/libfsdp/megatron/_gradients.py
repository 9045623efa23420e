"""Main gradients, and how optimizers find them: as grad, in the parameter's dtype, or as decoupled_grad, in their own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from libfsdp._C import Error
from libfsdp._sharded_parameter import local_of
from libfsdp.megatron._placed import with_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from libfsdp._state import ShardState


class MainGradients:
    """The gradients of a model's sharded parameters, between backwards.

    The engine gives each backward's sums to ``parameter.grad``, in the dtype of main gradients. Optimizers of torch want the
    parameter's dtype: where these differ, the main gradient is set aside as ``main_grad`` while ``grad`` is a copy of it, and
    put back before the next backward adds to it.
    """

    def __init__(self, states: Sequence[ShardState], *, decoupled: bool) -> None:
        self._states = states
        self.decoupled = decoupled
        self._copies: dict[
            int, tuple[torch.Tensor, int]
        ] = {}  # by id of the parameter: grad as it was installed, its version

    def parameters(self) -> Iterator[nn.Parameter]:
        """All that are sharded."""
        for state in self._states:
            for parameter in state.parameters:
                yield parameter.sharded

    @torch.no_grad()
    def install(self) -> None:
        """Backward has ended, and gradients are reduced: optimizers may step."""
        for p in self.parameters():
            if p.grad is None:
                continue
            if local_of(p.grad).numel() == 0:  # Fused optimizers do not take empty tensors.
                p.grad = None
                continue
            p.main_grad = p.grad
            if self.decoupled:
                before = getattr(p, "decoupled_grad", None)
                if before is not None:
                    local_of(p.main_grad).add_(local_of(before))
                p.decoupled_grad = p.main_grad
                p.grad = None
            elif p.grad.dtype != p.dtype:
                p.grad = None
                p.grad_dtype = None  # of any
                p.grad = with_dtype(p.main_grad, p.dtype)
                self._copies[id(p)] = (p.grad, p.grad._version)

    @torch.no_grad()
    def restore(self) -> None:
        """Before a backward: main gradients are where the engine adds to them."""
        if not self._copies:
            return
        for p in self.parameters():
            copy, version = self._copies.pop(id(p), (None, 0))
            if p.grad is None or copy is None:
                continue
            if p.grad is not copy or p.grad._version != version:  # The user has scaled or replaced it.
                p.main_grad = with_dtype(p.grad, p.main_grad.dtype)
            p.grad = p.main_grad

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        for p in self.parameters():
            for gradient in {id(g): g for g in (p.grad, getattr(p, "main_grad", None)) if g is not None}.values():
                local_of(gradient).mul_(factor)

    def zero(self, *, keep: bool) -> None:
        """No gradients.

        Args:
            keep: tensors stay, and are filled with zeros.
        """
        self._copies.clear()
        for p in self.parameters():
            for name in ("grad", "main_grad", "decoupled_grad"):
                gradient = getattr(p, name, None)
                if gradient is None:
                    continue
                if keep and name != "main_grad":
                    with torch.no_grad():
                        local_of(gradient).zero_()
                    if name == "grad" and gradient.dtype == p.dtype:
                        continue
                else:
                    setattr(p, name, None)
            p.grad_added_to_main_grad = False

    def require_finite(self) -> None:
        """Collective.

        Raises:
            Error: on all ranks, if a gradient has NaN or infinity on one of them.
        """
        found = []
        for state in self._states:
            for parameter in state.parameters:
                gradient = getattr(parameter.sharded, "main_grad", None)
                if gradient is None:
                    gradient = parameter.sharded.grad
                if gradient is not None and not bool(torch.isfinite(local_of(gradient)).all()):
                    found.append(parameter.name)
        text = f"rank {dist.get_rank()}: {', '.join(found)}" if found else ""
        said: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(said, text)
        if any(said):
            raise Error(
                "check_for_nan_in_grad: gradients have NaN or infinity. "
                + "; ".join(one for one in said if one)
                + ". Lower the learning rate or the loss scale, or look for the operator with torch.autograd.detect_anomaly"
            )


class ReplicatedScalars:
    """Trained parameters without dimensions: each rank has them, and their gradients are averaged.

    Nothing of them can be cut, so they are no part of units. What a backward gives is set aside until it is reduced.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, divisor: float) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._group = group
        self._divisor = divisor
        self._unreduced: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._had_gradient = [False] * len(self.parameters)
        for i, p in enumerate(self.parameters):
            p.register_hook(functools.partial(self._set_aside, i))
            p.register_post_accumulate_grad_hook(functools.partial(self._forget, i))

    def _set_aside(self, i: int, gradient: torch.Tensor) -> torch.Tensor:
        before = self._unreduced[i]
        self._unreduced[i] = gradient.double() if before is None else before + gradient
        self._had_gradient[i] = self.parameters[i].grad is not None
        return torch.zeros_like(gradient)

    def _forget(self, i: int, p: torch.Tensor) -> None:
        if not self._had_gradient[i]:
            p.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Averages what backwards have given since the last time, and adds it to grad. Collective."""
        if not self.parameters:
            return
        device = self.parameters[0].device
        flat = torch.zeros(len(self.parameters), 2, dtype=torch.float64, device=device)
        for i, gradient in enumerate(self._unreduced):
            if gradient is not None:
                flat[i, 0], flat[i, 1] = gradient, 1
        dist.all_reduce(flat, group=self._group)
        for p, (total, ranks) in zip(self.parameters, flat, strict=True):
            if ranks > 0:
                mean = (total / self._divisor).to(p.dtype)
                p.grad = mean if p.grad is None else p.grad + mean
        self._unreduced = [None] * len(self.parameters)

    def zero(self) -> None:
        """No gradients."""
        self._unreduced = [None] * len(self.parameters)
        for p in self.parameters:
            p.grad = None
