"""Checks the types of arguments. Errors name the argument, its value, and what to give instead."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from libfsdp import _C

if TYPE_CHECKING:
    from collections.abc import Iterable


def refuse(argument: str, value: Any, way_out: str) -> NoReturn:
    """Raises TypeError."""
    raise TypeError(f"{argument} is {value!r}: give {way_out}")


def check_module(module: Any) -> None:
    if isinstance(module, nn.Module):
        return
    modules = list(module) if isinstance(module, Collection) and not isinstance(module, Mapping) else []
    if not modules or not all(isinstance(one, nn.Module) for one in modules):
        refuse("module", module, "a module, or a list of modules that make up one unit together")


def check_mesh(mesh: Any) -> None:
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        refuse("mesh", mesh, 'a DeviceMesh, as init_device_mesh("cpu", (ranks,)), or None for all ranks')


def check_flags(**flags: Any) -> None:
    """Raises TypeError unless each value is a bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            refuse(name, value, "True or False")


def as_flag(name: str, value: Any) -> bool:
    """Returns a bool; numbers and bools of other libraries are accepted, too."""
    if not hasattr(type(value), "__bool__"):
        refuse(name, value, "True or False")
    return bool(value)


def check_number(name: str, value: Any) -> float:
    """Returns a number, also of other libraries; a tensor of one number is accepted, too."""
    if hasattr(type(value), "__float__") and not (isinstance(value, torch.Tensor) and value.numel() != 1):
        return float(value)
    refuse(name, value, "a number")


def as_bytes(name: str, value: Any) -> int:
    """Returns a size in bytes, which may be a whole number, also as a float (80e9), or a text such as "80GB" or "1.5GiB".

    Texts are read as in the commands and in C++ (``fsdp::parse_size``).
    """
    if isinstance(value, str):
        try:
            return _C.parse_size(value)
        except _C.Error as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(name, value, "a whole number of bytes, or a size such as '80GB' or '1.5GiB'")
    check_bytes(name, value)
    return int(value)


def check_bytes(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(name, value, "a whole number of bytes")
    if value < 0:
        raise ValueError(f"{name} is {value}: give 0 or more")


def check_functions(**functions: Any) -> None:
    """Raises TypeError unless each value is a function or None."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            refuse(name, value, "a function that is called with each parameter, or None")


_OF_POLICY = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


def check_policies(mp_policy: Any, offload_policy: Any) -> tuple[MixedPrecisionPolicy, OffloadPolicy]:
    """Returns both as objects of their classes.

    FSDP2 takes any object with these attributes as mp_policy, and any other than a CPUOffloadPolicy as no offloading.
    """
    if not all(hasattr(mp_policy, name) for name in _OF_POLICY):
        refuse("mp_policy", mp_policy, "a MixedPrecisionPolicy")
    for name in _OF_POLICY[:3]:
        dtype = getattr(mp_policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            refuse(f"mp_policy.{name}", dtype, "a floating-point dtype, as torch.bfloat16, or None")
    as_flag("mp_policy.cast_forward_inputs", mp_policy.cast_forward_inputs)
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        mp_policy = MixedPrecisionPolicy(*(getattr(mp_policy, name) for name in _OF_POLICY))
    if isinstance(offload_policy, OffloadPolicy):
        return mp_policy, offload_policy
    if offload_policy:
        warnings.warn(
            f"offload_policy is {offload_policy!r}, which offloads nothing, as in FSDP2: give CPUOffloadPolicy() to offload, or None",
            stacklevel=4,
        )
    return mp_policy, OffloadPolicy()


def check_ignored(ignored: Any) -> set[nn.Parameter]:
    """Returns the parameters in any collection as a set."""
    found: list[Any] = []
    if ignored is not None and not isinstance(ignored, (str, torch.Tensor)):
        found = list(ignored)
    elif ignored is not None:
        refuse("ignored_params", ignored, "a set of parameters")
    for one in found:
        if not isinstance(one, torch.Tensor):
            refuse("ignored_params", ignored, f"a set of parameters, as {{model.get_parameter({str(one)!r})}}")
    return set(found)


def check_parameters(parameters: Iterable[Any]) -> None:
    """Raises TypeError unless all arguments of clip_grad_norm_ are tensors."""
    for one in parameters:
        if not isinstance(one, torch.Tensor):
            refuse("parameters", one, "tensors, as model.parameters()")
