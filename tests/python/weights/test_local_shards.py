"""Shards by address: the boxes of all ranks are the whole tensors, addresses stay or a generation tells, and writers wait for readers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device
from support.boxes import reassembled
from support.extended import EightBits
from support.marks import at_night, on_ranks
from support.strategies import a_step, every_strategy
from support.training import CASES, Options, batch_of, full, make_optimizer, sharded
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import libfsdp

BF16 = torch.bfloat16


def expected_of(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, put together by torch."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: full(value).cpu() for name, value in model.state_dict().items() if name in names}


def assert_whole(model: nn.Module) -> None:
    found, expected = reassembled(model), expected_of(model)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("size", [at_night(2), 4])
@on_ranks("size")
def test_all_boxes_are_the_state_dict() -> None:
    for name in ("tied", "nested", "odd_shapes"):
        for options in (Options(), Options(offload=True)):
            model = sharded(name, options)
            assert_whole(model)  # before the first forward
            a_step(model, name, 0, make_optimizer(options, model.parameters()))
            assert_whole(model)


@pytest.mark.parametrize("size", [at_night(2), 4])
@on_ranks("size")
def test_every_strategy() -> None:
    for model, _, kind in every_strategy():
        assert_whole(model)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        dtypes = {one.dtype for one in libfsdp.local_shards(model) if one.name in trained}
        assert dtypes == {torch.float64 if "main_params_dtype" in kind else torch.float32}
        if kind.get("placements") == "no_shard" or "ignored_params" in kind:
            assert any(one.sizes == one.shape for one in libfsdp.local_shards(model))


@on_ranks(4)
def test_tensor_parallel_pieces_have_their_places_in_the_whole() -> None:
    mesh = init_device_mesh(device.TYPE, (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    libfsdp.fully_shard(model, mesh=mesh["dp"])
    assert_whole(model)


def addresses(shards: libfsdp.LocalShards) -> list[int]:
    return [one.tensor.data_ptr() for one in shards]


@on_ranks(2)
def test_addresses_stay_through_steps_loads_and_exports(tmp_path: Path) -> None:
    model = sharded("tied")
    shards = libfsdp.local_shards(model)
    before = addresses(shards)
    of_module = {name: p for name, p in model.named_parameters(remove_duplicate=False)}
    assert all(of_module[one.name]._local_tensor.data_ptr() == one.tensor.data_ptr() for one in shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        a_step(model, "tied", step, optimizer)
        assert shards.is_valid()
    libfsdp.save(tmp_path / "1", model, optimizer)
    libfsdp.load(tmp_path / "1", model, optimizer)
    for bucket in libfsdp.full_weights(model):
        assert bucket
    model.zero_grad()
    model.load_state_dict(model.state_dict(), assign=True)
    again = libfsdp.local_shards(model)
    assert shards.is_valid()
    assert addresses(again) == before
    assert again.generation == shards.generation
    # Other tensors that are assigned give their values to the memory that is registered.
    other = {name: value.clone() + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(other, assign=True)
    assert addresses(libfsdp.local_shards(model)) == before
    assert shards.is_valid()
    assert all(torch.equal(one.tensor, other[one.name].to_local()) for one in shards)
    CASES["tied"].loss(model, batch_of(CASES["tied"], 9, 0, dist.get_rank()))
    assert shards.is_valid()  # while modules show whole parameters
    assert_whole(model)


@on_ranks(2)
def test_a_generation_tells_of_other_addresses() -> None:
    model = sharded("mlp")
    generations = [libfsdp.local_shards(model).generation]
    a_step(model, "mlp", 0, torch.optim.SGD(model.parameters(), lr=0.1))
    for change in (torch.nn.Module.double, torch.nn.Module.float):
        shards = libfsdp.local_shards(model)
        change(model)
        assert not shards.is_valid()
        with pytest.raises(libfsdp.Error, match="the shards have moved since; call local_shards again"):
            shards.reading()
        assert_whole(model)
        generations.append(libfsdp.local_shards(model).generation)
    assert generations == sorted(set(generations))
    last = libfsdp.local_shards(model)
    assert libfsdp.local_shards(model).generation == last.generation == generations[-1]


@on_ranks(2)
def test_writers_wait_for_readers(tmp_path: Path) -> None:
    """A writer on another thread waits for the reader, and one on the reader's thread is an error."""
    model = sharded("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    case = CASES["mlp"]
    libfsdp.save(tmp_path / "1", model)
    case.loss(model, batch_of(case, 0, 0, dist.get_rank())).backward()
    state = {name: 2 * value.detach() for name, value in model.state_dict().items()}
    writers: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,
        "load": lambda: libfsdp.load(tmp_path / "1", model),
        "load_state_dict": lambda: model.load_state_dict(state),
        "set_model_state_dict": lambda: set_model_state_dict(model, state),
    }
    shards = libfsdp.local_shards(model)
    for name, write in writers.items():
        before = [one.tensor.clone() for one in shards]
        ended = threading.Event()

        def run(write: Callable[[], Any] = write, ended: threading.Event = ended) -> None:
            write()
            ended.set()

        with shards.reading(), shards.reading():
            with pytest.raises(libfsdp.Error, match="by the thread that reads them"):
                write()
            writer = threading.Thread(target=run)
            writer.start()
            assert not ended.wait(0.1), name
            assert all(torch.equal(one.tensor, value) for one, value in zip(shards, before, strict=True)), name
            libfsdp.memory_stats(model)  # the reader may use the model
        writer.join()
        assert ended.is_set()
        changed = [not torch.equal(one.tensor, value) for one, value in zip(shards, before, strict=True)]
        assert any(changed) or not any(value.numel() for value in before) or name == "set_model_state_dict", name
    a_step(model, "mlp", 1, optimizer)


@on_ranks(2)
def test_a_fork_while_a_thread_reads() -> None:
    """In the child of a fork, only the thread reads that has forked."""
    model = nn.Linear(8, 16, device=device.TYPE)
    libfsdp.fully_shard(model)
    shards = libfsdp.local_shards(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    reads, ends = threading.Event(), threading.Event()

    def read() -> None:
        with shards.reading():
            reads.set()
            ends.wait()

    def in_child(work: Callable[[], object]) -> int:
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            try:
                work()
                os._exit(0)
            except BaseException:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def refused() -> None:
        with pytest.raises(libfsdp.Error, match="by the thread that reads them"):
            optimizer.step()

    reader = threading.Thread(target=read)
    reader.start()
    reads.wait()
    assert in_child(optimizer.step) == 0
    with shards.reading():
        assert in_child(refused) == 0
    ends.set()
    reader.join()
    optimizer.step()


@on_ranks(2)
def test_what_has_no_address_is_an_error() -> None:
    with pytest.raises(ValueError, match="Linear is not sharded; call fully_shard on it first"):
        libfsdp.local_shards(nn.Linear(2, 2))
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    libfsdp.fully_shard(model)
    with pytest.raises(libfsdp.Error, match="'weight' is on the meta device: call model"):
        libfsdp.local_shards(model)
    model.to_empty(device=device.TYPE)
    assert_whole(model)
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(EightBits(model.weight.detach()))
    libfsdp.fully_shard(model)
    with pytest.raises(libfsdp.Error, match="the shard of 'weight' is a EightBits"):
        libfsdp.local_shards(model)
