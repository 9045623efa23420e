"""Tensors that say themselves how they are gathered: libfsdp against FSDP2, and what the two methods are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.extended import EightBits, EightBitsOld, patch_as_half
from support.marks import on_ranks
from support.ranks import ComparedRanks, run_both
from support.states import assert_equal
from support.training import api
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.testing._internal.two_tensor import TwoTensor

import libfsdp


def model(kind: type[EightBits], rows: int) -> nn.Sequential:
    """Extended weights beside plain biases."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, rows), nn.Tanh(), nn.Linear(rows, 6), nn.Tanh(), nn.Linear(6, 2))
    for layer in (made[0], made[2], made[4]):
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return made


def train(implementation: str, kind: type[EightBits], rows: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters and losses of three steps."""
    shard = api(implementation).fully_shard
    trained = model(kind, rows)
    for layer in (trained[0], trained[2]):
        shard(layer, **options)
    shard(trained, **options)
    return steps(trained)


def steps(trained: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    results = []
    for _ in range(3):
        loss = trained(torch.randn(3, 4, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    for parameter in trained.parameters():
        local = parameter._local_tensor.detach()
        results.append(local.data_ if isinstance(local, EightBits) else local.clone())
    return results


bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "rows", "options"),
    [
        (EightBits, 8, {}),
        (EightBits, 8, {"reshard_after_forward": False}),
        (EightBits, 7, {}),
        (EightBits, 7, {"mp_policy": bf16}),
        (EightBits, 8, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        (EightBitsOld, 8, {}),
    ],
    ids=["default", "no_reshard", "uneven", "bf16", "offload", "old_signature"],
)
def test_trains_as_fsdp2(
    compared_ranks: ComparedRanks, kind: type[EightBits], rows: int, options: dict[str, Any]
) -> None:
    assert_equal(*run_both(compared_ranks, 2, train, kind, rows, options))


def train_patched(implementation: str) -> list[torch.Tensor]:
    shard = api(implementation).fully_shard
    with torch.device("meta"):
        trained = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2))
    shard(trained[0])
    shard(trained)
    trained.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(5)
    for parameter in trained.parameters():
        parameter._local_tensor.copy_(torch.randn(parameter._local_tensor.shape, generator=generator))
    patch_as_half(trained[0].weight._local_tensor)
    return steps(trained)


def test_methods_of_a_plain_tensor_serve(compared_ranks: ComparedRanks) -> None:
    assert_equal(*run_both(compared_ranks, 2, train_patched))


def pair_before(self: TwoTensor, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
    return (self.a, self.b), None


def pair_after(
    self: TwoTensor, arrived: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
) -> Any:
    if out is None:
        return TwoTensor(*arrived), arrived
    for tensor, mine in zip(arrived, (out.a, out.b), strict=True):
        assert tensor.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
    return None


def train_pairs(implementation: str, reshard: bool) -> list[torch.Tensor]:
    """Whole parameters are of the class, too, which keeps its values in attributes, as the program keeps its marks."""
    shard = api(implementation).fully_shard
    torch.manual_seed(0)
    trained = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    for layer in trained:
        layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach().clone()))
        layer.weight.mark = "mine"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TwoTensor, "fsdp_pre_all_gather", pair_before, raising=False)
        patch.setattr(TwoTensor, "fsdp_post_all_gather", pair_after, raising=False)
        for module in (trained[0], trained):
            shard(module, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(dist.get_rank())
        results = []
        for _ in range(3):
            loss = trained(torch.randn(3, 4, generator=generator)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.detach().a)
    if implementation == "libfsdp":
        assert [parameter.mark for parameter in trained.parameters()] == ["mine", "mine"]
    return [*results, *(parameter._local_tensor.detach().a for parameter in trained.parameters())]


@pytest.mark.parametrize("reshard", [True, False])
def test_classes_keep_their_values_in_attributes(compared_ranks: ComparedRanks, reshard: bool) -> None:
    assert_equal(*run_both(compared_ranks, 2, train_pairs, reshard))


@on_ranks(4)
def test_what_the_methods_are_told() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    trained = model(EightBits, 8)
    EightBits.seen.clear()
    for layer in (trained[0], trained[2]):
        libfsdp.fully_shard(layer, mesh=mesh)
    libfsdp.fully_shard(trained, mesh=mesh)
    assert type(trained[0].weight._local_tensor) is EightBits
    trained(torch.ones(2, 4)).sum().backward()
    of_first = [seen for seen in EightBits.seen if seen["module"] is trained[0]]
    first, again = of_first
    assert first["mesh"].ndim == 1
    assert first["mesh"].size() == 2
    assert (first["size"], first["stride"]) == (torch.Size([8, 4]), (4, 1))
    # The second gather fills what the first has made.
    assert first["out"] is None
    assert isinstance(again["out"], nn.Parameter)
    assert again["out"].shape == (8, 4)
    assert [t.dtype for t in first["arrived"]] == [torch.int8, torch.float32]
    # Backward has freed what arrived, and the whole parameter.
    freed = (*again["arrived"], again["out"])
    assert [tensor.untyped_storage().nbytes() for tensor in freed] == [0, 0, 0]
    assert trained[0].weight.grad.full_tensor().shape == (8, 4)


class OnlyBefore(EightBits):
    """Has one of the two methods."""

    fsdp_post_all_gather = property()


@on_ranks(4)
def test_what_cannot_be_is_refused() -> None:
    for options, text in (
        ({"reshard_after_forward": 2}, "a number for reshard_after_forward"),
        ({"placements": "optim"}, "placements 'optim'"),
        ({"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.size(1) == 4 else None}, "another dimension"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            libfsdp.fully_shard(model(EightBits, 8), **options)
    with pytest.raises(AssertionError, match="only one of them"):
        libfsdp.fully_shard(model(OnlyBefore, 8))


@on_ranks(2)
def test_rows_that_an_extension_does_not_pad_are_padded() -> None:
    padded = train("libfsdp", EightBits, 7, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EightBits, "pads", False)
        assert_equal(train("libfsdp", EightBits, 7, {}), padded)
