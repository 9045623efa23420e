"""What programs set on parameters: both forms have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.marks import on_ranks
from torch import nn

from libfsdp import fully_shard


class Marked(nn.Module):
    """Notes what its weight has while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[dict[str, Any]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(dict(vars(self.layer.weight)))
        return self.layer(x)


def marks(seen: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in seen.items() if name in ("sequence_parallel", "_no_weight_decay", "late")}


@pytest.mark.parametrize(
    "options",
    [{}, {"placements": "optim"}, {"placements": "no_shard"}, {"reshard_after_forward": False}],
    ids=["default", "optim", "no_shard", "reshard_after_forward"],
)
@on_ranks(2)
def test_attributes_are_carried(options: dict[str, Any]) -> None:
    model: Any = nn.Sequential(Marked(), nn.Linear(4, 2))
    weight = model[0].layer.weight
    weight.sequence_parallel = True
    weight._no_weight_decay = ["a list"]
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    assert model[0].layer.weight is not weight
    expected = {"sequence_parallel": True, "_no_weight_decay": weight._no_weight_decay}
    assert marks(vars(model[0].layer.weight)) == expected
    assert marks(vars(model[0].layer.bias)) == {}
    model[0].layer.weight.late = 3
    model[0].layer.weight.sequence_parallel = False
    expected.update(late=3, sequence_parallel=False)

    def run() -> None:
        dtype = model[1].weight.dtype
        model(torch.ones(2, 4, dtype=dtype)).sum().backward()
        assert marks(model[0].seen[-1]) == expected
        model[0].unshard()
        assert marks(vars(model[0].layer.weight)) == expected
        model[0].reshard()
        assert marks(vars(model[0].layer.weight)) == expected

    run()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    run()
    model.to(torch.float64)
    model.zero_grad()
    run()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float32)
        model.zero_grad()
        run()
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model.zero_grad()
    run()


@on_ranks(4)
def test_what_neighbours_keep_has_them() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.mark = 1
    fully_shard(model[0], reshard_after_forward=2)
    fully_shard(model)
    model(torch.ones(2, 4))
    assert model[0].weight.mark == 1
