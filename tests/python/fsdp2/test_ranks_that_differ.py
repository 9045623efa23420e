"""Ranks that have other parameters, settings or histories: one clear error on all of them, or none where there is no difference."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.ranks import LIMIT, Ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import libfsdp
from libfsdp import fully_shard
from libfsdp._comm.mesh import timeout_of


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
        "memory_budget": {"memory_budget": 1 << 30},
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
        "memory_budget",
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
    call = (
        model.set_separate_reduce_scatter_group if dist.get_rank() == 1 else functools.partial(model, torch.ones(2, 16))
    )
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
    set_timeout: Any = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # Torch 2.15 has the first.
    set_timeout(timedelta(seconds=3), dist.distributed_c10d._get_default_group())
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


def updated_otherwise(case: str) -> str:
    """What the first forward says after an update that differs."""
    first = dist.get_rank() == 0
    model = fully_shard(layers())
    optim = libfsdp.optim
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0 if first else 0.5}]
    scaler = None
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "lr": lambda: optim.AdamW(parameters, lr=0.1 if first else 0.2),
        "schedule": lambda: optim.SGD(parameters, lr=0.1),
        "eps": lambda: optim.Adam(parameters, eps=1e-8 if first else 1e-6),
        "group": lambda: optim.SGD(groups, lr=0.1),
        "muon": lambda: optim.Muon(parameters, momentum=0.9 if first else 0.95),
        "8bit": lambda: optim.AdamW8bit(parameters, betas=(0.9, 0.99 if first else 0.999)),
        "fused": lambda: libfsdp.fuse(torch.optim.SGD(parameters, lr=0.1 if first else 0.2)),
        "scale": lambda: optim.SGD(parameters, lr=0.1),
    }
    optimizer = makers[case]()
    if case == "scale":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 if first else 4.0)
    for step in range(2):
        loss = model(torch.ones(2, 16)).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if case == "schedule" and step == 1 and not first:
            optimizer.param_groups[0]["lr"] = 0.05
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if case != "schedule":
            break
    return message_of_forward(model)


@pytest.mark.parametrize(
    ("case", "on_0", "on_1"),
    [
        ("lr", "lr 0.1", "lr 0.2"),
        ("schedule", "lr 0.1", "lr 0.05"),
        ("eps", "eps 1e-08", "eps 1e-06"),
        ("group", "weight_decay of group 1 0.0", "weight_decay of group 1 0.5"),
        ("muon", "momentum 0.9", "momentum 0.95"),
        ("8bit", "betas 0.9 0.99", "betas 0.9 0.999"),
        ("fused", "lr 0.1", "lr 0.2"),
        ("scale", "grad_scale 2.0", "grad_scale 4.0"),
    ],
)
def test_optimizers_with_other_settings(fresh: Callable[[int], Ranks], case: str, on_0: str, on_1: str) -> None:
    if case == "scale" and device.TYPE != "cpu":
        pytest.skip("a scale on a device is not read by the host, so ranks do not compare it")
    for text in fresh(2).run(updated_otherwise, case):
        assert f" after an update with {on_0};" in text
        assert f" after an update with {on_1}." in text


def scheduled() -> int:
    """Settings that change alike: no difference, and what is told is what is new."""
    model = fully_shard(layers())
    optimizer = libfsdp.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return 3


def test_settings_that_change_alike(two: Ranks) -> None:
    assert two.run(scheduled) == [3, 3]


def optimizer_of_one_rank() -> None:
    """Of a plain model: it says nothing about the sharded ones, not even about the first that this process has made."""
    model = fully_shard(layers())
    model(torch.ones(2, 16)).sum().backward()
    if dist.get_rank() == 1:
        plain = nn.Linear(2, 2)
        plain(torch.ones(1, 2)).sum().backward()
        libfsdp.optim.SGD(plain.parameters(), lr=0.1).step()
    model(torch.ones(2, 16)).sum().backward()


def test_one_rank_has_an_optimizer_of_its_own(fresh: Callable[[int], Ranks]) -> None:
    fresh(2).run(optimizer_of_one_rank)


def seeded_by_rank(options: dict[str, Any], written: str) -> tuple[str, str]:
    """The warnings of two forwards and a backward, and the error, if there is one; both ranks end with values of one kind."""
    torch.manual_seed(dist.get_rank())
    model: Any = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    if written == "meta":
        model = model.to("meta")
    values = {name: torch.ones(16, 16) for name in ("0.weight", "1.weight")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fully_shard(model, **options)
        except libfsdp.Error as error:
            return "", str(error)
        if written == "load":
            set_model_state_dict(
                model,
                values if dist.get_rank() == 0 else {},
                options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
            )
        elif written == "meta":
            model.to_empty(device="cpu")
            for parameter in model.parameters():
                torch.nn.init.ones_(parameter)
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
    return "\n".join(str(one.message) for one in caught if "began with" in str(one.message)), ""


@pytest.mark.parametrize("placements", ["optim_grads_params", "optim", "no_shard"])
def test_ranks_that_were_seeded_otherwise_are_warned_once(two: Ranks, placements: str) -> None:
    for warned, error in two.run(seeded_by_rank, {"placements": placements}, ""):
        assert error == ""
        assert warned.count("ranks 0 and 1 began with different values of parameter '0.weight' of unit") == 1


@pytest.mark.parametrize("written", ["load", "meta"])
def test_values_that_were_written_since_count_as_the_users(two: Ranks, written: str) -> None:
    assert two.run(seeded_by_rank, {}, written) == [("", "")] * 2


def test_check_initial_values_is_an_error_of_fully_shard(two: Ranks) -> None:
    for warned, error in two.run(seeded_by_rank, {"check_initial_values": True}, "load"):
        assert warned == ""
        assert "check_initial_values" in error
        assert "rank 0 has 'parameter 'weight' with the checksum" in error
    assert two.run(scheduled) == [3, 3]


def one_element() -> str:
    """A difference that only all elements show."""
    model = layers()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[1].weight.view(-1)[3] += 1
    with pytest.raises(libfsdp.Error) as raised:
        fully_shard(model, check_initial_values=True)
    return str(raised.value)


def test_check_initial_values_looks_at_all_elements(two: Ranks) -> None:
    for text in two.run(one_element):
        assert "line 2" in text
