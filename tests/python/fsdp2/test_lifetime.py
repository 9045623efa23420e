"""What a model leaves behind when it goes, what an exception leaves behind, and what changes between steps."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import subprocess
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.errors import FailsInBackward
from support.marks import at_night
from support.ranks import forking_context
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp import fully_shard, register_fsdp_forward_method

# What tensors of one kind have in common.
ALIKE = ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "_version", "placements", "device_mesh")


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    device.join(0, 1, init_method=f"file://{tmp_path}/rendezvous")
    yield
    dist.destroy_process_group()


class MayFail(nn.Module):
    """A layer whose forward raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("told to fail")
        return torch.tanh(self.layer(x))


def model(**options: Any) -> nn.Sequential:
    """Two units and a root without parameters of its own."""
    torch.manual_seed(0)
    sharded = nn.Sequential(MayFail(), MayFail())
    for module in (*sharded, sharded):
        fully_shard(module, **options)
    return sharded


def gradients(sharded: nn.Module) -> list[torch.Tensor]:
    """Of one backward from none."""
    sharded.zero_grad()
    sharded(torch.ones(2, 4)).sum().backward()
    return [p.grad.to_local().clone() for p in sharded.parameters()]


def test_a_model_that_goes_takes_all_along() -> None:
    # An LSTM's parameters are set by its own __setattr__, which keeps them in a list, too.
    sharded = nn.Sequential(nn.Linear(8, 6), nn.LSTM(6, 3))
    fully_shard(sharded[0])
    fully_shard(sharded)
    optimizer = torch.optim.AdamW(sharded.parameters())
    for _ in range(2):
        sharded(torch.randn(5, 8))[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = sharded._get_fsdp_state()
    left = [weakref.ref(thing) for thing in (sharded, state, state.model, state.model.engine, state.unit)]
    del sharded, optimizer, state
    gc.collect()
    assert [reference() for reference in left] == [None] * len(left)


@pytest.mark.parametrize("weak", [True, False])
def test_a_parameter_that_refers_to_its_model(weak: bool) -> None:
    sharded = model()
    for p in sharded.parameters():
        p.owner = weakref.ref(sharded) if weak else sharded
    gradients(sharded)
    left = weakref.ref(sharded)
    del sharded, p
    gc.collect()
    assert (left() is None) == weak  # docs/migrate/from-fsdp2.md


def test_a_forward_that_raised_leaves_nothing() -> None:
    sharded = model()
    expected = gradients(sharded)
    sharded[1].fails = True
    with pytest.raises(ValueError, match="told to fail"):
        sharded(torch.ones(2, 4))
    sharded[1].fails = False
    assert all(map(torch.equal, gradients(sharded), expected))


def test_a_registered_method_that_raised_leaves_nothing() -> None:
    sharded = model()
    expected = gradients(sharded)
    sharded[1].generate = types.MethodType(type(sharded[1]).forward, sharded[1])
    register_fsdp_forward_method(sharded[1], "generate")
    sharded[1].fails = True
    with pytest.raises(ValueError, match="told to fail"):
        sharded[1].generate(torch.ones(2, 4))
    assert all(isinstance(p, DTensor) for p in sharded[1].parameters())
    sharded[1].fails = False
    with torch.no_grad():
        outputs = []
        for factor in (1.0, 2.0, 0.5):
            for parameter in sharded.parameters():
                parameter.mul_(factor)
            outputs.append(sharded(torch.ones(2, 4)))
    assert not torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[2], outputs[0])
    assert all(map(torch.equal, gradients(sharded), expected))


def test_a_backward_that_raised_leaves_nothing() -> None:
    sharded = model()
    expected = gradients(sharded)
    sharded.zero_grad()
    with pytest.raises(RuntimeError, match="told to fail"):
        sharded[1](FailsInBackward.apply(sharded[0](torch.ones(2, 4)))).sum().backward()
    assert all(map(torch.equal, gradients(sharded), expected))


def test_a_gradient_that_is_kept_stays_as_it_is() -> None:
    sharded = model()
    expected = gradients(sharded)
    kept = [p.grad for p in sharded.parameters()]
    sharded.zero_grad()
    sharded(3 * torch.ones(2, 4)).sum().backward()
    assert all(torch.equal(gradient.to_local(), value) for gradient, value in zip(kept, expected, strict=True))


def test_a_module_within_the_root_that_returns_a_view_is_warned_of() -> None:
    sharded = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for module in (sharded[0], sharded):
        fully_shard(module)
    with pytest.warns(UserWarning, match=r"module \(Linear\) returned a view tensor"):
        sharded(torch.ones(4))  # of one dimension, so that the layer returns a view


def test_gradients_of_later_steps_are_made_as_the_first() -> None:
    """Python makes the first one and C++ copies it: they differ in their values alone, and share nothing."""
    sharded = model()
    steps = []
    for step in range(3):
        sharded.zero_grad()
        sharded((step + 1) * torch.ones(2, 4)).sum().backward()
        steps.append([p.grad for p in sharded.parameters()])
    for first, *later in zip(*steps, strict=True):
        for gradient in later:
            assert type(gradient) is DTensor
            assert gradient._spec is first._spec
            assert [getattr(gradient, what) for what in ALIKE] == [getattr(first, what) for what in ALIKE]
            assert gradient.stride() == first.stride()
            assert torch._C._dispatch_keys(gradient) == torch._C._dispatch_keys(first)
            assert gradient.untyped_storage().nbytes() == first.untyped_storage().nbytes()
            assert gradient.untyped_storage()._cdata != first.untyped_storage()._cdata
            assert torch.equal((gradient + gradient).to_local(), 2 * gradient.to_local())
            assert torch.equal(copy.deepcopy(gradient).to_local(), gradient.to_local())
            before = first.to_local().clone()
            gradient.mul_(2)
            assert torch.equal(first.to_local(), before)
    left = weakref.ref(steps[0][0]._local_tensor)
    del steps, first, later, gradient
    assert left() is None


def test_parameters_are_frozen_and_trained_again_between_steps() -> None:
    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device.TYPE)
    sharded[0].weight.requires_grad_(False)
    plain = copy.deepcopy(sharded)
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    for trained in (False, True, False, True):
        for models in (sharded, plain):
            models[0].weight.requires_grad_(trained)
            models[1].bias.requires_grad_(not trained)
            models.zero_grad()
            models(torch.ones(2, 4, device=device.TYPE)).square().sum().backward()
        for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad.to_local(), theirs.grad)
        with torch.no_grad():
            for parameter in (*sharded.parameters(), *plain.parameters()):
                parameter.mul_(0.5)


@pytest.mark.parametrize("own_collectives", [False, True])
def test_groups_end_before_the_interpreter_does(tmp_path: Path, own_collectives: bool) -> None:
    """The model lives until the end. What was registered before libfsdp is called after it."""
    program = f"""
import atexit, os

def print_threads():
    names = [open(f"/proc/self/task/{{thread}}/comm").read().strip() for thread in os.listdir("/proc/self/task")]
    print(names.count("pt_gloo_runloop"), "threads of Gloo")

atexit.register(print_threads)
import torch, torch.distributed as dist
from libfsdp import fully_shard

dist.init_process_group("gloo", init_method="file://{tmp_path}/of_the_program", rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
fully_shard(model[0])
fully_shard(model)
if {own_collectives}:
    model[0].set_custom_all_gather(getattr(dist, "all_gather_single", dist.all_gather_into_tensor))
model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
print_threads()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "2 threads of Gloo\n0 threads of Gloo\n", ended


def test_a_graph_goes_with_its_output() -> None:
    """And not when the garbage collector comes: it holds activations."""
    sharded = model()
    gc.disable()
    try:
        x = torch.ones(2, 4, device=device.TYPE, requires_grad=True) * 2
        left = weakref.ref(x)
        output = sharded(x)
        del x
        assert left() is not None
        del output
        assert left() is None
    finally:
        gc.enable()


def test_a_model_that_is_collected_before_backward() -> None:
    expected = gradients(model())
    sharded = model()
    parameters = list(sharded.parameters())
    loss = sharded(torch.ones(2, 4)).sum()
    left = weakref.ref(sharded)
    del sharded
    gc.collect()
    assert left() is None
    loss.backward()
    assert all(map(torch.equal, (p.grad.to_local() for p in parameters), expected))


def test_a_module_that_stores_its_output_goes() -> None:
    sharded = model()
    sharded[1].output = sharded(torch.ones(2, 4))
    left = weakref.ref(sharded)
    del sharded
    gc.collect()
    assert left() is None


def test_a_hook_that_goes_with_its_model_is_missed() -> None:
    sharded = model()
    sharded[0].set_all_reduce_hook(lambda gradient: None)
    loss = sharded(torch.ones(2, 4)).sum()
    del sharded
    gc.collect()
    with pytest.raises(RuntimeError, match="hook of set_all_reduce_hook; keep the model"):
        loss.backward()


def trained(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    sharded = model(**options)
    optimizer = torch.optim.AdamW(sharded.parameters())
    for _ in range(2):
        sharded(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sharded, optimizer


def use_meshes() -> None:
    world = dist.get_world_size()
    for sizes in ((1, world), (world, 1), (2, world // 2)):
        trained(mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "shard")))


def use_groups_of_its_own() -> None:
    """The default group stays: cached meshes and connections go with the groups that are destroyed."""
    for _ in range(2):
        group = dist.new_group()
        world = dist.get_world_size()
        trained(mesh=DeviceMesh.from_group(group, "cpu"), reshard_after_forward=world // 2 if world > 2 else True)
        dist.destroy_process_group(group)


def save_beside(folder: str) -> None:
    sharded, optimizer = trained()
    for _ in range(2):
        saver = libfsdp.AsyncSaver(sharded, optimizer)
        saver.save(f"{folder}/saved")
        saver.wait()
    libfsdp.load(f"{folder}/saved", sharded, optimizer)


def export() -> None:
    sharded, _ = trained()
    for _ in libfsdp.full_weights(sharded, bucket_bytes=16):
        pass
    stream = iter(libfsdp.full_weights(sharded, bucket_bytes=16))
    next(stream)
    with pytest.raises(libfsdp.Error, match="was left open"):
        sharded(torch.ones(2, 4))
    with libfsdp.local_shards(sharded).reading():
        wanted = [libfsdp.WantedBox("0.layer.weight", torch.empty(4, 4))]
        libfsdp.transfer_plan(sharded, list(range(dist.get_world_size())), wanted=wanted).run()


def check_replays() -> None:
    sharded, optimizer = trained()
    check = libfsdp.ReplayCheck(sharded, every=1)
    check.run(lambda x: sharded(x).sum().backward(), torch.ones(2, 4))
    optimizer.step()
    check.remember_parameters()


def use_custom_collectives() -> None:
    sharded, _ = trained()
    sharded[0].set_custom_all_gather(getattr(dist, "all_gather_single", dist.all_gather_into_tensor))
    sharded(torch.ones(2, 4)).sum().backward()


def fail() -> None:
    sharded, _ = trained()
    sharded[1].fails = True
    with suppress(ValueError):
        sharded(torch.ones(2, 4))
    with suppress(RuntimeError):
        sharded[0](FailsInBackward.apply(torch.ones(2, 4))).sum().backward()
    group = dist.new_group()
    sharded = model(mesh=DeviceMesh.from_group(group, "cpu"))
    with suppress(libfsdp.CommError):
        sharded(torch.ones(2, 4)) if dist.get_rank() == 0 else list(libfsdp.full_weights(sharded))
        raise AssertionError("the ranks have made different calls")
    del sharded
    dist.destroy_process_group(group)


def held(at_most: tuple[int, int] | None = None) -> tuple[int, int, int]:
    """Open files, threads, and bytes in memory; threads that nobody joins get time to end."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    until = time.monotonic() + 10
    while True:
        files, threads = (len(os.listdir(f"/proc/self/{of}")) for of in ("fd", "task"))
        if at_most is None or (files, threads) <= at_most or time.monotonic() > until:
            break
        time.sleep(0.01)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return files, threads, pages * os.sysconf("SC_PAGESIZE")


def cycle(rank: int, world: int, folder: str, count: int) -> list[tuple[int, int, int]]:
    """What this rank holds after each world of ranks, in which it has done everything that makes groups, memory or threads."""
    torch.set_num_threads(1)
    kinds: list[Callable[[], object]] = [trained, use_meshes, use_groups_of_its_own, lambda: save_beside(folder), export]
    kinds += [check_replays, use_custom_collectives, fail]
    found: list[tuple[int, int, int]] = []
    for i in range(count):
        dist.init_process_group("gloo", init_method=f"file://{folder}/world-{i}", rank=rank, world_size=world)
        for use in kinds:
            use()
            dist.barrier()
        dist.destroy_process_group()
        found.append(held(found[1][:2] if i > 1 else None))
    return found


@pytest.mark.parametrize(("world", "count"), [(2, 4), at_night(4, 200)])
def test_process_groups_that_come_and_go_leave_nothing(tmp_path: Path, world: int, count: int) -> None:
    pools = [ProcessPoolExecutor(1, forking_context()) for _ in range(world)]
    runs = [pool.submit(cycle, rank, world, str(tmp_path), count) for rank, pool in enumerate(pools)]
    for run in runs:
        found = run.result(timeout=7200)
        assert [one[:2] for one in found[2:]] == [found[1][:2]] * (count - 2)
        # Torch's own groups leave 20 kB a cycle, and what an allocator keeps comes and goes.
        assert found[-1][2] - found[1][2] < max(4_000_000, count * 100_000)
    for pool in pools:
        pool.shutdown()
