"""Comparisons of sharded state, made by the ranks themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from support.training import CASES, DEFAULT, Options, batch_of, make_optimizer, sharded


def trained(
    case_name: str, implementation: str, options: Options = DEFAULT, steps: int = 2
) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded model and its optimizer after some steps."""
    model = sharded(case_name, options, implementation)
    optimizer = make_optimizer(options, model.parameters())
    train_more(model, optimizer, case_name, range(steps))
    return model, optimizer


def train_more(model: Any, optimizer: torch.optim.Optimizer, case_name: str, steps: range) -> list[float]:
    """The losses of further steps."""
    losses = []
    for step in steps:
        loss = CASES[case_name].loss(model, batch_of(CASES[case_name], step, 0, torch.distributed.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def describe(value: Any) -> Any:
    """All that tells two values apart but the numbers: for a DTensor, how it lies on the ranks."""
    if isinstance(value, DTensor):
        local = value.to_local()
        placed = (str(value.placements), value.device_mesh.shape, value.device_mesh.mesh_dim_names)
        return (
            "DTensor",
            placed,
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.requires_grad,
            describe(local),
        )
    if isinstance(value, nn.Parameter):
        return ("Parameter", tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
    if isinstance(value, Tensor):
        return (
            type(value).__name__,
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.requires_grad,
            value.device.type,
        )
    return value


def numbers(value: Any) -> Any:
    """The numbers of a value that this rank has."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach().clone() if isinstance(local, Tensor) else local


def flatten(state: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries and lists, by their path."""
    if isinstance(state, Mapping):
        return {k: v for key, of_it in state.items() for k, v in flatten(of_it, f"{path}/{key}").items()}
    if isinstance(state, list | tuple):
        return {k: v for i, of_it in enumerate(state) for k, v in flatten(of_it, f"{path}/{i}").items()}
    return {path: state}


def assert_same_state(got: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Equal in names and their order, types, placements, local sizes and numbers, of which tensors' may differ by a tolerance."""
    mine, other = flatten(got), flatten(expected)
    assert list(mine) == list(other), f"names {list(mine)}, expected {list(other)}"
    for path, value in other.items():
        assert describe(mine[path]) == describe(value), f"{path}: {describe(mine[path])}, not {describe(value)}"
        are_same = same(numbers(mine[path]), numbers(value), tolerance)
        assert are_same, f"{path}: {numbers(mine[path])}, not {numbers(value)}"


def save_by_torch(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Saves both by torch.distributed.checkpoint."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)


def load_by_torch(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Loads what save_by_torch has saved."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def assert_equal(got: Any, expected: Any) -> None:
    """Demands equal names and values in nested dictionaries and lists. Tensors are equal to the last bit."""
    mine, other = flatten(got), flatten(expected)
    assert list(mine) == list(other), f"names {list(mine)}, expected {list(other)}"
    assert [path for path, value in other.items() if not same(mine[path], value)] == []


def same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """Whether two numbers or tensors are equal, tensors up to a tolerance."""
    if not isinstance(a, Tensor):
        return bool(a == b)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance) if tolerance else torch.equal(a, b)
