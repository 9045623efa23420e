"""What plans say of FSDP2: beside torch's tracker of the memory of FSDP2 itself, in a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.training import mesh_of
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

import libfsdp

BF16 = torch.bfloat16


class Block(nn.Module):
    """Layers whose rows do not divide by the ranks, with few activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model_of(width: int = 93, blocks: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, 5))


OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)},
    "bf16 reductions": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)},
    "resharded root": {"reshard_after_forward": True},
}


class ReducesInPlace(DefaultReduceScatter):
    """Takes this rank's part, and no sum: Gloo reduces in a copy, which a thread of its own frees at some time."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def measured(options: dict[str, Any], replicas: int) -> dict[str, int]:
    """Bytes at the peak of two steps of FSDP2, by torch's names of what they are for."""
    model: Any = model_of()
    for module in (*model[1:-1], model):
        fully_shard(module, mesh=mesh_of(replicas), **options).set_custom_reduce_scatter(ReducesInPlace())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    tracker = FSDPMemTracker(model, optimizer)
    x = torch.randn(1, 7)
    tracker.track_inputs((x,))
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    peak: dict[Any, int] = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    found = {getattr(kind, "name", str(kind)): count for kind, count in peak.items()}
    steps = sum(state["step"].nbytes for state in optimizer.state.values())
    return {**found, "OPT": found["OPT"] - steps, "Total": found["Total"] - steps}


@pytest.mark.parametrize(
    ("size", "names", "replicas", "more"),
    [
        (2, list(OPTIONS), 1, {}),
        (4, ["fsdp", "bf16"], 1, {}),
        (4, ["fsdp", "bf16 reductions"], 2, {}),
        (4, ["fsdp"], 1, {"reshard_after_forward": 2}),
    ],
)
@on_ranks("size")
def test_what_torchs_tool_finds(names: list[str], replicas: int, more: dict[str, Any]) -> None:
    for name in names:
        options = {**OPTIONS[name], **more}
        found = measured(options, replicas)
        planned = libfsdp.plan(
            model_of(),
            libfsdp.PlannedMesh(
                dist.get_world_size() // replicas, replicas=replicas, rank=dist.get_rank(), device_type="cpu"
            ),
            units=Block,
            **options,
        ).fsdp2
        assert planned is not None
        text = f"{name}: planned {planned}, and found {found}"
        assert planned["main_parameters"] == found["SHARDED_PARAM"], text
        assert planned["optimizer_state"] == found["OPT"], text
        # With others, two moments are within a few bytes of the peak; and torch counts copies of neighbours as activations.
        if name == "fsdp" and not more:
            assert planned["gathered_parameters"] == found["UNSHARDED_PARAM"], text
            assert planned["main_gradients"] == found["SHARDED_GRAD"], text
        # There are few activations, and few temporary tensors of backwards.
        assert 1.0 <= (found["Total"] - found["INP"]) / planned["device"] < 1.005, text


@pytest.mark.parametrize(
    "options",
    [
        {"placements": "optim_grads"},
        {"placements": "no_shard"},
        {"keep_gathered_bytes": 1000},
        {"reshard_after_forward": False},
        {"outer_placements": "optim"},
        {"main_grads_dtype": torch.float64},
    ],
)
def test_options_that_fsdp2_lacks_or_that_are_not_followed(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = libfsdp.plan(model, libfsdp.PlannedMesh(2, replicas=2), units=nn.Linear, **options)
    assert plan.fsdp2 is None
    assert "FSDP2" not in str(plan)


def test_what_is_printed() -> None:
    plan = libfsdp.plan(model_of(), libfsdp.PlannedMesh(4), units=Block)
    assert plan.fsdp2 is not None
    assert f"(FSDP2 has its peak in {plan.fsdp2_moment}.)" in str(plan)
    # Its rows are padded one parameter at a time: 93 rows to 96, 280 to 280, 5 to 8.
    width = 93
    block = 280 * (width + 1) + 96 * 281
    assert plan.fsdp2["main_parameters"] == (4 * block + 96 * 8 + 8 * (width + 1)) * 4 // 4
    assert libfsdp.plan(model_of(), libfsdp.PlannedMesh(1), units=Block).fsdp2 is None


def test_offloaded_bytes_are_the_hosts() -> None:
    plan = libfsdp.plan(model_of(), libfsdp.PlannedMesh(4), units=Block, offload_policy=CPUOffloadPolicy())
    on_device = libfsdp.plan(model_of(), libfsdp.PlannedMesh(4), units=Block)
    assert plan.fsdp2 is not None
    assert on_device.fsdp2 is not None
    assert plan.fsdp2["main_parameters"] == plan.fsdp2["optimizer_state"] == 0
    kinds = ("main_parameters", "optimizer_state")
    gradients = on_device.fsdp2["main_parameters"]
    assert plan.fsdp2["host"] == sum(on_device.fsdp2[kind] for kind in kinds) + gradients


def test_activations_count() -> None:
    plain = libfsdp.plan(model_of(), libfsdp.PlannedMesh(4), units=Block)
    full = libfsdp.plan(
        model_of(), libfsdp.PlannedMesh(4), units=Block, activations={unit.name: 1 << 30 for unit in plain.units}
    )
    assert full.fsdp2 is not None
    assert full.fsdp2["activations"] == 5 << 30
