"""Arguments of wrong types, and calls in a wrong order: one error that names the argument, its value and the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.ranks import StartRanks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

import libfsdp
from libfsdp import fully_shard
from libfsdp.megatron._units import classes_of

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ignored_params": {"weight"}}, TypeError, r"ignored_params is \{'weight'\}: .*get_parameter\('weight'\)"),
    ({"ignored_params": "weight"}, TypeError, "ignored_params is 'weight': give a set"),
    ({"mesh": "cpu"}, TypeError, "mesh is 'cpu': give a DeviceMesh"),
    ({"mesh": 2}, TypeError, "mesh is 2"),
    ({"reshard_after_forward": "yes"}, ValueError, "reshard_after_forward should be a bool or an int .* not yes"),
    ({"reshard_after_forward": 0.5}, ValueError, "reshard_after_forward should be a bool or an int"),
    ({"shard_placement_fn": Shard(0)}, TypeError, r"shard_placement_fn is Shard\(dim=0\): give a function"),
    ({"shard_placement_fn": lambda _: Replicate()}, AssertionError, r"Expected Shard.*shard_placement_fn must return"),
    ({"shard_placement_fn": lambda _: Shard(-3)}, AssertionError, "Shard dim -1 is invalid"),
    ({"placements": Replicate()}, ValueError, "placements 'R' are none of optim_grads_params"),
    ({"outer_placements": Shard(0)}, ValueError, r"outer_placements 'S\(0\)' are none of"),
    ({"mp_policy": torch.bfloat16}, TypeError, "mp_policy is torch.bfloat16: give a MixedPrecisionPolicy"),
    (
        {"mp_policy": MixedPrecisionPolicy(param_dtype="bf16")},
        TypeError,
        "mp_policy.param_dtype is 'bf16': give a floating",
    ),
    ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.int8)}, TypeError, "mp_policy.reduce_dtype is torch.int8"),
    ({"mp_policy": MixedPrecisionPolicy(output_dtype="fp32")}, TypeError, "mp_policy.output_dtype is 'fp32'"),
    (
        {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs="no")},
        TypeError,
        "cast_forward_inputs is 'no': give True",
    ),
    ({"offload_policy": True}, TypeError, r"offload_policy is True: give CPUOffloadPolicy\(\)"),
    ({"keep_gathered_bytes": "1GB"}, TypeError, "keep_gathered_bytes is '1GB': give a whole number of bytes"),
    ({"keep_gathered_bytes": 1e9}, TypeError, "keep_gathered_bytes is 1000000000.0"),
    ({"report_nan_in_param_grad": "yes"}, TypeError, "report_nan_in_param_grad is 'yes': give True or False"),
    ({"follow_grad_dtype": "yes"}, TypeError, "follow_grad_dtype is 'yes'"),
    ({"gather_format": libfsdp.Float8Blocks(32)}, TypeError, "gather_format is Float8Blocks.*: give a function"),
    ({"main_params_dtype": "fp32"}, ValueError, "main_params_dtype is fp32: give a floating-point dtype"),
    ({"main_grads_dtype": "fp32"}, ValueError, "main_grads_dtype is fp32"),
]


def refuse() -> None:
    for options, error, text in WRONG:
        module = nn.Linear(4, 4)
        with pytest.raises(error, match=text):
            fully_shard(module, **options)
        fully_shard(module)  # It is as it was.
    for value in ("model", None, [], [nn.Linear(2, 2), "head"], nn.Linear(2, 2).parameters()):
        with pytest.raises(TypeError, match=r"module is .*: give a module, or a list of modules"):
            fully_shard(value)


def test_wrong_types_are_named(ranks: StartRanks) -> None:
    ranks(2).run(refuse)


def shard_top_down(grouped: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    fully_shard(model)
    with pytest.raises(
        ValueError, match=r"parameters \['weight', 'bias'.* are shards .* call fully_shard for inner modules first"
    ):
        fully_shard([model[0], model[2]] if grouped else model[0])
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("grouped", [False, True])
def test_outer_modules_come_last(ranks: StartRanks, grouped: bool) -> None:
    ranks(2).run(shard_top_down, grouped)


def test_a_process_group_is_needed() -> None:
    """In a process that no launcher has started."""
    code = "import libfsdp; from torch import nn; libfsdp.fully_shard(nn.Linear(2, 2))"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    }
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "ValueError: fully_shard without a mesh shards over all ranks" in ended.stderr
    assert "torch.distributed.init_process_group()" in ended.stderr


def clip() -> None:
    module: Any = fully_shard(nn.Linear(4, 4))
    module(torch.ones(2, 4)).sum().backward()
    before = module.weight.grad.full_tensor()
    for arguments, text in (
        ((module.parameters(), "1.0"), "max_norm is '1.0': give a number"),
        ((module.parameters(), 1.0, "inf "), "norm_type is 'inf ': give a number"),
        ((module, 1.0), "parameters is FSDPLinear.*: give tensors"),
        ((["weight"], 1.0), "parameters is 'weight': give tensors"),
    ):
        with pytest.raises(TypeError, match=text):
            libfsdp.clip_grad_norm_(*arguments)
    assert torch.equal(module.weight.grad.full_tensor(), before)


def test_clipping_names_what_is_wrong(ranks: StartRanks) -> None:
    ranks(2).run(clip)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (nn.Linear, "fsdp_unit_modules is .*Linear.*: give a list"),
        ("torch.nn.Linear", "fsdp_unit_modules is 'torch.nn.Linear': give a list"),
        ([nn.Linear(1, 1)], "is no class of nn.Module"),
        (["torch.nn.functional.relu"], "'torch.nn.functional.relu' is no class"),
        (["raises_at_import.Block"], "'raises_at_import.Block' can't be imported: not here"),
        (["Linear"], "'Linear' can't be imported"),
    ],
)
def test_unit_classes_of_megatron(given: Any, text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('not here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=text):
        classes_of(given)
