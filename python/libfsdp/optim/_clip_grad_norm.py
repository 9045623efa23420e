"""A torch.nn.utils.clip_grad_norm_ that exchanges only a few numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

from libfsdp import _C
from libfsdp._comm.collectives import all_gather
from libfsdp._comm.mesh import device_of
from libfsdp._core.arguments import check_number, check_parameters, refuse
from libfsdp.optim._preparing import cut_dims, prepare_gradient

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients in place so that their joint norm is at most ``max_norm``.

    As torch.nn.utils.clip_grad_norm_, over DTensors of any meshes and over plain tensors. Each rank adds up its own part in
    double precision; ranks exchange one number per dimension of a mesh. All ranks add these up in the same order, so all
    ranks have the same norm. Collective over the meshes of the parameters. Gradients that a step of a MegatronFSDP's optimizer would
    reduce are reduced first, and where they are ``decoupled_grad``, these count.

    Args:
        parameters: those whose gradients count; the same on all ranks. Those without a gradient are left out.
        max_norm: the greatest norm.
        norm_type: the p of the p-norm: positive, or infinity for the largest magnitude.
        error_if_nonfinite: raise an error, and change nothing, if the norm is not finite.

    Returns:
        The norm before, a plain tensor without dimensions, in single precision (double if a gradient is).

    Raises:
        RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is set.
        Error: if ``norm_type`` is not positive.
        TypeError: if an argument is of another type.
    """
    max_norm, norm_type = check_number("max_norm", max_norm), check_number("norm_type", norm_type)
    if isinstance(parameters, torch.nn.Module):
        refuse("parameters", parameters, "tensors, as model.parameters()")
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    check_parameters(chosen)
    for model in {id(one): one for p in chosen if (one := getattr(p, "_megatron_fsdp_model", None)) is not None}.values():
        if model.microbatch_count > 0:
            model.finish_grad_sync()
    gradients: list[Tensor] = []
    # The pieces by mesh and by the dimensions that cut. Parameters without a gradient have an entry, too, so that all
    # ranks make the same exchanges.
    pieces: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for parameter in chosen:
        mesh, cut = _cut_of(parameter)
        of_it = pieces.setdefault((mesh, cut), [])
        if parameter.grad is not None:
            prepare_gradient(parameter)
        gradient = parameter.grad if parameter.grad is not None else getattr(parameter, "decoupled_grad", None)
        if gradient is not None:
            gradients.append(_C.local_of(gradient))
            of_it.append(gradients[-1])
    total = _norm(pieces, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    device = gradients[0].device if gradients else torch.device("cpu")
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    norm = total.to(device=device, dtype=dtype)
    if gradients:
        # torch's formula, in torch's precision.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        by_device: dict[torch.device, list[Tensor]] = {}
        for gradient in gradients:
            by_device.setdefault(gradient.device, []).append(gradient)
        for where, of_device in by_device.items():
            torch._foreach_mul_(of_device, factor.to(where))
    return norm


def _cut_of(parameter: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    if not isinstance(parameter, DTensor):
        return None, ()
    placements = parameter.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise ValueError(
            f"a parameter of the shape {list(parameter.shape)} has the placements {placements}: a sum that is pending"
        )
    return parameter.device_mesh, tuple(cut_dims(parameter))


def _norm(pieces: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]], p: float) -> Tensor:
    """Returns the norm as a 0-D tensor in double precision, on the device of the gradients, without waiting for the device."""
    sums = []
    for (mesh, cut), gradients in pieces.items():
        of_these = _C.power_sum(gradients, p)
        for dimension in cut:
            assert mesh is not None
            group = mesh.get_group(dimension)
            mine = _moved(of_these.reshape(1), device_of(mesh))
            every = mine.new_empty(dist.get_world_size(group))
            all_gather(every, mine, group=group)
            of_these = _merged(every, p)
        sums.append(of_these)
    device = next((one.device for one in sums if one.device.type != "cpu"), torch.device("cpu"))
    total = _merged(torch.stack([one.to(device) for one in sums]), p) if sums else torch.zeros((), dtype=torch.float64)
    return total if p in (1.0, math.inf) else total.sqrt() if p == 2.0 else total.pow(1 / p)


def _moved(value: Tensor, device: torch.device) -> Tensor:
    """To a device from pinned memory: from other memory, the host waits for the copy."""
    if value.device.type == "cpu" and device.type != "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=device.type != "cpu")


def _merged(sums: Tensor, p: float) -> Tensor:
    if sums.device.type != "cpu":
        return sums.amax() if p == math.inf else sums.sum()
    return sums.new_tensor(_C.merge_power_sums(sums.tolist(), p))  # In the order of the ranks.
