"""What goes wrong in Megatron-FSDP 0.6.1, and does not here; and its options, by what each changes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.marks import on_ranks
from support.megatron import (
    STRATEGIES,
    Block,
    assert_same_parameters,
    batch,
    mean_gradients,
    plain_model,
    ranks_of,
    set_mean_gradients,
    shard,
    whole,
)
from torch import nn
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp.megatron import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from libfsdp.megatron import _config as config


@pytest.mark.parametrize("checkpointed", [False, True])
@on_ranks(2)
def test_the_first_update_is_exact(checkpointed: bool) -> None:
    single = plain_model()
    model = shard(plain_model())
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    if checkpointed:  # A state dict before the first step is a template of what it will have.
        state = optimizer.state_dict()
        assert all(float(one["step"]) == 0 for one in state["state"].values())
        assert not optimizer.state
        optimizer.load_state_dict(state)
    alone = torch.optim.AdamW(single.parameters(), lr=0.1)
    set_mean_gradients(single, [0])
    alone.step()
    model(batch(0, dist.get_rank())).square().mean().backward()
    optimizer.step()
    assert_same_parameters(model, single, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_groups_of_parameters_survive() -> None:
    module = plain_model()
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": 0.3, "name": "decayed"},
        {"params": others, "weight_decay": 0.0, "lr": 0.5, "name": "others"},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model, same = fully_shard(module, optimizer, fsdp_unit_modules=[Block])
    assert same is optimizer
    assert [group["name"] for group in optimizer.param_groups] == ["decayed", "others"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(decayed), len(others)]
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    assert all(p.ndim > 1 for p in optimizer.param_groups[0]["params"])
    model(batch(0, dist.get_rank())).square().mean().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="none of the module's"):
        fully_shard(plain_model(), torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1))
    with pytest.raises(ValueError, match="belong to 0 MegatronFSDP models"):
        fully_shard_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1))


@on_ranks(2)
def test_fine_grained_gathers_reach_the_engine() -> None:
    gathers = []
    for is_fine in (False, True):
        model = shard(plain_model(blocks=4), enable_fine_grained_param_gather=is_fine)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            before = libfsdp.wire_stats(model.module)["all_gathers"] if step else 0
            model(batch(step, dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        gathers.append(libfsdp.wire_stats(model.module)["all_gathers"] - before)
    assert gathers[0] == 2 * 4  # Backward begins with the block that forward has ended with; and the rest of the model.
    assert gathers[1] > 2 * gathers[0]  # The layers of each block, one by one.


def capped(size: int | None, overlap: bool) -> int:
    ranks_ = ranks_of("fsdp")
    model = MegatronFSDP(
        plain_model(blocks=4),
        FSDPDistributedIndex(ranks_["device_mesh"], dp_shard_dim="dp", tp_dim="tp"),
        DistributedDataParallelConfig(
            data_parallel_sharding_strategy="optim_grads_params",
            suggested_communication_unit_size=size,
            overlap_param_gather=overlap,
            overlap_grad_reduce=True,
        ),
        fsdp_unit_modules=[Block],
    )
    assert not model.model_auto_sync
    for step in range(3):
        model(batch(step, dist.get_rank())).square().mean().backward()
        model.finish_grad_sync()
        model.zero_grad_buffer()
        model.install_optimized_model_weights()
    return libfsdp.memory_stats(model.module)["gathered_parameters.peak"]


@on_ranks(2)
def test_caps_of_what_is_gathered_ahead_are_caps() -> None:
    block = sum(p.numel() for p in Block(8, 12).parameters())
    ahead = capped(None, True)
    assert capped(block, True) == ahead
    alone = capped(block - 1, True)
    assert alone == capped(None, False)
    assert ahead - alone >= 4 * block


def one_by_one(overlap: bool) -> int:
    model = shard(plain_model(blocks=4), overlap_grad_reduce=overlap)
    for step in range(2):
        model(batch(step, dist.get_rank())).square().mean().backward()
    for p, gradient in zip(model.parameters(), mean_gradients(plain_model(blocks=4), [0, 1]), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad.to_local(), _mine(p, gradient), rtol=1e-5, atol=1e-6)
    return libfsdp.memory_stats(model.module)["unreduced_gradients.peak"]


@on_ranks(2)
def test_reductions_that_do_not_overlap_end_one_by_one() -> None:
    assert one_by_one(overlap=False) < one_by_one(overlap=True)


class WithOdd(nn.Module):
    """A scalar, a parameter that nothing uses, and rows of a size of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = Block(8, 12)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(7, 5)
        self.odd = nn.Parameter(torch.randn(3, 8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.temperature * (self.body(x) @ self.odd[1])


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_scalars_and_unused_parameters(strategy: str) -> None:
    single = device.move(WithOdd())
    expected = mean_gradients(single, [0, 1])
    model = shard(device.move(WithOdd()), strategy)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in (0, 1):
        model(batch(step, dist.get_rank())).square().mean().backward()
    for (name, p), wanted in zip(model.module.named_parameters(), expected, strict=True):
        if name.startswith("unused"):
            assert p.grad is None
        elif p.grad is not None and not isinstance(p, DTensor):
            torch.testing.assert_close(p.grad, wanted, rtol=1e-5, atol=1e-6)
            assert name == "temperature"
    alone = torch.optim.AdamW(single.parameters(), lr=0.1)
    for (name, p), wanted in zip(single.named_parameters(), expected, strict=True):
        p.grad = None if name.startswith("unused") else wanted
    alone.step()
    optimizer.step()
    assert_same_parameters(model, single)
    optimizer.zero_grad()
    assert model.module.temperature.grad is None


@on_ranks(2)
def test_empty_shards_have_no_gradient() -> None:
    module = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4))
    model = shard(module, fsdp_unit_modules=[nn.Linear])
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
    before = [whole(p.detach()).clone() for p in model.parameters()]
    model(torch.ones(2, 4)).sum().backward()
    for p in model.parameters():
        assert (p.grad is None) == (p.to_local().numel() == 0)
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(whole(p.detach()), old)
    if dist.get_rank() == 1:
        assert any(p.to_local().numel() == 0 for p in model.parameters())


@on_ranks(2)
def test_padding_is_a_row_per_parameter() -> None:
    """Rows of sizes without a common multiple: shards hold their own rows alone."""
    module = nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 13), nn.Linear(13, 17, bias=False))
    model = shard(module, fsdp_unit_modules=None)
    mine = sum(p.to_local().numel() for p in model.parameters())
    row = max(p.numel() // p.size(0) for p in model.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert mine <= total // 2 + row * len(list(model.parameters()))
    model(torch.ones(2, 7)).sum().backward()
    gathered = libfsdp.memory_stats(model.module)["gathered_parameters.peak"]
    assert gathered <= 4 * (total + sum(p.numel() // p.size(0) for p in model.parameters())) * 1.2


@on_ranks(2)
def test_attributes_are_carried_over() -> None:
    module = plain_model()
    weight = module[0].weight
    carried = {
        "sequence_parallel": True,
        "is_embedding_parameter": True,
        "is_embedding_or_output_parameter": True,
        "partition_dim": 0,
        "partition_stride": 1,
        "overwrite_main_grad": False,
    }
    for name, value in carried.items():
        setattr(weight, name, value)
    model = shard(module)
    seen: list[Any] = []
    model.module[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    model(batch(0, 0)).sum().backward()
    for parameter in (model.module[0].weight, seen[0]):
        for name, value in carried.items():
            assert getattr(parameter, name) == value
    assert seen[0] is not model.module[0].weight
    assert not hasattr(model.module[0].bias, "sequence_parallel")
    assert model.module[0].weight.main_grad is model.module[0].weight.grad


@on_ranks(2)
def test_weights_are_installed_before_they_are_used() -> None:
    model = shard(plain_model())
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(batch(0, 0)).sum().backward()
    optimizer.step(install_optimized_model_weights=False)
    with pytest.raises(RuntimeError, match=r"call model\.install_optimized_model_weights"):
        model(batch(0, 0))
    model.install_optimized_model_weights()
    model(batch(0, 0))


def _mine(p: Any, gradient: torch.Tensor) -> torch.Tensor:
    if p.to_local().size(0) == gradient.size(0):
        return gradient
    half = -(-gradient.size(0) // 2)
    return gradient[:half] if dist.get_rank() == 0 else gradient[half:]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_losses_per_token_are_added_up(strategy: str) -> None:
    model = shard(plain_model(), strategy, calculate_per_token_loss=True)
    model(batch(0, dist.get_rank())).square().mean().backward()
    for p, mean in zip(model.parameters(), mean_gradients(plain_model(), [0]), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad.to_local(), _mine(p, 2 * mean), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_reports_of_nan() -> None:
    model = shard(plain_model(), report_nan_in_param_grad=True)
    x = batch(0, 0)
    if dist.get_rank() == 1:
        x[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="before reduction, on rank 1"):
        model(x).sum().backward()
    ranks_ = ranks_of("fsdp")
    index = FSDPDistributedIndex(ranks_["device_mesh"], dp_shard_dim="dp", tp_dim="tp")
    options = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim", check_for_nan_in_grad=True)
    other = MegatronFSDP(plain_model(), index, options, fsdp_unit_modules=[Block])
    other(x).sum().backward()
    with pytest.raises(libfsdp.Error, match=r"rank 0: .*weight"):
        other.start_grad_sync()
    other.zero_grad_buffer()
    other(batch(0, 0)).sum().backward()
    other.start_grad_sync()
    # Only one rank has a row that is not finite: all of them raise.
    gradient: Any = next(other.parameters()).grad
    if dist.get_rank() == 1:
        gradient.to_local().fill_(float("inf"))
    with pytest.raises(libfsdp.Error, match=r"infinity\. rank 1: \S*weight\. Lower"):
        other.start_grad_sync()


@on_ranks(2)
def test_what_does_not_fit_is_refused() -> None:
    mesh = ranks_of("fsdp")["device_mesh"]
    for options, text in (
        ({"zero_dp_strategy": 4}, "zero_dp_strategy is 4"),
        ({"zero_dp_strategy": "grads"}, "zero_dp_strategy is 'grads'"),
        ({"outer_dp_sharding_strategy": 2}, "outer_dp_sharding_strategy is 2"),
        ({"zero_dp_strategy": 2, "outer_dp_sharding_strategy": 1}, "needs zero_dp_strategy 3"),
        ({"outer_dp_sharding_strategy": 1}, "needs dp_outer_dim"),
        ({"dp_outer_dim": "tp"}, "belong together"),
        ({"dp_shard_dim": "absent"}, "is no dimension"),
        ({"init_model_with_meta_device": True, "zero_dp_strategy": 0}, "needs sharding"),
        ({"fsdp_unit_modules": ["absent.Module"]}, "can't be imported"),
        ({"fsdp_unit_modules": ["torch.ones"]}, "is no class"),
    ):
        arguments: dict[str, Any] = {"device_mesh": mesh, "dp_shard_dim": "dp", **options}
        with pytest.raises(ValueError, match=text):
            fully_shard_model(plain_model(), **arguments)
    module = plain_model()
    module[0].weight.allreduce = False
    with pytest.raises(ValueError, match="expt_device_mesh"):
        fully_shard_model(module, device_mesh=mesh, dp_shard_dim="dp")


@on_ranks(2)
def test_options_without_meaning_are_told_once() -> None:
    config._told.clear()
    said: list[str] = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = shard(plain_model(), nccl_ub=True, disable_bucketing=True, average_in_collective=True)
        said.extend(str(one.message) for one in caught if "changes nothing" in str(one.message))
    assert model.ddp_config.fsdp_double_buffer
    model.param_and_grad_buffer.manual_buffer_registration()
    on_cpu = ["nccl_ub"] if device.TYPE == "cpu" else []
    assert sorted(one.split(" changes")[0] for one in said) == ["average_in_collective", "disable_bucketing", *on_cpu]


@pytest.mark.parametrize(("size", "kind"), [(2, "fsdp"), (4, "hfsdp")])
@on_ranks("size")
def test_models_on_meta_get_the_first_ranks_values(kind: str) -> None:
    with torch.device("meta"):
        module = plain_model()
        module.append(nn.MultiheadAttention(8, 2))
        del module[-1]
        for block in module:
            if isinstance(block, Block):  # The parameter has no reset_parameters().
                block.reset_parameters = lambda block=block: nn.init.constant_(block.scale, 2.0)
    torch.manual_seed(dist.get_rank())
    model = shard(module, kind=kind, init_model_with_meta_device=True)
    torch.manual_seed(0)
    with torch.device(device.TYPE):
        first = nn.Linear(8, 3)  # The last module is reset first.
    assert torch.equal(whole(model.module[-1].weight.detach()), first.weight)
    assert torch.equal(whole(model.module[-1].bias.detach()), first.bias)
    assert whole(model.module[1].scale.detach()).item() == 2.0
    model(batch(0, dist.get_rank())).sum().backward()
    with torch.device("meta"):
        broken = plain_model()
    with pytest.raises(ValueError, match=r"module '3' has parameters .* no reset_parameters"):
        shard(broken, kind=kind, init_model_with_meta_device=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@on_ranks(2)
def test_runs_without_cuda() -> None:
    assert not torch.cuda.is_available()
    model = fully_shard_model(plain_model(), fsdp_unit_modules=["support.megatron.Block"])
    assert isinstance(model.module, nn.Sequential)
    assert model.model_auto_sync
    assert dist.get_world_size(model.dist_index.get_dp_group()) == dist.get_world_size()
    model(batch(0, 0)).sum().backward()


def names_of_the_peer() -> set[str]:
    """Imported modules that are not libfsdp's own, which are imported when they are needed first."""
    return {name for name in sys.modules if name.startswith("megatron")}


def test_installing_is_reversible() -> None:
    before = names_of_the_peer()
    libfsdp.install_megatron()
    libfsdp.install_megatron()
    package, module = (importlib.import_module(name) for name in ("megatron_fsdp", "megatron_fsdp.fully_shard"))
    assert package.MixedPrecisionPolicy is MixedPrecisionPolicy
    assert module.fully_shard_model is fully_shard_model
    assert package.fully_shard is fully_shard
    libfsdp.uninstall_megatron()
    assert names_of_the_peer() == before
    installed = importlib.util.find_spec("megatron_fsdp")
    assert installed is None or Path(installed.origin or "").parent.parent != Path(libfsdp.__file__).parent
