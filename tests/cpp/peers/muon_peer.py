"""The Python side of tests/cpp/optim/muon_torch_test.cpp: trains matrices with torch.optim.Muon.

    muon_peer.py OUT     writes values, gradients and what the optimizer makes of them to OUT, by torch.save

Exits with 0 if all went well.
"""

import sys
from typing import Any

import torch

SHAPES = {"wide": (8, 40), "tall": (40, 8), "square": (16, 16)}
STEPS = 4
CASES: list[dict[str, Any]] = [
    {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": "original", "ns_steps": 5},
    {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.5, "nesterov": False, "adjust_lr_fn": "original", "ns_steps": 3},
    {
        "lr": 0.01,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "adjust_lr_fn": "match_rms_adamw",
        "ns_steps": 5,
    },
]


def train(case: int) -> dict[str, torch.Tensor]:
    """All tensors of one case by name: NAME.0 before the first step, NAME.gradient.K and NAME.K of step K."""
    generator = torch.Generator().manual_seed(case)
    tensors: dict[str, torch.Tensor] = {}
    weights = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in SHAPES.items()}
    tensors |= {f"{name}.0": weight.detach().clone() for name, weight in weights.items()}
    optimizer = torch.optim.Muon(weights.values(), **CASES[case])
    for step in range(1, STEPS + 1):
        for name, weight in weights.items():
            # Whole numbers, so that a mean over ranks is exact.
            weight.grad = (8 * torch.randn(weight.shape, generator=generator)).round()
            tensors[f"{name}.gradient.{step}"] = weight.grad.clone()
        optimizer.step()
        tensors |= {f"{name}.{step}": weight.detach().clone() for name, weight in weights.items()}
    return tensors


def main() -> None:
    torch.set_num_threads(1)
    results = {f"{case}.{name}": value for case in range(len(CASES)) for name, value in train(case).items()}
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
