"""Ranks that have other parameters, settings or histories: one clear error on all of them, or none where there is no difference."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import LIMIT, Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import libfsdp
from libfsdp import fully_shard
from libfsdp._mesh import timeout_of


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks for errors after which collectives go on."""
    ranks = Ranks(2)
    yield ranks
    ranks.end()


@pytest.fixture
def fresh() -> Iterator[Callable[[int], Ranks]]:
    """Ranks whose collectives a test ends."""
    started: list[Ranks] = []

    def start(size: int) -> Ranks:
        started.append(Ranks(size))
        return started[-1]

    yield start
    for ranks in started:
        ranks.end()


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))


class Swapped(nn.Module):
    """Registers its two weights of one shape in the other order where it is told to."""

    def __init__(self, *, swapped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        weights = {"a": nn.Parameter(torch.randn(16, 16)), "b": nn.Parameter(torch.randn(16, 16))}
        for name in ("b", "a") if swapped else ("a", "b"):
            self.register_parameter(name, weights[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a + 2 * (x @ self.b)


def message_of_forward(model: Any, *, in_backward: bool = False, grad: bool = True) -> str:
    x = torch.ones(2, 16)
    if in_backward:
        output = model(x).sum()
        with pytest.raises(RuntimeError) as raised:
            output.backward()
        return str(raised.value)
    with pytest.raises(libfsdp.Error) as raised, torch.set_grad_enabled(grad):
        model(x)
    return str(raised.value)


def frozen_here(placements: str, grad: bool) -> str:
    model = layers()
    model[dist.get_rank()].weight.requires_grad_(False)
    fully_shard(model, placements=placements)
    return message_of_forward(model, in_backward=placements == "no_shard", grad=grad)


def in_other_order() -> str:
    return message_of_forward(fully_shard(Swapped(swapped=dist.get_rank() == 1)))


def other_options(name: str) -> str:
    first = dist.get_rank() == 0
    choices: dict[str, dict[str, Any]] = {
        "main_params_dtype": {"main_params_dtype": torch.float64},
        "reduce_dtype": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        "param_dtype": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "output_dtype": {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.bfloat16)},
        "reshard_after_forward": {"reshard_after_forward": True},
        "keep_gathered_bytes": {"keep_gathered_bytes": 100},
        "report_nan_in_param_grad": {"report_nan_in_param_grad": True},
        "placements": {"placements": "optim"},
    }
    return message_of_forward(fully_shard(layers(), **({} if first else choices[name])))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("placements", ["optim_grads_params", "optim", "no_shard"])
def test_a_parameter_that_is_frozen_on_one_rank(two: Ranks, placements: str, grad: bool) -> None:
    if placements == "no_shard" and not grad:
        pytest.skip("nothing is exchanged")
    for text in two.run(frozen_here, placements, grad):
        assert "rank 0 has 'unit 'Sequential': parameter '0.weight' [16, 16] Float, frozen" in text
        assert "rank 1 has" in text


def test_parameters_in_another_order(two: Ranks) -> None:
    for text in two.run(in_other_order):
        assert "parameter 'a'" in text
        assert "parameter 'b'" in text


@pytest.mark.parametrize(
    "name",
    [
        "main_params_dtype",
        "reduce_dtype",
        "param_dtype",
        "output_dtype",
        "reshard_after_forward",
        "keep_gathered_bytes",
        "report_nan_in_param_grad",
        "placements",
    ],
)
def test_options_that_differ(two: Ranks, name: str) -> None:
    for text in two.run(other_options, name):
        assert "rank 0 and rank 1 differ" in text
        assert name in text


def other_models_before() -> list[float]:
    """Rank 0 alone has had a model of its own, on a mesh of itself; and one that it never used, on all."""
    alone = dist.new_group([0])
    assert alone is not None
    if dist.get_rank() == 0:
        own = fully_shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(alone, "cpu"))
        own(torch.ones(2, 4)).sum().backward()
        fully_shard(nn.Linear(4, 4))
    losses = []
    models = [fully_shard(layers()) for _ in range(2)]
    for model in models:
        loss = model(torch.ones(2, 16)).sum()
        loss.backward()
        losses.append(loss.item())
    return losses


def test_models_that_other_ranks_have_not_had(fresh: Callable[[int], Ranks]) -> None:
    expected = layers()(torch.ones(2, 16)).sum().item()
    for losses in fresh(2).run(other_models_before):
        assert losses == pytest.approx([expected, expected])


def forward_alone() -> float:
    """Where forward gathers nothing, one rank may compute it alone, before others have formed the model."""
    model = fully_shard(layers(), placements="no_shard")
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(2, 16))
    model(torch.ones(2, 16)).sum().backward()
    return float(model[0].weight.grad.sum())


def test_a_replica_computes_alone(two: Ranks) -> None:
    first, second = two.run(forward_alone)
    assert first == second


def set_here(setter: str) -> str:
    model = fully_shard(layers())
    model(torch.ones(2, 16)).sum().backward()
    if dist.get_rank() == 1:
        on = setter in ("set_manual_backward_finalization", "set_reshard_after_forward")
        argument: Any = 4.0 if setter == "set_gradient_divide_factor" else on
        getattr(model, setter)(argument)
    return message_of_forward(model)


@pytest.mark.parametrize(
    ("setter", "on_0", "on_1"),
    [
        ("set_requires_gradient_sync", "requires_gradient_sync true", "requires_gradient_sync false"),
        ("set_requires_all_reduce", "requires_all_reduce true", "requires_all_reduce false"),
        ("set_reshard_after_forward", "reshard_after_forward false", "reshard_after_forward true"),
        ("set_reshard_after_backward", "reshard_after_backward true", "reshard_after_backward false"),
        ("set_is_last_backward", "is_last_backward true", "is_last_backward false"),
        ("set_manual_backward_finalization", "manual_backward_finalization false", "manual_backward_finalization true"),
        ("set_gradient_divide_factor", "gradient_divide_factor 0", "gradient_divide_factor 4"),
    ],
)
def test_setters_on_one_rank(fresh: Callable[[int], Ranks], setter: str, on_0: str, on_1: str) -> None:
    for text in fresh(2).run(set_here, setter):
        assert "the ranks make different calls: rank 0: " in text
        assert on_0 in text
        assert on_1 in text


def arranged(first: tuple[int, ...], second: tuple[int, ...]) -> str:
    """All ranks make both meshes, as torch demands; the last one gives fully_shard the second."""
    meshes = [
        init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :]) for sizes in (first, second)
    ]
    mesh = meshes[dist.get_rank() == dist.get_world_size() - 1]
    begin = time.monotonic()
    with pytest.raises(libfsdp.Error) as raised:
        fully_shard(layers(), mesh=mesh)
    assert time.monotonic() - begin < 30
    return str(raised.value)


@pytest.mark.parametrize(("first", "second"), [((4,), (2, 2)), ((1, 4), (4, 1))])
def test_meshes_of_other_dimensions(
    fresh: Callable[[int], Ranks], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    for text in fresh(4).run(arranged, first, second):
        assert "rank 0 and rank 3 have meshes of other dimensions" in text
        assert "[[" in text


def kept_by_neighbours(on_0: bool | int, on_others: bool | int) -> str:
    choice = on_0 if dist.get_rank() == 0 else on_others
    begin = time.monotonic()
    with pytest.raises(libfsdp.Error) as raised:
        fully_shard(layers(), reshard_after_forward=choice)(torch.ones(2, 16))
    assert time.monotonic() - begin < 30
    return str(raised.value)


@pytest.mark.parametrize(("on_0", "on_others"), [(2, True), (True, 2)])
def test_numbers_of_reshard_after_forward(
    fresh: Callable[[int], Ranks], on_0: bool | int, on_others: bool | int
) -> None:
    for text in fresh(4).run(kept_by_neighbours, on_0, on_others):
        assert "reshard_after_forward=2" in text
        assert "agreement on a model" in text


def separate_group() -> str:
    model = fully_shard(layers())
    begin = time.monotonic()
    call = model.set_separate_reduce_scatter_group if dist.get_rank() == 1 else functools.partial(model, torch.ones(2, 16))
    with pytest.raises(libfsdp.Error) as raised:
        call()
    assert time.monotonic() - begin < 30
    return str(raised.value)


def test_a_group_that_one_rank_alone_asks_for(fresh: Callable[[int], Ranks]) -> None:
    for text in fresh(2).run(separate_group):
        assert "separate_reduce_scatter_group true" in text


def timeouts() -> list[float | None]:
    """Of the groups of a mesh of two dimensions, of all ranks, and of a group that was made with a time-out of its own."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    own = dist.new_group(timeout=timedelta(seconds=7))
    assert isinstance(own, dist.ProcessGroup)
    groups = [mesh.get_group(0), mesh.get_group(1), dist.group.WORLD, own]
    return [timeout_of(group, torch.device("cpu")) for group in groups if group is not None]


def test_the_time_out_of_the_default_group_is_each_groups(fresh: Callable[[int], Ranks]) -> None:
    for seconds in fresh(2).run(timeouts):
        assert seconds == [LIMIT, LIMIT, LIMIT, 7]


def late_peer() -> str:
    """The last of four ranks does not come: its row of HSDP waits as long as init_process_group says."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.distributed_c10d._get_default_group())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model: Any = fully_shard(layers(), mesh=mesh)
    model(torch.ones(2, 16)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 3:
        time.sleep(8)
        return ""
    if dist.get_rank() < 2:
        return ""
    with pytest.raises(libfsdp.CommError) as raised:
        model(torch.ones(2, 16))
    return str(raised.value)


def test_hsdps_groups_wait_as_long_as_the_default_group(fresh: Callable[[int], Ranks]) -> None:
    assert "Timed out waiting 3000ms" in fresh(4).run(late_peer)[2]
