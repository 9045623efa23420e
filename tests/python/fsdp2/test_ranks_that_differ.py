"""Ranks that have other parameters, settings or histories: one clear error on all of them, or none where there is no difference."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.errors import raises
from support.marks import on_ranks
from support.ranks import LIMIT
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import libfsdp
from libfsdp import GradCommFormat, fully_shard
from libfsdp._comm.mesh import timeout_of


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


def refuses_forward(model: Any, *parts: str) -> None:
    """Expects an error of a forward, with these parts."""
    with raises(libfsdp.Error, *parts):
        model(torch.ones(2, 16))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("placements", ["optim_grads_params", "optim", "no_shard"])
@on_ranks(2)
def test_a_parameter_that_is_frozen_on_one_rank(placements: str, grad: bool) -> None:
    model = layers()
    model[dist.get_rank()].weight.requires_grad_(False)
    fully_shard(model, placements=placements)
    run: Callable[[], Any] = functools.partial(model, torch.ones(2, 16))
    if placements == "no_shard":
        if not grad:
            return  # Nothing is exchanged.
        run = run().sum().backward
    frozen = "rank 0 has 'unit 'Sequential': parameter '0.weight' [16, 16] Float, frozen"
    with raises(RuntimeError, frozen, "rank 1 has"), torch.set_grad_enabled(grad):
        run()


@on_ranks(2)
def test_parameters_in_another_order() -> None:
    refuses_forward(fully_shard(Swapped(swapped=dist.get_rank() == 1)), "parameter 'a'", "parameter 'b'")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("main_params_dtype", {"main_params_dtype": torch.float64}),
        ("reduce_dtype", {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}),
        ("param_dtype", {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
        ("output_dtype", {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.bfloat16)}),
        ("reshard_after_forward", {"reshard_after_forward": True}),
        ("keep_gathered_bytes", {"keep_gathered_bytes": 100}),
        ("memory_budget", {"memory_budget": 1 << 30}),
        ("report_nan_in_param_grad", {"report_nan_in_param_grad": True}),
        ("placements", {"placements": "optim"}),
        ("gradients in 8 bits per element, in blocks of 128", {"grad_comm_format": GradCommFormat()}),
    ],
)
@on_ranks(2)
def test_options_that_differ(name: str, options: dict[str, Any]) -> None:
    model = fully_shard(layers(), **({} if dist.get_rank() == 0 else options))
    refuses_forward(model, "rank 0 and rank 1 differ", name)


@on_ranks(2, fresh=True)
def test_models_that_other_ranks_have_not_had() -> None:
    """Rank 0 alone has had a model of its own, on a mesh of itself; and one that it never used, on all."""
    alone = dist.new_group([0])
    assert alone is not None
    if dist.get_rank() == 0:
        own = fully_shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(alone, "cpu"))
        own(torch.ones(2, 4)).sum().backward()
        fully_shard(nn.Linear(4, 4))
    expected = layers()(torch.ones(2, 16)).sum()
    for model in [fully_shard(layers()) for _ in range(2)]:
        loss = model(torch.ones(2, 16)).sum()
        loss.backward()
        assert loss.item() == pytest.approx(expected.item())


@on_ranks(2)
def test_a_replica_computes_alone() -> None:
    """Where forward gathers nothing, one rank may compute it alone, before others have formed the model."""
    model = fully_shard(layers(), placements="no_shard")
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(2, 16))
    model(torch.ones(2, 16)).sum().backward()
    gradients = [torch.empty(16, 16) for _ in range(2)]
    dist.all_gather(gradients, model[0].weight.grad)
    assert torch.equal(*gradients)


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
@on_ranks(2, fresh=True)
def test_setters_on_one_rank(setter: str, on_0: str, on_1: str) -> None:
    model = fully_shard(layers())
    model(torch.ones(2, 16)).sum().backward()
    if dist.get_rank() == 1:
        on = setter in ("set_manual_backward_finalization", "set_reshard_after_forward")
        argument: Any = 4.0 if setter == "set_gradient_divide_factor" else on
        getattr(model, setter)(argument)
    refuses_forward(model, "the ranks make different calls: rank 0: ", on_0, on_1)


@contextmanager
def raises_soon(*parts: str) -> Iterator[None]:
    """As raises, for an error that comes before a time-out ends the call."""
    begin = time.monotonic()
    with raises(libfsdp.Error, *parts):
        yield
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(("first", "second"), [((4,), (2, 2)), ((1, 4), (4, 1))])
@on_ranks(4, fresh=True)
def test_meshes_of_other_dimensions(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    """All ranks make both meshes, as torch demands; the last one gives fully_shard the second."""
    meshes = [
        init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :]) for sizes in (first, second)
    ]
    with raises_soon("rank 0 and rank 3 have meshes of other dimensions", "[["):
        fully_shard(layers(), mesh=meshes[dist.get_rank() == dist.get_world_size() - 1])


@pytest.mark.parametrize(("on_0", "on_others"), [(2, True), (True, 2)])
@on_ranks(4, fresh=True)
def test_numbers_of_reshard_after_forward(on_0: bool | int, on_others: bool | int) -> None:
    with raises_soon("reshard_after_forward=2", "agreement on a model"):
        fully_shard(layers(), reshard_after_forward=on_0 if dist.get_rank() == 0 else on_others)(torch.ones(2, 16))


@on_ranks(2, fresh=True)
def test_a_group_that_one_rank_alone_asks_for() -> None:
    model = fully_shard(layers())
    forward = functools.partial(model, torch.ones(2, 16))
    with raises_soon("separate_reduce_scatter_group true"):
        (forward if dist.get_rank() == 0 else model.set_separate_reduce_scatter_group)()


@on_ranks(2, fresh=True)
def test_the_time_out_of_the_default_group_is_each_groups() -> None:
    """Groups of a mesh have it, and a group that was made with a time-out of its own keeps that."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    own = dist.new_group(timeout=timedelta(seconds=7))
    assert isinstance(own, dist.ProcessGroup)
    groups = [mesh.get_group(0), mesh.get_group(1), dist.group.WORLD, own]
    seconds = [timeout_of(group, torch.device("cpu")) for group in groups if group is not None]
    assert seconds == [LIMIT, LIMIT, LIMIT, 7]


@on_ranks(4, fresh=True)
def test_hsdps_groups_wait_as_long_as_the_default_group() -> None:
    """The last of four ranks does not come: its row of HSDP waits as long as init_process_group says."""
    set_timeout: Any = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # Torch 2.15 has the first.
    set_timeout(timedelta(seconds=3), dist.distributed_c10d._get_default_group())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model: Any = fully_shard(layers(), mesh=mesh)
    model(torch.ones(2, 16)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 3:
        time.sleep(8)
    elif dist.get_rank() == 2:
        with raises(libfsdp.CommError, "Timed out waiting 3000ms"):
            model(torch.ones(2, 16))


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
@on_ranks(2, fresh=True)
def test_optimizers_with_other_settings(case: str, on_0: str, on_1: str) -> None:
    if case == "scale" and device.TYPE != "cpu":
        return  # A scale on a device is not read by the host, so ranks do not compare it.
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
    refuses_forward(model, f" after an update with {on_0};", f" after an update with {on_1}.")


@on_ranks(2)
def test_settings_that_change_alike() -> None:
    """No difference, and what is told is what is new."""
    model = fully_shard(layers())
    optimizer = libfsdp.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@on_ranks(2, fresh=True)
def test_one_rank_has_an_optimizer_of_its_own() -> None:
    """Of a plain model: it says nothing about the sharded ones, not even about the first that this process has made."""
    model = fully_shard(layers())
    model(torch.ones(2, 16)).sum().backward()
    if dist.get_rank() == 1:
        plain = nn.Linear(2, 2)
        plain(torch.ones(1, 2)).sum().backward()
        libfsdp.optim.SGD(plain.parameters(), lr=0.1).step()
    model(torch.ones(2, 16)).sum().backward()


def warnings_of_ranks_that_were_seeded_otherwise(options: dict[str, Any], written: str) -> str:
    """Returns the warnings of two forwards and backwards. Both ranks end with values of one kind."""
    torch.manual_seed(dist.get_rank())
    model: Any = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    if written == "meta":
        model = model.to("meta")
    values = {name: torch.ones(16, 16) for name in ("0.weight", "1.weight")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(model, **options)
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
    return "\n".join(str(one.message) for one in caught if "began with" in str(one.message))


@pytest.mark.parametrize("placements", ["optim_grads_params", "optim", "no_shard"])
@on_ranks(2)
def test_ranks_that_were_seeded_otherwise_are_warned_once(placements: str) -> None:
    warned = warnings_of_ranks_that_were_seeded_otherwise({"placements": placements}, "")
    assert warned.count("ranks 0 and 1 began with different values of parameter '0.weight' of unit") == 1


@pytest.mark.parametrize("written", ["load", "meta"])
@on_ranks(2)
def test_values_that_were_written_since_count_as_the_users(written: str) -> None:
    assert warnings_of_ranks_that_were_seeded_otherwise({}, written) == ""


@on_ranks(2)
def test_check_initial_values_is_an_error_of_fully_shard() -> None:
    with raises(libfsdp.Error, "check_initial_values", "rank 0 has 'parameter 'weight' with the checksum"):
        warnings_of_ranks_that_were_seeded_otherwise({"check_initial_values": True}, "load")
    fully_shard(layers())(torch.ones(2, 16)).sum().backward()  # The ranks go on.


@on_ranks(2)
def test_check_initial_values_looks_at_all_elements() -> None:
    """Only a checksum of all elements shows this difference."""
    model = layers()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[1].weight.view(-1)[3] += 1
    with raises(libfsdp.Error, "line 2"):
        fully_shard(model, check_initial_values=True)
