"""libfsdp behind torch's names, and torch's own again."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed.fsdp
from torch.distributed.fsdp._fully_shard import _fully_shard as functions

import libfsdp

NAMES = ("fully_shard", "FSDPModule", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx")


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Whatever a test leaves."""
    yield
    libfsdp.uninstall()


def of_torch() -> dict[str, Any]:
    return {name: getattr(torch.distributed.fsdp, name) for name in NAMES}


def program(name: str, source: str) -> types.ModuleType:
    """A module of a user's."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(source, module.__dict__)
    return module


def test_names_are_replaced_and_given_back() -> None:
    theirs = of_torch()
    assert all(not value.__module__.startswith("libfsdp") for value in theirs.values())
    before = program("imported_before", "from torch.distributed.fsdp import fully_shard, FSDPModule as Renamed")
    try:
        libfsdp.install()
        assert of_torch() == {name: getattr(libfsdp, name) for name in NAMES}
        assert functions.fully_shard is libfsdp.fully_shard
        assert before.fully_shard is libfsdp.fully_shard
        after = program("imported_after", "from torch.distributed.fsdp import fully_shard")
        assert after.fully_shard is libfsdp.fully_shard
        libfsdp.install()  # Nothing happens.
        libfsdp.uninstall()
        assert of_torch() == theirs
        assert before.fully_shard is theirs["fully_shard"]
        assert after.fully_shard is libfsdp.fully_shard
        libfsdp.uninstall()  # Nothing happens.
        assert of_torch() == theirs
    finally:
        del sys.modules["imported_before"], sys.modules["imported_after"]


def test_a_with_block_ends_also_by_an_exception() -> None:
    theirs = of_torch()

    def fails() -> None:
        assert torch.distributed.fsdp.fully_shard is libfsdp.fully_shard
        raise KeyError

    with pytest.raises(KeyError), libfsdp.installed():
        fails()
    assert of_torch() == theirs


def test_with_blocks_nest() -> None:
    theirs = of_torch()
    with libfsdp.installed():
        with libfsdp.installed():
            pass
        assert torch.distributed.fsdp.fully_shard is libfsdp.fully_shard
    assert of_torch() == theirs
    libfsdp.install()
    with libfsdp.installed():
        pass
    assert torch.distributed.fsdp.fully_shard is libfsdp.fully_shard
    libfsdp.uninstall()
    assert of_torch() == theirs


def test_what_is_replaced_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="libfsdp"):
        libfsdp.install()
    for name in NAMES:
        assert f"torch.distributed.fsdp.{name} is libfsdp's now" in caplog.text


def test_libfsdp_keeps_its_own_names() -> None:
    ours = {name: getattr(libfsdp, name) for name in NAMES}
    with libfsdp.installed():
        assert {name: getattr(libfsdp, name) for name in NAMES} == ours
    assert {name: getattr(importlib.import_module("libfsdp"), name) for name in NAMES} == ours
    # torch's policies serve as they are.
    assert libfsdp.OffloadPolicy is torch.distributed.fsdp.OffloadPolicy
    assert libfsdp.CPUOffloadPolicy is torch.distributed.fsdp.CPUOffloadPolicy
    assert issubclass(libfsdp.MixedPrecisionPolicy, torch.distributed.fsdp.MixedPrecisionPolicy)
