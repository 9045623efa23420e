"""Checkpoints in the memory of hosts: libfsdp.AsyncSaver(memory=...) and load_latest of two folders.

Ranks with folders of their own stand for hosts.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.ranks import StartRanks
from support.states import train_more, trained
from support.training import full

import libfsdp


def memory(folder: str, rank: int | None = None) -> str:
    return f"{folder}/host{dist.get_rank() if rank is None else rank}/run"


def lose(folder: str, *hosts: int) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for host in hosts:
            shutil.rmtree(memory(folder, host))
    dist.barrier()


def save_steps(folder: str, case: str) -> list[float]:
    """Saves step 2 in memory and on the disk, and step 3 in memory. Returns the losses of the steps that follow."""
    model, optimizer = trained(case, "libfsdp")
    saver = libfsdp.AsyncSaver(model, optimizer, memory=memory(folder))
    saver.save(f"{folder}/disk/step-2", {"step": 2})
    train_more(model, optimizer, case, range(2, 3))
    saver.save_in_memory("step-3", {"step": 3}, rank_extra={"position": dist.get_rank()})
    saver.wait_for_memory()
    assert sorted(os.listdir(memory(folder))) == [".fsdp-job", "step-2", "step-3"]
    saver.wait()
    return train_more(model, optimizer, case, range(3, 5))


@pytest.mark.parametrize("case", ["mlp", "odd_shapes"])
@on_ranks(2)
def test_a_lost_host_goes_on_with_the_same_bits(tmp_path: Path, case: str) -> None:
    folder = str(tmp_path)
    expected = save_steps(folder, case)
    lose(folder, 1)
    model, optimizer = trained(case, "libfsdp", steps=0)
    loaded = libfsdp.load_latest([memory(folder), f"{folder}/disk"], model, optimizer)
    assert loaded is not None
    assert loaded.extra == {"step": 3}
    assert loaded.rank_extra == {"position": dist.get_rank()}
    assert loaded.rng
    assert (loaded.origin == "memory of this host") == (dist.get_rank() == 0)
    assert train_more(model, optimizer, case, range(3, 5)) == expected
    # From the disk, if all memory is lost; a new saver begins where nothing is left.
    if dist.get_rank() == 0:
        shutil.rmtree(memory(folder))
    dist.barrier()
    loaded = libfsdp.load_latest([memory(folder), f"{folder}/disk"], model, optimizer)
    assert loaded is not None
    assert (loaded.extra, loaded.origin) == ({"step": 2}, f"{folder}/disk")
    saver = libfsdp.AsyncSaver(model, optimizer, memory=memory(folder))
    saver.save_in_memory("step-3", {"step": 3})
    saver.remove_memory()
    assert os.listdir(f"{folder}/host{dist.get_rank()}") == []
    with pytest.raises(libfsdp.Error, match="or no longer"):
        saver.save_in_memory("step-4")


def values(folder: str, case: str) -> list[torch.Tensor]:
    model, optimizer = trained(case, "libfsdp", steps=0)
    loaded = libfsdp.load_latest([memory(folder), f"{folder}/disk"], model, optimizer)
    assert loaded is not None
    assert loaded.extra == {"step": 3}
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [full(value) for value in (*model.parameters(), *state)]


def test_fewer_and_more_ranks_load_the_same_values(ranks: StartRanks, tmp_path: Path) -> None:
    """Of four hosts, one is lost; its part comes from its neighbour, on any number of ranks."""
    folder = str(tmp_path)
    ranks(4).run(save_steps, folder, "odd_shapes")
    four = ranks(4).run(values, folder, "odd_shapes")
    shutil.rmtree(memory(folder, 3))
    three = ranks(3).run(values, folder, "odd_shapes")
    five = ranks(4).run(values, folder, "odd_shapes")
    for found in (*three, *five):
        assert all(map(torch.equal, found, four[0]))


@on_ranks(2)
def test_what_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model, optimizer = trained("mlp", "libfsdp", steps=0)
    with pytest.raises(libfsdp.Error, match="distance is 2, and there are 2 hosts"):
        libfsdp.AsyncSaver(model, optimizer, memory=memory(folder), distance=2)
    with pytest.raises(libfsdp.Error, match="rank 1: memory is empty on this rank, and not on others"):
        libfsdp.AsyncSaver(model, optimizer, memory=memory(folder) if dist.get_rank() == 0 else None)
    with pytest.raises(libfsdp.Error, match="no folder in memory, or no longer: make it with AsyncSaver"):
        libfsdp.AsyncSaver(model, optimizer).save_in_memory("step-1")
    with pytest.raises(TypeError, match=r"folder is .*: give a folder of checkpoints, or two"):
        libfsdp.load_latest([folder, folder, folder], model)
