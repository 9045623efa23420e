"""Training on the simulated device (tests/device), which checks the order of all that streams do. FSDP_TEST_DEVICE=sim runs it."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device, megatron
from support.comparison import assert_follows_replica, differences
from support.device import take_reports
from support.errors import FailsInBackward, raises
from support.marks import on_ranks
from support.ranks import ComparedRanks, StartRanks, run_both
from support.states import assert_equal
from support.training import CASES, DEFAULT, Options, Run, api, batch_of, full, make_optimizer, mesh_of, sharded, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import libfsdp
from libfsdp._comm import mesh as mesh_module
from libfsdp.megatron import fully_shard_optimizer

pytestmark = pytest.mark.skipif(device.TYPE != "sim", reason="FSDP_TEST_DEVICE is not 'sim'")

bf16, fp32 = torch.bfloat16, torch.float32


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
def test_libfsdp_trains_as_the_replica_and_in_order(ranks: StartRanks, world: int, case: str, options: Options) -> None:
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
        patch.setattr(group.FSDPParamGroup, "_wait_all_gather_streams_on_event", lambda self, event: None, raising=False)
        context: Any = group.FSDPCommContext  # where torch 2.15 has it
        patch.setattr(context, "wait_all_gather_streams_on_event", lambda self, event: None, raising=False)
        train(case, "fsdp2", options)
    return take_reports()


def test_fsdp2_without_waits_is_not(compared_ranks: ComparedRanks) -> None:
    for reports in compared_ranks["fsdp2"](2).run(reports_without_waits, "transformer", Options(steps=1)):
        assert any("read after write" in report for report in reports)


@on_ranks(2)
def test_the_engine_calls_backends_that_launch() -> None:
    """The engine calls the group's backend, rather than torch.distributed."""
    assert not mesh_module.sharding_mesh(mesh_of(1)).collectives


class Trainee:
    """A sharded Transformer, and its steps."""

    def __init__(self, implementation: str, options: Options = DEFAULT) -> None:
        self.case = CASES["transformer"]
        self.model = sharded("transformer", options, implementation)
        self.units: list[Any] = self.case.units(self.model)
        self.optimizer = make_optimizer(options, self.model.parameters())

    def loss(self, step: int) -> Tensor:
        return self.case.loss(self.model, batch_of(self.case, step, 0, dist.get_rank()))

    def train_step(self, step: int) -> float:
        loss = self.loss(step)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def parameters(self) -> dict[str, Tensor]:
        return {name: full(p) for name, p in self.model.named_parameters()}


def train_scaled(implementation: str, fused: bool) -> tuple[list[float], dict[str, Tensor]]:
    """By a GradScaler; gradients of the second step overflow on one rank. A fused step looks itself for what the scaler has found."""
    trainee = Trainee(implementation)
    if fused:
        optimizer: Any = (torch if implementation == "fsdp2" else libfsdp).optim.AdamW
        trainee.optimizer = optimizer(trainee.model.parameters(), lr=0.01, fused=True)
    sim: Any = importlib.import_module("sim_device")
    scaler = torch.amp.GradScaler("sim", init_scale=1024.0)
    scales = []
    for step in range(3):
        loss = trainee.loss(step) * (float("inf") if step == 1 and dist.get_rank() == 0 else 1.0)
        scaler.scale(loss).backward()
        sim.reset_stats(dist.get_rank())
        scaler.step(trainee.optimizer)
        assert not fused or not sim.host_waits(dist.get_rank())
        scaler.update()
        trainee.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert take_reports() == []
    return scales, trainee.parameters()


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_scaled_losses(fused: bool) -> None:
    ours, theirs = (train_scaled(implementation, fused) for implementation in ("libfsdp", "fsdp2"))
    assert ours[0] == [1024.0, 512.0, 512.0]
    assert_equal(ours, theirs)


def save_beside(options: Options, folder: Path | None) -> tuple[list[float], dict[str, Tensor]]:
    """Steps, of which some are saved while the next ones train; losses, parameters, and those that the saves have to have."""
    trainee = Trainee("libfsdp", options)
    saver = libfsdp.AsyncSaver(trainee.model, trainee.optimizer)
    losses, saved = [], []
    for step in range(6):
        losses.append(trainee.train_step(step))
        if folder is not None and step % 2 == 1:
            saved.append(trainee.parameters())
            # The next step changes what the thread writes. The second save waits for the first one, and takes its memory again.
            saver.save(f"{folder}/step-{step}", {"step": step})
    saver.wait()
    assert take_reports() == []
    for number, expected in enumerate(saved):
        other = Trainee("libfsdp", options)
        extra = libfsdp.load(f"{folder}/step-{2 * number + 1}", other.model, other.optimizer).extra
        assert extra == {"step": 2 * number + 1}
        assert not (text := differences("saved", other.parameters(), expected, {})), text
        if number == 1:  # its optimizer goes on as the saved one did
            assert [other.train_step(step) for step in (4, 5)] == losses[4:]
        assert take_reports() == []
    return losses, trainee.parameters()


@pytest.mark.parametrize(
    "options", [Options(), Options(compute=bf16, reduce=fp32), Options(offload=True), Options(reshard=False)]
)
@on_ranks(2)
def test_saves_beside_training(options: Options, tmp_path: Path) -> None:
    """Losses and parameters are those of a run that saves nothing; a checkpoint has what there was at the call."""
    without = save_beside(options, None)
    assert_equal(save_beside(options, tmp_path), without)


def train_scaled_by_sgd(implementation: str, overflows_at: int, dampening: float) -> dict[str, Tensor]:
    """Gradients of one step overflow on one rank. The host need not wait to know, but where a first momentum would be damped."""
    trainee = Trainee(implementation)
    make: Any = (torch if implementation == "fsdp2" else libfsdp).optim.SGD
    trainee.optimizer = make(trainee.model.parameters(), lr=0.1, momentum=0.9, dampening=dampening)
    sim: Any = importlib.import_module("sim_device")
    scaler = torch.amp.GradScaler("sim", init_scale=1024.0)
    for step in range(3):
        loss = trainee.loss(step) * (float("inf") if step == overflows_at and dist.get_rank() == 0 else 1.0)
        scaler.scale(loss).backward()
        sim.reset_stats(dist.get_rank())
        scaler.step(trainee.optimizer)
        has_momentum = step > (1 if overflows_at == 0 else 0)
        if implementation == "libfsdp":
            assert sum(sim.host_waits(dist.get_rank()).values()) == (1 if dampening and not has_momentum else 0)
        scaler.update()
        trainee.optimizer.zero_grad()
    assert take_reports() == []
    return trainee.parameters()


@pytest.mark.parametrize(("overflows_at", "dampening"), [(0, 0.0), (1, 0.0), (0, 0.5), (1, 0.5)])
@on_ranks(2)
def test_scaled_losses_of_sgd(overflows_at: int, dampening: float) -> None:
    ours, theirs = (train_scaled_by_sgd(name, overflows_at, dampening) for name in ("libfsdp", "fsdp2"))
    torch.testing.assert_close(ours, theirs)


STEPPED_BY: dict[str, Any] = {
    "torch.optim.AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "torch.optim.SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": lambda parameters: libfsdp.optim.AdamW(parameters, lr=0.01),
    "AdamW fused": lambda parameters: libfsdp.optim.AdamW(parameters, lr=0.01, fused=True),
    "AdamW8bit": lambda parameters: libfsdp.optim.AdamW8bit(parameters, lr=0.01),
    "SGD": lambda parameters: libfsdp.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


def host_waits_of_a_step(name: str, options: Options, scaled: bool) -> dict[str, int]:
    """The third step: forward, backward, clipping, update, zero_grad."""
    trainee = Trainee("libfsdp", options)
    trainee.optimizer = STEPPED_BY[name](trainee.model.parameters())
    sim: Any = importlib.import_module("sim_device")
    scaler = torch.amp.GradScaler("sim", init_scale=1024.0, enabled=scaled)
    for step in range(3):
        batch = batch_of(trainee.case, step, 0, dist.get_rank())
        torch.accelerator.synchronize()
        sim.reset_stats(dist.get_rank())
        scaler.scale(trainee.case.loss(trainee.model, batch)).backward()
        scaler.unscale_(trainee.optimizer)
        libfsdp.clip_grad_norm_(trainee.model.parameters(), 1.0)
        scaler.step(trainee.optimizer)
        scaler.update()
        trainee.optimizer.zero_grad()
    waits = dict(sim.host_waits(dist.get_rank()))
    assert take_reports() == []
    return waits


@pytest.mark.parametrize("compute", [None, bf16])
@pytest.mark.parametrize(
    ("name", "scaled"), [*((name, False) for name in STEPPED_BY), ("AdamW fused", True), ("SGD", True)]
)
@on_ranks(2)
def test_the_host_waits_for_nothing_in_a_step(name: str, scaled: bool, compute: Any) -> None:
    assert host_waits_of_a_step(name, Options(compute=compute, reduce=fp32), scaled) == {}


@on_ranks(2)
def test_the_host_waits_once_for_what_is_offloaded() -> None:
    """For the gradients. A norm of what is on the host is another wait: ranks tell each other theirs by the device."""
    waits = host_waits_of_a_step("AdamW", Options(offload=True), scaled=False)
    assert waits == {"stream.synchronize": 1, "blocking copy to the host": 1}


class Picks(nn.Module):
    """Units of equal sizes, of which a forward takes some."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, picked: list[int]) -> Tensor:
        for k in picked:
            x = torch.tanh(self.units[k](x))
        return x


@pytest.mark.parametrize("world", [2, 4])
@on_ranks("world", fresh=True)
def test_ranks_that_diverge_get_one_error() -> None:
    """In the third step, rank 1 takes another unit than the others, which the device does not notice."""
    model: Any = Picks().to(device.TYPE)
    for unit in (*model.units, model):
        libfsdp.fully_shard(unit, mesh=mesh_of(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 8).to(device.TYPE)
    for _ in range(2):
        model(x, [0, 1]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with raises(libfsdp.CommError, "the ranks make different calls", "all-gather of unit 'units.2'"):
        model(x, [0, 2 if dist.get_rank() == 1 else 1]).sum().backward()
    assert all(unit.weight.grad is None for unit in model.units)


def fail_in_forward(module: nn.Module, arguments: Any) -> None:
    raise RuntimeError("told to fail")


def train_after_failures(implementation: str, fails: tuple[str, ...]) -> list[float]:
    """Steps, of which the second one fails first, in these places."""
    trainee = Trainee(implementation)
    losses = [trainee.train_step(0)]
    for place in fails:
        if place == "forward":
            hook = trainee.units[1].register_forward_pre_hook(fail_in_forward)
        else:
            hook = trainee.units[1].register_forward_hook(lambda module, arguments, y: FailsInBackward.apply(y))
        with pytest.raises(RuntimeError, match="told to fail"):
            trainee.loss(1).backward()
        hook.remove()
        trainee.optimizer.zero_grad()
        assert take_reports() == []
    losses += [trainee.train_step(step) for step in (1, 2)]
    assert take_reports() == []
    return losses


@on_ranks(2)
def test_exceptions() -> None:
    expected = train_after_failures("libfsdp", ())
    assert train_after_failures("libfsdp", ("forward", "backward", "forward")) == expected


def train_with_a_side_stream(implementation: str, observes: bool) -> tuple[list[float], list[float]]:
    """Hooks compute norms of weights and of outputs beside the model, for which its stream waits before memory is given back."""
    trainee = Trainee(implementation)
    module: Any = torch.get_device_module("sim")
    side = module.Stream()
    norms: list[Tensor] = []

    def observe(unit: nn.Module, arguments: Any, output: Tensor) -> None:
        current = module.current_stream()
        side.wait_stream(current)
        with module.stream(side), torch.no_grad():
            norms.extend(p.norm() for p in unit.parameters())
            norms.append(output.norm())
        output.record_stream(side)
        current.wait_stream(side)

    if observes:
        for unit in trainee.units:
            unit.register_forward_hook(observe)
    losses = [trainee.train_step(step) for step in range(3)]
    module.synchronize()
    assert take_reports() == []
    return losses, [norm.item() for norm in norms]


@on_ranks(2)
def test_hooks_with_a_side_stream() -> None:
    expected_losses, _ = train_with_a_side_stream("libfsdp", observes=False)
    losses, norms = train_with_a_side_stream("libfsdp", observes=True)
    assert losses == expected_losses
    assert norms == train_with_a_side_stream("fsdp2", observes=True)[1]


def unshard_before(implementation: str, compute: torch.dtype | None) -> tuple[list[float], dict[str, Tensor]]:
    """The user gathers each unit before the forward, and waits for some; then exports the model to the host."""
    trainee = Trainee(implementation, Options(compute=compute))
    losses = []
    for step in range(3):
        for number, unit in enumerate(trainee.units):
            handle = unit.unshard(async_op=True)
            if number % 2 == 1:
                handle.wait()
        losses.append(trainee.train_step(step))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    exported = get_model_state_dict(trainee.model, options=options)
    assert take_reports() == []
    if dist.get_rank() == 0:
        assert not (text := differences("exported", exported, trainee.parameters(), {})), text
    else:
        trainee.parameters()
    return losses, trainee.parameters()


@pytest.mark.parametrize("compute", [None, bf16])
@on_ranks(2)
def test_unshard_and_export(compute: torch.dtype | None) -> None:
    assert_equal(*(unshard_before(implementation, compute) for implementation in ("libfsdp", "fsdp2")))


@pytest.mark.parametrize("strategy", megatron.STRATEGIES)
@on_ranks(2)
def test_megatron(strategy: str) -> None:
    """Losses and parameters are those of a model without sharding."""
    plain = megatron.plain_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    model = megatron.shard(megatron.plain_model(), strategy)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(3):
        x = megatron.batch(step, dist.get_rank())
        loss = model(x).square().mean()
        torch.testing.assert_close(loss, plain(x).square().mean(), rtol=1e-5, atol=1e-6)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        megatron.set_mean_gradients(plain, [step])
        plain_optimizer.step()
    megatron.assert_same_parameters(model, plain)
    assert take_reports() == []


@pytest.mark.parametrize("compute", [None, bf16])
@on_ranks(2)
def test_rounded_gradients(compute: torch.dtype | None) -> None:
    """They are the same in each run, and near those that are not rounded. (tests/cpp/device has the bits of CPUs.)"""

    def gradients(form: libfsdp.GradCommFormat | None) -> tuple[list[Tensor], int]:
        torch.manual_seed(1)
        model: Any = nn.Linear(400, 30).to(device.TYPE)
        policy = libfsdp.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute)
        libfsdp.fully_shard(model, mesh=mesh_of(1), mp_policy=policy, grad_comm_format=form)
        sums = []
        before = 0
        for step in range(3):
            if step == 2:
                before = libfsdp.wire_stats(model)["reduce_scatter_bytes"]
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(8, 400, generator=generator).to(device.TYPE)).square().sum().backward()
            sums += [full(parameter.grad).cpu() for parameter in model.parameters()]
            model.zero_grad()
        return sums, libfsdp.wire_stats(model)["reduce_scatter_bytes"] - before

    form = libfsdp.GradCommFormat(bits=8, hadamard=True, stochastic_rounding=True, error_feedback=True)
    (rounded, sent), (again, _), (exact, sent_exactly) = (gradients(one) for one in (form, form, None))
    assert all(map(torch.equal, rounded, again))
    assert not any(map(torch.equal, rounded, exact))
    for one, other in zip(rounded, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.05 * other.abs().max().item())
    # A shard of the weight has 46 blocks of 128 elements, and one of 112 that takes as much; that of the bias has 15, in 16.
    assert sent == 47 * 132 + 20
    assert sent_exactly == 6015 * (2 if compute else 4)
    assert take_reports() == []


@on_ranks(2)
def test_gradients_on_the_host_keep_their_memory() -> None:
    """Those that somebody still has are not written over, and else their memory serves again: pinning it takes long."""
    model: Any = nn.Linear(8, 8).to(device.TYPE)
    libfsdp.fully_shard(model, mesh=mesh_of(1), offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    addresses, kept = [], []
    for step in range(4):
        model(torch.full((2, 8), step + 1.0).to(device.TYPE)).sum().backward()
        gradient = model.weight.grad.to_local()
        assert gradient.device.type == "cpu"
        addresses.append(gradient.data_ptr())
        if step == 2:
            kept += [gradient, gradient.clone()]
        del gradient
        optimizer.step()
        optimizer.zero_grad()
    assert addresses[0] == addresses[1] == addresses[2] != addresses[3]
    assert torch.equal(kept[0], kept[1])
    assert take_reports() == []


def peaks(implementation: str) -> tuple[int, int]:
    """Bytes of the device between steps and at the peak of a step, of a model with many logits."""
    sim: Any = importlib.import_module("sim_device")
    gc.collect()
    before = sim.memory(dist.get_rank())["allocated"]
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model: Any = nn.Sequential(nn.Embedding(1000, 64), *blocks, nn.Linear(64, 1000)).to(device.TYPE)
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)
    for unit in (*model[1:-1], model):
        api(implementation).fully_shard(unit, mesh=mesh_of(1), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(256).view(4, 64).to(device.TYPE)
    for _ in range(4):
        torch.accelerator.synchronize()
        sim.reset_stats(dist.get_rank())
        model(tokens).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    now = sim.memory(dist.get_rank())
    return now["allocated"] - before, now["peak"] - before


def test_no_more_memory_than_fsdp2(compared_ranks: ComparedRanks) -> None:
    for mine, other in zip(*run_both(compared_ranks, 2, peaks), strict=True):
        assert mine[0] <= 1.005 * other[0], "between steps there are main parameters and what the optimizer has"
        assert mine[1] <= 1.01 * other[1]


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the table is of what FSDP2 launches in torch 2.13"
)
def test_a_step_launches_what_the_documents_say() -> None:
    """docs/run/gpu.md has the table of kernels, waits and simulated time as it is counted."""
    root = Path(__file__).parents[3]
    counted = subprocess.run(
        (sys.executable, root / "tests" / "device" / "python" / "counts.py"), capture_output=True, text=True, check=True
    )
    rows = [line for line in counted.stdout.splitlines() if line.startswith(("| FSDP2", "| libfsdp"))]
    assert len(rows) == 4
    documented = (root / "docs" / "run" / "gpu.md").read_text(encoding="utf-8")
    assert [row for row in rows if row not in documented] == []
