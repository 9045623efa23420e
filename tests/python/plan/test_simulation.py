"""Simulated steps of a plan, and runs that fail. What ranks do one by one is compared in tests/cpp/plan/simulate_test.cpp."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import libfsdp

UNIT = libfsdp.UnitTime(forward_ms=2.0, backward_ms=4.0)


def plan_of(ranks: int = 4, replicas: int = 1, prefetch_depth: int = 1) -> libfsdp.Plan:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    return libfsdp.plan(
        model, libfsdp.PlannedMesh(ranks, replicas=replicas), units=nn.Linear, prefetch_depth=prefetch_depth
    )


def test_step_of_equal_ranks_is_their_computation() -> None:
    plan = plan_of(replicas=2)
    simulation = plan.simulate(units={unit.name: UNIT for unit in plan.units}, update_ms=1.0)
    assert simulation.step_ms == pytest.approx([31.0] * 3)
    assert simulation.average_ms == pytest.approx(31.0)
    assert simulation.compute_ms == pytest.approx(31.0)
    assert simulation.exposed_ms == 0
    assert simulation.exposed_by_unit_ms == {}


def test_waits_are_those_that_prefetch_does_not_hide() -> None:
    exposed = []
    for depth in (0, 1):
        plan = plan_of(prefetch_depth=depth)
        units = {unit.name: UNIT for unit in plan.units}
        simulation = plan.simulate(units=units, links={"shard": libfsdp.LinkRate(latency_us=500)})
        assert sum(simulation.exposed_by_unit_ms.values()) == pytest.approx(simulation.exposed_ms)
        exposed.append(simulation.exposed_ms)
    assert exposed[1] < exposed[0] - 1


def test_bytes_take_time() -> None:
    plan = plan_of()
    sent = plan.links["shard"]["all_gather_bytes"] + plan.links["shard"]["reduce_scatter_bytes"]
    simulation = plan.simulate(links={"shard": libfsdp.LinkRate(bytes_per_s=1e6)}, steps=1)
    # Nothing is computed: gathers follow each other, and so do reductions, which may lie beside gathers.
    assert simulation.average_ms == pytest.approx(1e3 * sent / 1e6, rel=0.5)


def test_slow_rank_and_jitter() -> None:
    plan = plan_of()
    units = {unit.name: UNIT for unit in plan.units}
    assert plan.simulate(units=units, slow_ranks={3: 2.0}).average_ms == pytest.approx(60, rel=0.1)
    drawn = plan.simulate(units=units, jitter=0.3, seed=5)
    assert drawn == plan.simulate(units=units, jitter=0.3, seed=5)
    assert drawn != plan.simulate(units=units, jitter=0.3, seed=6)


def test_bad_input_is_named() -> None:
    plan = plan_of()
    with pytest.raises(libfsdp.Error, match=r"no unit '9'; it has '0', '1'"):
        plan.simulate(units={"9": UNIT})
    with pytest.raises(libfsdp.Error, match=r"no link 'dp'; it has 'shard'"):
        plan.simulate(links={"dp": libfsdp.LinkRate()})
    with pytest.raises(libfsdp.Error, match="there is no rank 4 of 4"):
        plan.simulate(slow_ranks={4: 1.0})
    with pytest.raises(libfsdp.Error, match="forward_ms of unit '0' is nan; give a finite number"):
        plan.simulate(units={"0": libfsdp.UnitTime(forward_ms=math.nan)})
    with pytest.raises(libfsdp.Error, match="no times are given"):
        plan.simulate()


def test_run_that_fails() -> None:
    between = 3 * 3600.0
    interval = libfsdp.best_checkpoint_interval(between, 60.0)
    assert interval == pytest.approx(1100, rel=0.05)  # Young's is 1,138.
    run = libfsdp.simulate_failures(
        between_failures=between, checkpoint=60.0, restart=300.0, interval=interval, training=1000 * between, seed=1
    )
    assert run.seconds == pytest.approx(1000 * between + run.checkpoints + run.lost + run.restarts)
    assert run.fraction == pytest.approx(1000 * between / run.seconds)
    assert run.failures == pytest.approx(run.seconds / between, rel=0.1)
    with pytest.raises(libfsdp.Error, match="must be positive"):
        libfsdp.simulate_failures(between_failures=0, checkpoint=1, restart=1, interval=1, training=1)
