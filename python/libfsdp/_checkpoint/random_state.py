"""The random generators whose states a checkpoint keeps, with the same names as in C++."""

from __future__ import annotations

import torch


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the states of torch's default generator of the CPU, and of that of the model's device if it is another one."""
    states = {"rng": torch.get_rng_state()}
    if device.type != "cpu":
        states[f"{device.type}_rng"] = torch.get_device_module(device.type).get_rng_state(device)
    return states


def takes(name: str, state: torch.Tensor, device: torch.device) -> bool:
    """Returns whether the state is valid for this generator."""
    trial = torch.Generator() if name == "rng" else torch.Generator(device)
    try:
        trial.set_state(state)
    except (RuntimeError, TypeError):
        return False
    return True


def set_generator(name: str, state: torch.Tensor, device: torch.device) -> None:
    """Sets the state, so that the generator continues where the saved one stopped."""
    if name == "rng":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)
