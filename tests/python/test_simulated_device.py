"""Training on the simulated device (tests/device), which checks the order of all that streams do. FSDP_TEST_DEVICE=sim runs it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from support import device
from support.comparison import assert_follows_replica
from support.ranks import ComparedRanks, StartRanks
from support.training import Options, Run, train

from libfsdp import _mesh

pytestmark = pytest.mark.skipif(device.TYPE != "sim", reason="FSDP_TEST_DEVICE is not 'sim'")

bf16, fp32 = torch.bfloat16, torch.float32


def take_reports() -> list[str]:
    """What the device has seen on this rank."""
    torch.accelerator.synchronize()
    reports: list[str] = importlib.import_module("sim_device").take_reports()
    return reports


def train_in_order(case: str, implementation: str, options: Options) -> Run:
    """A run, which must leave no report."""
    run = train(case, implementation, options)
    assert take_reports() == []
    return run


OPTIONS = [
    (1, "transformer", Options()),
    (2, "transformer", Options()),
    (2, "transformer", Options(reshard=False)),
    (2, "transformer", Options(compute=bf16, reduce=fp32)),
    (2, "transformer", Options(compute=bf16)),
    (2, "transformer", Options(clip=0.01)),
    (2, "odd_shapes", Options(microbatches=2, sync="last", mark_last=True)),
    (2, "transformer", Options(offload=True)),
    (4, "transformer", Options(replicas=2)),
]


@pytest.mark.parametrize(("world", "case", "options"), OPTIONS)
def test_libfsdp_trains_as_the_replica_and_in_order(
    ranks: StartRanks, world: int, case: str, options: Options
) -> None:
    assert_follows_replica(case, options, ranks(world).run(train_in_order, case, "libfsdp", options))


@pytest.mark.parametrize("options", [Options(), Options(compute=bf16, reduce=fp32), Options(offload=True)])
def test_fsdp2_is_in_order(compared_ranks: ComparedRanks, options: Options) -> None:
    """The device finds nothing wrong with what has run on GPUs for years."""
    compared_ranks["fsdp2"](2).run(train_in_order, "transformer", "fsdp2", options)


def reports_without_waits(case: str, options: Options) -> list[str]:
    """Of FSDP2, if the computation does not wait for gathers."""
    group = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    copy_out = group.foreach_all_gather_copy_out

    def copy_out_at_once(result: Any, *arguments: Any, **named: Any) -> Any:
        return copy_out(result._replace(all_gather_event=None, all_gather_work=None), *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "foreach_all_gather_copy_out", copy_out_at_once)
        patch.setattr(group.FSDPParamGroup, "_wait_all_gather_streams_on_event", lambda self, event: None)
        train(case, "fsdp2", options)
    return take_reports()


def test_fsdp2_without_waits_is_not(compared_ranks: ComparedRanks) -> None:
    for reports in compared_ranks["fsdp2"](2).run(reports_without_waits, "transformer", Options(steps=1)):
        assert any("read after write" in report for report in reports)


def uses_the_backend() -> bool:
    """Whether the engine calls the group's backend, rather than torch.distributed."""
    from support.training import mesh_of

    return not _mesh.sharding_mesh(mesh_of(1)).collectives


def test_the_engine_calls_backends_that_launch(ranks: StartRanks) -> None:
    assert all(ranks(2).run(uses_the_backend))
