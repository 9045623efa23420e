"""Parameters that are gathered by differences in four bits, against a receiver in plain torch."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp_state
from support import device
from support.marks import on_ranks
from support.training import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import libfsdp
from libfsdp import Int4Differences, MixedPrecisionPolicy, fully_shard

BLOCK = 32


def transformed(blocks: torch.Tensor) -> torch.Tensor:
    """The Hadamard transform, by transforms of halves."""
    size = blocks.size(-1)
    if size == 1:
        return blocks
    first, second = transformed(blocks[..., : size // 2]), transformed(blocks[..., size // 2 :])
    return torch.cat([first + second, first - second], -1)


def received(last: torch.Tensor, main: torch.Tensor, *, hadamard: bool) -> torch.Tensor:
    """What ranks have of a parameter when they had `last` and a difference has arrived."""
    blocks = (main - last.float()).view(-1, BLOCK)
    blocks = transformed(blocks) if hadamard else blocks
    wanted = blocks.abs().amax(1, keepdim=True) * torch.tensor(1 / 7, dtype=torch.float32)
    scale = wanted.bfloat16()
    up = scale.float() < wanted
    scale = torch.where(up, (scale.view(torch.int16) + 1).view(torch.bfloat16), scale).double()
    integers = torch.where(scale > 0, (blocks / scale.float()).round().double(), 0)
    if hadamard:
        integers = transformed(integers) / BLOCK
    return (last.float() + (integers * scale).float().view_as(last)).to(last.dtype)


def make(hadamard: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 32), nn.Linear(32, 4)).to(device.TYPE)

    def matrices(parameter: nn.Parameter) -> Int4Differences | None:
        return Int4Differences(BLOCK, hadamard) if parameter.ndim == 2 and parameter.size(1) == 32 else None

    given: dict[str, Any] = {"placements": "optim_grads", "gather_format": matrices} | options
    for block in (model[0], model[2]):
        fully_shard(block, **given)
    return fully_shard(model, **given)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    model(torch.randn(3, 32, generator=generator).to(device.TYPE)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def unsharded(model: Any) -> list[torch.Tensor]:
    """Returns the unsharded matrices of the first and the last layer, as the next forward has them."""
    with torch.no_grad():
        columns = torch.eye(32, device=device.TYPE, dtype=model[0].weight.dtype)
        seen: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.detach().clone()))
            for layer in (model[0], model[3])
        ]
        model(columns)
        for hook in hooks:
            hook.remove()
    return seen


def mains(model: Any) -> list[torch.Tensor]:
    return [full(layer.weight).detach() for layer in (model[0], model[3])]


def sent(model: Any) -> int:
    return int(libfsdp.wire_stats(model)["all_gather_bytes"])


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("placements", ["optim", "optim_grads"])
@pytest.mark.parametrize(("size", "dims"), [(2, (2,)), (4, (4,)), (4, (2, 2))])
@on_ranks("size")
def test_all_ranks_add_what_arrives(dims: tuple[int, ...], placements: str, hadamard: bool) -> None:
    mesh = init_device_mesh(device.TYPE, dims, mesh_dim_names=("replicate", "shard")[-len(dims) :])
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = make(hadamard, mesh=mesh, placements=placements, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        last = unsharded(model)
        assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(last, mains(model), strict=True))
        for number in range(4):
            step(model, optimizer, number)
            last = [received(a, b, hadamard=hadamard) for a, b in zip(last, mains(model), strict=True)]
            # The second forward gathers nothing: its parameters are the same.
            for _ in range(2):
                assert all(torch.equal(a, b) for a, b in zip(unsharded(model), last, strict=True))


@on_ranks(2)
def test_bytes() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, 0)
    seen = []
    for number in range(3):
        before = sent(model)
        if number == 2:
            with torch.no_grad():
                model[0].weight.mul_(2)
        step(model, optimizer, number)
        seen.append(sent(model) - before)
    matrices, others = (8 * 32 + 4 * 32) // 2, (32 * 8 + 8 + 32 + 4) // 2  # elements of one rank
    assert seen[0] == seen[1] == matrices // BLOCK * (BLOCK // 2 + 2) + others * 4
    assert seen[2] == (matrices + others) * 4


@on_ranks(2)
def test_other_writes_send_parameters() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, 0)
    saved = {name: value.clone() for name, value in model.state_dict().items()}

    def load() -> None:
        model.load_state_dict(saved)

    def write() -> None:
        with torch.no_grad():
            model[0].weight.mul_(3)

    def set_state() -> None:
        dcp_state.set_model_state_dict(model, saved)

    for change in (load, write, set_state):
        # Together with a step, too.
        for steps in (0, 1):
            step(model, optimizer, 1)
            unsharded(model)
            if steps:
                step(model, optimizer, 2)
            change()
            assert all(torch.equal(a, b) for a, b in zip(unsharded(model), mains(model), strict=True)), change
            last = unsharded(model)
            step(model, optimizer, 3)
            expected = [received(a, b, hadamard=False) for a, b in zip(last, mains(model), strict=True)]
            assert all(torch.equal(a, b) for a, b in zip(unsharded(model), expected, strict=True)), change


@on_ranks(2)
def test_lost_writes_do_not_stay() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(3):
        step(model, optimizer, number)
        for update in (True, False):
            model.unshard()
            with torch.no_grad():
                model[3].weight.add_(1)
            with (
                pytest.warns(UserWarning, match="lost at the next reshard") if number == 0 and update else nullcontext()
            ):
                model.reshard()
            assert torch.equal(unsharded(model)[1], mains(model)[1])


@on_ranks(2)
def test_a_checkpoint_is_sent(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    libfsdp.save(tmp_path / "0", model, optimizer)
    saved = mains(model)
    for number in range(1, 4):
        step(model, optimizer, number)
    libfsdp.load(tmp_path / "0", model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(mains(model), saved, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(unsharded(model), saved, strict=True))
    # Unsharded weights for others are the exact ones.
    step(model, optimizer, 4)
    exported = {name: tensor.clone() for bucket in libfsdp.full_weights(model) for name, tensor in bucket}
    assert torch.equal(exported["0.weight"], mains(model)[0])


@on_ranks(2)
def test_needs_parameters_that_stay() -> None:
    with pytest.raises(libfsdp.Error, match=r"differences to what all ranks have.*optim_grads or optim"):
        make(placements="optim_grads_params")
    with pytest.raises(ValueError, match="takes neither a gather_format"):
        make(placements="no_shard")
    with pytest.raises(libfsdp.Error, match=r"block 48.*power of two"):
        fully_shard(nn.Linear(48, 4), placements="optim", gather_format=lambda p: Int4Differences(48, hadamard=True))


@on_ranks(2)
def test_a_repeated_microbatch_has_the_same_parameters() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    check = libfsdp.ReplayCheck(model, every=1)
    for number in range(3):
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(number)).to(device.TYPE)

        def run(batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(batch).square().mean()
            loss.backward()
            return loss

        check.run(run, x)
        optimizer.step()
        optimizer.zero_grad()
    assert check.checked == 2
