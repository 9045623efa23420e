"""Gives optimizers the main gradients: as grad, in the parameter's dtype, or as decoupled_grad, in their own dtype."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from libfsdp._C import Error
from libfsdp._core.sharded_parameter import local_of
from libfsdp.megatron._placed import with_dtype
from libfsdp.megatron._protocol import is_expert

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from libfsdp._core.state import ShardState
    from libfsdp.megatron._index import FSDPDistributedIndex


class MainGradients:
    """The gradients of a model's sharded parameters, between backwards.

    The engine adds each backward's sums to ``parameter.grad``, in the dtype of main gradients. Torch's optimizers need the parameter's
    dtype. If the two differ, ``main_grad`` holds the main gradient while ``grad`` is a copy of it, and the main gradient is put back before
    the next backward adds to it.
    """

    def __init__(self, states: Sequence[ShardState], *, decoupled: bool) -> None:
        self._states = states
        self.decoupled = decoupled
        self._copies: dict[
            int, tuple[torch.Tensor, tuple[int, int]]
        ] = {}  # by id of the parameter: the copy that install made grad, and its versions

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields all sharded parameters."""
        for state in self._states:
            for parameter in state.parameters:
                yield parameter.sharded

    @torch.no_grad()
    def install(self) -> None:
        """Called when backward has ended and gradients are reduced: gives optimizers gradients with which they can step."""
        for p in self.parameters():
            if p.grad is None:
                continue
            if local_of(p.grad).numel() == 0:  # Fused optimizers do not take empty tensors.
                p.grad = None
                continue
            copy, versions = self._copies.get(id(p), (None, None))
            if p.grad is copy:  # It was installed before, and no backward has added to main gradients since.
                if _versions(p.grad) != versions:  # The user has scaled it.
                    p.main_grad = with_dtype(p.grad, p.main_grad.dtype)
                    self._copies[id(p)] = (p.grad, _versions(p.grad))
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
                p.grad_dtype = None  # any dtype is allowed
                p.grad = with_dtype(p.main_grad, p.dtype)
                self._copies[id(p)] = (p.grad, _versions(p.grad))

    @torch.no_grad()
    def restore(self) -> None:
        """Called before a backward: puts main gradients back to where the engine adds to them."""
        if not self._copies:
            return
        for p in self.parameters():
            copy, versions = self._copies.pop(id(p), (None, None))
            if p.grad is None or copy is None:
                continue
            if p.grad is not copy or _versions(p.grad) != versions:  # The user has scaled or replaced it.
                p.main_grad = with_dtype(p.grad, p.main_grad.dtype)
            p.grad = p.main_grad

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        for p in self.parameters():
            copy, versions = self._copies.get(id(p), (None, None))
            is_copy = p.grad is not None and p.grad is copy and _versions(p.grad) == versions
            for gradient in {id(g): g for g in (p.grad, getattr(p, "main_grad", None)) if g is not None}.values():
                local_of(gradient).mul_(factor)
            if is_copy:
                self._copies[id(p)] = (p.grad, _versions(p.grad))

    @torch.no_grad()
    def zero(self, *, keep: bool) -> None:
        """Drops the gradients.

        Args:
            keep: whether tensors stay, filled with zeros.
        """
        if not keep:
            self._copies.clear()
        for p in self.parameters():
            for name in ("grad", "main_grad", "decoupled_grad"):
                gradient = getattr(p, name, None)
                if gradient is not None and keep:
                    local_of(gradient).zero_()
                elif gradient is not None:
                    setattr(p, name, None)
            if id(p) in self._copies and p.grad is not None:
                self._copies[id(p)] = (p.grad, _versions(p.grad))
            p.grad_added_to_main_grad = False

    def require_finite(self, scalars: ReplicatedScalars) -> None:
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
        found += [name for name, gradient in scalars.gradients() if not bool(torch.isfinite(gradient))]
        text = f"rank {dist.get_rank()}: {', '.join(found)}" if found else ""
        said: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(said, text)
        if any(said):
            raise Error(
                "check_for_nan_in_grad: gradients have NaN or infinity. "
                + "; ".join(one for one in said if one)
                + ". Lower the learning rate or the loss scale, or look for the operator with torch.autograd.detect_anomaly"
            )


def _versions(gradient: torch.Tensor) -> tuple[int, int]:
    """Returns the versions of the gradient and its local tensor, which change with each write."""
    return gradient._version, local_of(gradient)._version


class ReplicatedScalars:
    """Scalar parameters. Each rank has all of them, and gradients of those that are trained are averaged.

    They can't be cut, so they are not parts of units. The gradients of a backward are set aside until they are reduced. Those of experts
    are averaged over the ranks that have the same expert.
    """

    def __init__(
        self, named: dict[str, nn.Parameter], index: FSDPDistributedIndex, *, sums: bool, decoupled: bool
    ) -> None:
        """Registers hooks.

        Args:
            sums: whether gradients are added up over the ranks and not divided.
            decoupled: whether they appear as ``decoupled_grad``.
        """
        self._named = named
        self._trained = [(name, p) for name, p in named.items() if p.requires_grad]
        self._index = index
        self._divisor = 1.0 if sums else float(dist.get_world_size(index.get_dp_group()))
        self._attribute = "decoupled_grad" if decoupled else "grad"
        self._unreduced: list[torch.Tensor | None] = [None] * len(self._trained)
        self._had_gradient = [False] * len(self._trained)
        for i, (_, p) in enumerate(self._trained):
            p.register_hook(functools.partial(self._set_aside, i))
            p.register_post_accumulate_grad_hook(functools.partial(self._forget, i))

    def _set_aside(self, i: int, gradient: torch.Tensor) -> torch.Tensor:
        before = self._unreduced[i]
        self._unreduced[i] = gradient.double() if before is None else before + gradient
        self._had_gradient[i] = self._trained[i][1].grad is not None
        return torch.zeros_like(gradient)

    def _forget(self, i: int, p: torch.Tensor) -> None:
        if not self._had_gradient[i]:
            p.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Averages the gradients that backwards have given since the last call, and adds them to the gradients. Collective."""
        for expert in (False, True):
            of_kind = [i for i, (_, p) in enumerate(self._trained) if is_expert(p) == expert]
            if not of_kind:
                continue
            flat = torch.zeros(len(of_kind), 2, dtype=torch.float64, device=self._trained[of_kind[0]][1].device)
            for row, i in zip(flat, of_kind, strict=True):
                gradient = self._unreduced[i]
                if gradient is not None:
                    row[0], row[1] = gradient, 1
            dist.all_reduce(flat, group=self._index.get_dp_group(expert))
            for (total, ranks), i in zip(flat, of_kind, strict=True):
                if ranks > 0:
                    self._add(self._trained[i][1], total / self._divisor)
        self._unreduced = [None] * len(self._trained)

    def _add(self, p: nn.Parameter, mean: torch.Tensor) -> None:
        before = getattr(p, self._attribute, None)
        setattr(p, self._attribute, mean.to(p.dtype) if before is None else before + mean.to(p.dtype))

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the reduced gradients with the parameters' names."""
        for name, p in self._trained:
            gradient = getattr(p, self._attribute, None)
            if gradient is not None:
                yield name, gradient

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        for _, gradient in self.gradients():
            gradient.mul_(factor)

    @torch.no_grad()
    def zero(self, *, keep: bool) -> None:
        """Drops the gradients; with ``keep``, sets existing ones to zero instead."""
        self._unreduced = [None] * len(self._trained)
        for _, gradient in self.gradients():
            gradient.zero_()
        if not keep:
            for _, p in self._trained:
                setattr(p, self._attribute, None)

    @torch.no_grad()
    def broadcast(self) -> None:
        """Gives all ranks the values of the first rank that has the same parameters. Collective."""
        for p in self._named.values():
            group = self._index.get_dp_group(is_expert(p))
            assert group is not None
            dist.broadcast(p.data, src=dist.get_global_rank(group, 0), group=group)
