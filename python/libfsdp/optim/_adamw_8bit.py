"""AdamW whose moments take a byte per element."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta

from libfsdp import _C
from libfsdp.optim._fused import make_adam_state
from libfsdp.optim._optimizer_settings import tell_settings
from libfsdp.optim._optimizers import BeginsAnew
from libfsdp.optim._preparing import cut_dims, loss_of, over, prepare_gradient, zeros_like

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim.optimizer import ParamsT

_BLOCK = 256
_QUANTIZED = ("state1", "absmax1", "state2", "absmax2")


class AdamW8bit(BeginsAnew):
    """AdamW with 2 + 8/256 bytes of state per element instead of 8, stepped in C++: on the CPU, or on a GPU by a kernel.

    For each block of 256 elements, the largest magnitude of a moment is kept in fp32 (``absmax1``, ``absmax2``). Each element, divided by
    it, is kept as one of 256 numbers (``state1``, ``state2``). State and arithmetic are those of the C++ library's ``AdamW8bit``. Blocks
    are counted from the start of a parameter. None may lie on two ranks, so the result does not depend on the number of ranks.

    Args:
        params: the parameters or groups, as in torch.optim.
        lr: the learning rate.
        betas: the decays of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, as AdamW's.
        min_8bit_size: parameters with fewer elements, and those of double precision, keep AdamW's full state. A group may have
            its own.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        min_8bit_size: int = 4096,
    ) -> None:
        torch.optim.AdamW(
            [torch.empty(0)], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )  # raises for arguments that AdamW refuses
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": False,
            "maximize": False,
            "fused": False,
            "decoupled_weight_decay": True,
            "min_8bit_size": min_8bit_size,
        }
        super().__init__(params, defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have a gradient.

        Args:
            closure: computes the loss again, and gradients.

        Returns:
            What the closure returned.

        Raises:
            ValueError: if ranks have parts of one block, or a parameter is on a device without a kernel for it.
        """
        loss = loss_of(closure)
        tell_settings(self)
        with torch.no_grad():
            call = functools.partial(_C.step_adamw_8bit, "AdamW8bit", self.param_groups, self.state)
            if to_prepare := call():
                for g, i in to_prepare:
                    group = self.param_groups[g]
                    parameter = group["params"][i]
                    prepare_gradient(parameter)
                    self._make_state(parameter, group, f"parameter {i} of group {g}")
                if call():
                    raise RuntimeError("internal: state that was made is not there")
        return loss

    def _make_state(self, parameter: Tensor, group: dict[str, Any], name: str) -> None:
        state = self.state[parameter]
        if parameter.numel() < group["min_8bit_size"] or parameter.dtype == torch.float64:
            make_adam_state(state, parameter, group)
            return
        if state:
            return
        if not _C.steps_adamw_8bit_on(parameter.device):
            raise ValueError(
                f"AdamW8bit: {name} is on {parameter.device}, for which this build of libfsdp has no kernel of it; use AdamW"
            )
        state["step"] = torch.zeros(())
        for moment in ("1", "2"):
            state["state" + moment] = zeros_like(parameter, torch.uint8)
            state["absmax" + moment] = _zeros_per_block(parameter, name)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Works like torch.optim's; 8-bit state keeps its dtypes.

        Args:
            state_dict: what ``state_dict()`` of another AdamW8bit gave.
        """
        loaded: dict[str, Any] = {}

        def keep(_: torch.optim.Optimizer, given: dict[str, Any]) -> None:
            loaded.update(given)

        with_hook = self.register_load_state_dict_pre_hook(keep)
        try:
            super().load_state_dict(state_dict)
        finally:
            with_hook.remove()
        numbers = [number for group in loaded["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            of_it = loaded["state"].get(number, {})
            # torch has given all state the parameter's dtype, and moved it to where the parameter is.
            state = self.state[parameter]
            state.update({name: of_it[name].to(state[name].device, copy=True) for name in _QUANTIZED if name in of_it})


def _zeros_per_block(parameter: Tensor, name: str) -> Tensor:
    """Returns a 1-D tensor with a value per block, which is cut over the ranks in the same way as the parameter."""
    blocks = math.ceil(parameter.numel() / _BLOCK)
    if not isinstance(parameter, DTensor):
        return torch.zeros(blocks, device=parameter.device)
    mesh = parameter.device_mesh
    device = parameter._local_tensor.device
    whole = TensorMeta(torch.Size([blocks]), (1,), torch.float32)
    cut = cut_dims(parameter)
    if not cut:
        return over(torch.zeros(blocks, device=device), parameter, whole, [Replicate()] * mesh.ndim)
    placement = parameter.placements[cut[0]]
    ranks = mesh.size(cut[0])
    per_rank = math.ceil(parameter.size(0) / ranks) * (parameter.numel() // parameter.size(0))
    fits = per_rank % _BLOCK == 0 and per_rank // _BLOCK == math.ceil(blocks / ranks)
    if len(cut) > 1 or type(placement) is not Shard or placement.dim != 0 or not fits:
        raise ValueError(
            f"AdamW8bit: {name}, of the shape {list(parameter.shape)} and the placements {parameter.placements} on {ranks} ranks, is "
            f"cut within blocks of {_BLOCK} elements, or into unequal numbers of them; put it into a group with a greater "
            "min_8bit_size, where it keeps full state"
        )
    local = torch.zeros(math.ceil(parameter._local_tensor.numel() / _BLOCK), device=device)
    placements = [Shard(0) if d == cut[0] else Replicate() for d in range(mesh.ndim)]
    return over(local, parameter, whole, placements)
