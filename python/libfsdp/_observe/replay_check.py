"""Checks of single microbatches for data that a machine has corrupted without an error."""

from __future__ import annotations

import io
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from libfsdp import _C
from libfsdp._fsdp2.fsdp_module import FSDPModule
from libfsdp._observe.statistics import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

T = TypeVar("T")


class ReplayCheck:
    """Finds data that a machine has corrupted without saying so.

    These are bits that have flipped in parameters, in gradients, or in messages, and ranks that compute wrongly. Every
    ``every``-th microbatch is checked: each rank computes the microbatch of its neighbour once more, and the ranks
    compare digests of what they have seen, per unit::

        check = libfsdp.ReplayCheck(model, every=100)
        loss = check.run(forward_and_backward, batch)
        optimizer.step()
        check.remember_parameters()

    The computation must be deterministic: the same batch, parameters, buffers and states of torch's generators give the
    same bits on each rank. Ranks have the same hardware, and as many threads.
    """

    def __init__(self, module: nn.Module, *, every: int) -> None:
        """Makes a check that has seen no microbatch yet.

        Args:
            module: the root of a sharded model.
            every: how many microbatches there are to each that is checked.

        Raises:
            ValueError: if the module is not sharded.
            Error: if ``every`` is not positive.
        """
        if not isinstance(module, FSDPModule):
            raise ValueError(f"{type(module).__name__} is not sharded; call fully_shard on it first")
        if every < 1:
            raise _C.Error(f"ReplayCheck: every must be positive, got {every}")
        self._module: nn.Module = module
        self._every = every
        self._runs = 0
        self._checked = 0
        self._engine: _C.HookedModel | None = None
        self._checker: _C.MicrobatchChecker | None = None

    @property
    def checked(self) -> int:
        """How many microbatches have been checked."""
        return self._checked

    def run(self, microbatch: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs forward and backward of one microbatch, and checks them if it is their turn.

        If they are checked, ``microbatch`` gets a copy of its arguments, and then those of another rank, which are
        pickled for that; the gradients that the latter give are dropped. Afterwards gradients, buffers and generators
        are as after this rank's microbatch alone. The first microbatch of a model is not checked, because its forward
        forms the model.

        Call it on all ranks alike, between steps. Collective if it checks.

        Args:
            microbatch: forward and backward, and nothing else: no step of an optimizer, no zero_grad().
            args: its arguments: what differs from rank to rank, such as the batch.
            kwargs: more of them.

        Returns:
            What ``microbatch`` returns for this rank's arguments.

        Raises:
            Error: on every rank if data differ. The message names the unit, what has changed, the ranks, and who is
                right, if this can be decided. Gradients are those of the microbatch then, and not to be trusted;
                buffers and generators are as before.
        """
        due = self._is_due()
        self._runs += 1
        checker = self._checker_now() if due else None
        if checker is None:
            return microbatch(*args, **kwargs)
        results: list[T] = []

        def run(packed: torch.Tensor) -> None:
            own_args, own_kwargs = _unpacked(packed, device)
            result = microbatch(*own_args, **own_kwargs)
            if not results:  # The first one is this rank's.
                results.append(result)

        device = next(self._module.parameters()).device
        self._checked += 1
        checker.check(run, _packed((args, kwargs)))
        return results[0]

    def remember_parameters(self) -> None:
        """Takes digests of this rank's shards, if the next microbatch is checked, which compares its own with them.

        Call it after an update, when nothing else will write the parameters before the next ``run()``. That finds out
        whether the memory of the shards has changed in between.
        """
        if self._is_due() and (checker := self._checker_now()) is not None:
            checker.remember_parameters()

    def _is_due(self) -> bool:
        return (self._runs + 1) % self._every == 0

    def _checker_now(self) -> _C.MicrobatchChecker | None:
        """The checker of the model's engine, which may have been replaced; None before its first forward."""
        model = self._module._get_fsdp_state().model
        if model is None or model.provisional or model.adopt_registered():
            return None
        engine = engine_of(self._module)
        # Shards to which the program has given other memory are read from there before their digests are taken, as are other parameters.
        engine.take_writes()
        if engine is not self._engine:
            self._engine = engine
            module_of = weakref.ref(self._module)  # Python can't see cycles through C++.
            self._checker = _C.MicrobatchChecker(
                engine, lambda: list(module.buffers()) if (module := module_of()) is not None else []
            )
        return self._checker


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _packed(arguments: Any) -> torch.Tensor:
    """Arguments as bytes. Tensors are copied first: a view would bring along all that it views."""
    copies = pytree.tree_map(_copy, arguments)
    stream = io.BytesIO()
    torch.save(copies, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8).clone()


def _unpacked(packed: torch.Tensor, device: torch.device) -> Any:
    """The reverse. Tensors of a device come to this rank's, which may have another number than the sender's."""
    stream = io.BytesIO(packed.numpy().tobytes())
    return torch.load(
        stream, map_location=lambda storage, at: storage if at == "cpu" else storage.to(device), weights_only=False
    )
