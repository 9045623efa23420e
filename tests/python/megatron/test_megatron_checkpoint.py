"""Checkpoints with Megatron-FSDP's names, written by plain torch.distributed.checkpoint, for FSDP2 and libfsdp, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.marks import on_ranks
from support.ranks import StartRanks
from support.states import assert_same_state, train_more, trained
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict

from libfsdp.megatron._checkpoint import get_checkpoint_state, set_checkpoint_state

CASE = "odd_shapes"  # On four ranks, some have nothing of some parameters.


def write(path: Path, implementation: str) -> None:
    """As Megatron-FSDP's programs do: a wrapper's state dict, and the optimizer's own."""
    model, optimizer = trained(CASE, implementation)
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    dcp.save({"model": wrapped, "optimizer": optimizer.state_dict()}, checkpoint_id=path)


def write_by_function(path: Path, implementation: str) -> None:
    model, optimizer = trained(CASE, implementation)
    dcp.save(get_checkpoint_state(model, optimizer), checkpoint_id=path)


def go_on_from(path: Path, writer: str, reader: str) -> list[float]:
    """The losses of two more steps, by a model that was loaded."""
    model, optimizer = trained(CASE, reader, steps=0)
    state = get_checkpoint_state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_checkpoint_state(model, optimizer, state)
    assert_same_state(get_state_dict(model, optimizer), get_state_dict(*trained(CASE, writer)))
    return train_more(model, optimizer, CASE, range(2, 4))


def never_stopped(writer: str) -> list[float]:
    """The same losses by the model that was saved."""
    model, optimizer = trained(CASE, writer)
    return train_more(model, optimizer, CASE, range(2, 4))


@pytest.mark.parametrize(
    ("writer", "reader", "size"),
    [("fsdp2", "libfsdp", 2), ("libfsdp", "fsdp2", 2), ("fsdp2", "libfsdp", 4), ("libfsdp", "libfsdp", 4)],
)
def test_each_goes_on_where_the_other_stopped(
    ranks: StartRanks, tmp_path: Path, writer: str, reader: str, size: int
) -> None:
    """On four ranks, the two add gradients in different orders."""
    ranks(size).run(write_by_function, tmp_path / "a", writer)
    losses = ranks(size).run(go_on_from, tmp_path / "a", writer, reader)
    tolerance = 0.0 if size == 2 or writer == reader else 1e-6
    for found, expected in zip(losses, ranks(size).run(never_stopped, writer), strict=True):
        assert found == pytest.approx(expected, rel=tolerance, abs=0)


def test_the_names_and_values_are_those_of_plain_state_dicts(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(2).run(write, tmp_path / "plain", "fsdp2")
    ranks(2).run(write_by_function, tmp_path / "function", "libfsdp")
    plain, function = (values_of(tmp_path / name) for name in ("plain", "function"))
    assert list(plain) == list(function)
    assert any(name.startswith("model.module.") for name in plain)
    assert "optimizer.state.0.exp_avg" in plain
    for name, value in plain.items():
        assert torch.equal(function[name], value), name


def values_of(path: Path) -> dict[str, Any]:
    """All tensors of a checkpoint."""
    items = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.zeros(i.size, dtype=i.properties.dtype) for name, i in sorted(items.items()) if hasattr(i, "size")
    }
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


@on_ranks(2)
def test_what_is_no_such_state_is_refused() -> None:
    model, optimizer = trained("mlp", "libfsdp", steps=0)
    state = get_checkpoint_state(model)
    with pytest.raises(ValueError, match="has no 'optimizer'"):
        set_checkpoint_state(model, optimizer, state)
    with pytest.raises(ValueError, match=r"do not begin with 'module\.'"):
        set_checkpoint_state(model, None, {"model": model.state_dict()})
