"""Whole steps as graphs of the simulated device: what is replayed has the bits of steps that are not captured."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device, megatron
from support.device import take_reports
from support.marks import on_ranks
from support.states import assert_equal
from support.training import CASES, Options, batch_of, full, sharded
from torch import Tensor

import libfsdp
from libfsdp.megatron import fully_shard_optimizer

pytestmark = [
    pytest.mark.skipif(device.TYPE != "sim", reason="FSDP_TEST_DEVICE is not 'sim'"),
    pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch has no graphs of any device"),
]

bf16, fp32 = torch.bfloat16, torch.float32
WARM_UP, REPLAYED = 3, 3


def steps_of(
    step: Callable[[], Tensor],
    set_input: Callable[[int], None],
    captured: bool,
    held: list[Any] | None = None,
    evaluate: Callable[[], float] | None = None,
) -> list[float]:
    """What `step` gives behind a warm-up, on the inputs of its number: run each time, or captured and replayed.

    If `evaluate` is given, it runs behind the warm-up and behind each step.
    """
    module: Any = torch.get_device_module("sim")
    sim: Any = importlib.import_module("sim_device")
    set_input(0)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        for _ in range(WARM_UP):
            result = step()
    module.current_stream().wait_stream(stream)
    values = [evaluate()] if evaluate is not None else []
    if captured:
        graph: Any = torch.accelerator.Graph()
        with module.stream(stream), graph:
            result = step()
        if held is not None:
            held.append(graph)
    for number in range(1, REPLAYED + 1):
        set_input(number)
        if captured:
            sim.reset_stats(dist.get_rank())
            graph.replay()
            assert not sim.host_waits(dist.get_rank())
        else:
            result = step()
        values.extend(result.flatten().tolist())
        if evaluate is not None:
            values.append(evaluate())
    return values


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01, capturable=True)


def fused(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True, capturable=True)


def in_cpp(parameters: Any) -> Any:
    return libfsdp.optim.AdamW(parameters, lr=0.01, fused=True)


def run(
    implementation: str, options: Options, optimizer_of: Callable[[Any], Any], scaled: bool, captured: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms, an evaluation, and parameters behind one more step that is no graph's."""
    case = CASES["transformer"]
    model = sharded("transformer", options, implementation)
    optimizer = optimizer_of(model.parameters())
    scaler = torch.amp.GradScaler("sim", init_scale=256.0, growth_interval=2, enabled=scaled)
    batch = batch_of(case, 0, 0, dist.get_rank())
    clip = libfsdp.clip_grad_norm_ if implementation == "libfsdp" else torch.nn.utils.clip_grad_norm_

    def set_input(step: int) -> None:
        for into, values in zip(batch, batch_of(case, step, 0, dist.get_rank()), strict=True):
            into.copy_(values)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        scaler.scale(loss).backward()
        results = [loss.detach()]
        if options.clip is not None:
            scaler.unscale_(optimizer)
            norm = clip(model.parameters(), options.clip)
            results.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        scaler.step(optimizer)
        scaler.update()
        return torch.stack([result.float() for result in results])

    def evaluate() -> float:
        with torch.no_grad():
            return case.loss(model, batch).item()

    held: list[Any] = []
    # Parameters that stay gathered after an evaluation are the ones that a graph would use.
    values = steps_of(step, set_input, captured, held, evaluate if options.reshard is False else None)
    values.append(evaluate())
    values.extend(step().tolist())
    values.append(scaler.get_scale() if scaled else 1.0)
    assert take_reports() == []
    return values, {name: full(p) for name, p in model.named_parameters()}


CASES_OF_STEPS = [
    (1, Options(), adamw, False),
    (2, Options(), adamw, False),
    (2, Options(compute=bf16, reduce=fp32), fused, False),
    (2, Options(compute=bf16), in_cpp, False),
    (2, Options(reshard=False, clip=0.01), in_cpp, False),
    (2, Options(clip=0.01), fused, True),
    (4, Options(replicas=2), adamw, False),
]


@pytest.mark.parametrize(("world", "options", "optimizer_of", "scaled"), CASES_OF_STEPS)
@on_ranks("world")
def test_replayed_steps(options: Options, optimizer_of: Callable[[Any], Any], scaled: bool) -> None:
    assert_equal(*(run("libfsdp", options, optimizer_of, scaled, captured) for captured in (True, False)))


@on_ranks(2)
def test_counts_on_the_host_are_refused() -> None:
    case = CASES["mlp"]
    model = sharded("mlp")
    optimizer = libfsdp.optim.AdamW(model.parameters())
    batch = batch_of(case, 0, 0, dist.get_rank())

    def step() -> Tensor:
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with pytest.raises(libfsdp.Error, match="a step that counts updates on the host in a step that is captured"):
        steps_of(step, lambda number: None, captured=True)
    assert take_reports() == []


def run_megatron(strategy: str, captured: bool) -> tuple[list[float], dict[str, Tensor]]:
    """With Megatron-FSDP's cuda_graph_mode."""
    model = megatron.shard(megatron.plain_model(), strategy, cuda_graph_mode=True)
    optimizer: Any = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True))
    x = megatron.batch(0, dist.get_rank())

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach().reshape(1)

    held: list[Any] = []
    values = steps_of(step, lambda number: x.copy_(megatron.batch(number, dist.get_rank())), captured, held)
    values.extend(step().tolist())
    assert take_reports() == []
    return values, {name: megatron.whole(p.detach()).cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("strategy", megatron.STRATEGIES)
@on_ranks(2)
def test_cuda_graph_mode(strategy: str) -> None:
    assert_equal(*(run_megatron(strategy, captured) for captured in (True, False)))


@pytest.mark.parametrize("options", [Options(), Options(compute=bf16), Options(reshard=False)])
@on_ranks(2)
def test_addresses_stay_behind_the_third_step(options: Options) -> None:
    """Each unit computes with parameters at the same addresses."""
    case = CASES["transformer"]
    model = sharded("transformer", options)
    optimizer = fused(model.parameters())
    of_steps: list[list[int]] = []

    def note(unit: Any, arguments: Any) -> None:
        of_steps[-1].extend(p.data_ptr() for p in unit.parameters())

    for unit in case.units(model):
        unit.register_forward_pre_hook(note)
    for step in range(6):
        of_steps.append([])
        case.loss(model, batch_of(case, step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert of_steps[3]
    assert of_steps[4:] == [of_steps[3]] * 2
