"""Complex parameters: gathered and reduced as what they are, in whatever units."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import on_ranks
from support.training import api, full, mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


class Spectral(nn.Module):
    """A layer in the frequencies of its input: complex weights, of 7 rows, with a bias that is real or complex."""

    def __init__(self, bias: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 4, dtype=torch.complex64))
        self.back = nn.Parameter(torch.randn(4, 6, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(6, dtype=bias))

    def forward(self, x: Tensor) -> Tensor:
        frequencies: Tensor = torch.fft.rfft(x.float(), dim=-1) @ self.weight @ self.back
        return (frequencies + self.bias).abs()


class Model(nn.Module):
    """Its layers are units."""

    def __init__(self, bias: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(5, 12), Spectral(bias), nn.Linear(6, 3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("size", "implementation", "bias", "options"),
    [
        *(
            (2, "libfsdp", torch.float32, options)
            for options in ({}, {"sync": "each", "reshard": False}, {"cut": True}, {"reduce": torch.float32})
        ),
        (4, "libfsdp", torch.float32, {"replicas": 2}),
        (4, "libfsdp", torch.float32, {"reshard": 2}),
        # FSDP2 takes them in units of their own.
        (2, "libfsdp", torch.complex64, {}),
        (2, "fsdp2", torch.complex64, {}),
    ],
)
@on_ranks("size")
def test_complex_parameters_are_trained(implementation: str, bias: torch.dtype, options: dict[str, Any]) -> None:
    """Each rank compares with all ranks' gradients, which it computes without sharding."""
    fsdp, world = api(implementation), dist.get_world_size()
    torch.manual_seed(0)
    plain = Model(bias).to(device.TYPE)
    model = copy.deepcopy(plain)
    arguments = {"mesh": mesh_of(options.get("replicas", 1)), "reshard_after_forward": options.get("reshard", True)}
    if "cut" in options:
        arguments["shard_placement_fn"] = lambda p: Shard(1) if p.shape == (4, 6) else None
    if "reduce" in options:
        arguments["mp_policy"] = fsdp.MixedPrecisionPolicy(reduce_dtype=options["reduce"])
    for layer in model.layers:
        fsdp.fully_shard(layer, **arguments)
    fsdp.fully_shard(model, **arguments)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, plain)]
    for step in range(3):
        expected: dict[str, Tensor] = {}
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1 or options.get("sync") == "each")
            batches = [
                torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * micro + r)).to(device.TYPE)
                for r in range(world)
            ]
            model(batches[dist.get_rank()]).square().mean().backward()
            sums = []
            for batch in batches:
                plain.zero_grad()
                plain(batch).square().mean().backward()
                sums.append({name: full(p.grad) for name, p in plain.named_parameters() if p.grad is not None})
            for name in sums[0]:
                mean = sum(of_rank[name] for of_rank in sums) / world
                expected[name] = expected.get(name, torch.zeros(())) + mean
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(ours.data, DTensor)
            assert ours.grad is not None
            assert ours.grad.dtype == ours.dtype == theirs.dtype
            torch.testing.assert_close(full(ours.grad), expected[name], rtol=1e-5, atol=1e-4)
            theirs.grad = full(ours.grad).to(device.TYPE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(ours), full(theirs)), name
