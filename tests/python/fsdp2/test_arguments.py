"""Arguments of wrong types, and calls in a wrong order: one error that names the argument, its value and the way out."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.ranks import ComparedRanks, run_both
from support.states import assert_equal
from support.training import installed
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
    ({"keep_gathered_bytes": "1"}, ValueError, "keep_gathered_bytes: '1' is no size: write a number and a unit"),
    ({"keep_gathered_bytes": 0.5}, TypeError, "keep_gathered_bytes is 0.5: give a whole number of bytes, or a size"),
    ({"report_nan_in_param_grad": "yes"}, TypeError, "report_nan_in_param_grad is 'yes': give True or False"),
    ({"follow_grad_dtype": "yes"}, TypeError, "follow_grad_dtype is 'yes'"),
    ({"gather_format": libfsdp.Float8Blocks(32)}, TypeError, "gather_format is Float8Blocks.*: give a function"),
    ({"grad_comm_format": 8}, TypeError, "grad_comm_format is 8: give a GradCommFormat, or None"),
    ({"main_params_dtype": "fp32"}, ValueError, "main_params_dtype is fp32: give a floating-point dtype"),
    ({"main_grads_dtype": "fp32"}, ValueError, "main_grads_dtype is fp32"),
]


@on_ranks(2)
def test_wrong_types_are_named() -> None:
    for options, error, text in WRONG:
        module = nn.Linear(4, 4)
        with pytest.raises(error, match=text):
            fully_shard(module, **options)
        fully_shard(module)  # It is as it was.
    for value in ("model", None, [], [nn.Linear(2, 2), "head"], nn.Linear(2, 2).parameters()):
        with pytest.raises(TypeError, match=r"module is .*: give a module, or a list of modules"):
            fully_shard(value)


class Policy:
    """Not FSDP2's class, but all that it reads of one."""

    param_dtype, reduce_dtype, output_dtype, cast_forward_inputs = torch.bfloat16, torch.float32, None, 1


def train_with_unusual_arguments(implementation: str) -> list[torch.Tensor]:
    with installed(implementation), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), *(nn.Linear(4, 4) for _ in range(4)))
        policy: Any = Policy()
        for one in model[0]:
            fully_shard(one, offload_policy=None, mp_policy=policy)
        fully_shard(model[0], offload_policy=False, mp_policy=policy, ignored_params=[])
        fully_shard({"a": model[1], "b": model[2]}.values(), offload_policy={}, mp_policy=policy)
        fully_shard({model[3]}, offload_policy="cpu", mp_policy=policy)
        fully_shard(model, offload_policy=None, mp_policy=policy, ignored_params=iter(()))
        texts = [str(w.message) for w in caught if "offload_policy" in str(w.message)]
        assert texts == ["offload_policy is 'cpu', which offloads nothing, as in FSDP2: give CPUOffloadPolicy() to offload, or None"] * (
            implementation == "libfsdp"
        )
        model[3].set_modules_to_forward_prefetch(model[0])  # an nn.Sequential of sharded modules
        model[0].set_modules_to_backward_prefetch(())
        model.set_requires_gradient_sync(1)
        model.set_gradient_divide_factor(None)
        model.set_all_reduce_hook(None)
        model.set_post_optim_event(None)
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))).float().sum().backward()
        return [p.grad.full_tensor() for p in model.parameters()]


def test_takes_what_fsdp2_takes(compared_ranks: ComparedRanks) -> None:
    """Whatever its annotations say."""
    assert_equal(*run_both(compared_ranks, 2, train_with_unusual_arguments))


def divide_by(factor: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(4, 4))
    model.set_gradient_divide_factor(factor)
    model(torch.ones(3, 4)).sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


@on_ranks(2)
def test_divide_factors_of_other_libraries() -> None:
    for factor, same in ((None, 2.0), (np.float32(4), 4.0), (torch.tensor(4), 4)):
        assert_equal(divide_by(factor), divide_by(same))


WRONG_OF_METHODS: list[tuple[str, Any, str]] = [
    ("set_requires_gradient_sync", "no", "requires_gradient_sync is 'no': give True or False"),
    ("set_requires_all_reduce", [False], r"requires_all_reduce is \[False\]: give True or False"),
    ("set_reshard_after_backward", "no", "reshard_after_backward is 'no'"),
    ("set_keep_unsharded_storage", "yes", "keep is 'yes'"),
    ("set_unshard_in_backward", "no", "unshard_in_backward is 'no'"),
    ("set_separate_reduce_scatter_group", "no", "enable is 'no'"),
    ("set_allocate_memory_from_process_group_for_comm", "no", "enable is 'no'"),
    ("set_manual_backward_finalization", "no", "enabled is 'no'"),
    ("set_gradient_divide_factor", "2", "factor is '2': give a number"),
    ("set_modules_to_forward_prefetch", nn.Linear(2, 2), r"modules is Linear\(.*: give a list of modules"),
    ("set_modules_to_backward_prefetch", nn.Linear(2, 2), r"modules is Linear\("),
]


@on_ranks(2)
def test_wrong_types_of_methods_are_named() -> None:
    model: Any = nn.Linear(4, 4)
    fully_shard(model)
    for method, value, text in WRONG_OF_METHODS:
        with pytest.raises(TypeError, match=text):
            getattr(model, method)(value)
    for value, expected in ((0, False), (torch.ones(()) > 0, True)):  # What has a truth is one.
        model.set_requires_gradient_sync(value)
        assert model._get_fsdp_state().unit.requires_gradient_sync is expected


NO_MODEL = "give the module that fully_shard was called on"
NO_OPTIMIZER = "give an optimizer, a list of several, or None"
UNTYPED: Any = libfsdp
WRONG_OF_CHECKPOINTS: list[tuple[Any, type[Exception], str]] = [
    (lambda m, o, path: UNTYPED.save(m, path, o), TypeError, r"path is FSDPLinear\(.*: give a path"),
    (lambda m, o, path: UNTYPED.save(path, path, o), TypeError, f"model is '.*': {NO_MODEL}"),
    (lambda m, o, path: UNTYPED.save(path, m, {"step": 1}), TypeError, f"optimizer is {{'step': 1}}: {NO_OPTIMIZER}"),
    (lambda m, o, path: UNTYPED.save(path, m, [o, "adam"]), TypeError, f"optimizer is .*'adam'.: {NO_OPTIMIZER}"),
    (lambda m, o, path: UNTYPED.save(path, m, o.state_dict()), TypeError, f"optimizer is .*: {NO_OPTIMIZER}"),
    (lambda m, o, path: UNTYPED.save(path, m, m), TypeError, f"optimizer is FSDPLinear.*: {NO_OPTIMIZER}"),
    (lambda m, o, path: UNTYPED.save(path, m, o, keep_last="2"), TypeError, "keep_last is '2': give a whole number"),
    (lambda m, o, path: UNTYPED.save(path, m, o, keep_every=0.5), TypeError, "keep_every is 0.5"),
    (lambda m, o, path: UNTYPED.save(path, m, o, keep_best=None), TypeError, "keep_best is None"),
    (lambda m, o, path: UNTYPED.save(path, m, o, on_phase=1), TypeError, "on_phase is 1: give a function"),
    (lambda m, o, path: UNTYPED.save(path, m, o, 7), libfsdp.Error, "rank 0: extra is 7: give a dictionary"),
    (
        lambda m, o, path: UNTYPED.save(path, m, o, rank_extra=[1] if dist.get_rank() else {}),
        libfsdp.Error,
        r"rank 1: rank_extra is \[1\]: give a dict",
    ),
    (
        lambda m, o, path: UNTYPED.save(f"{path}-{dist.get_rank()}", m, o),
        libfsdp.Error,
        "rank 1: was called with the path .*step-1-1, and rank 0 .*step-1-0: .*give the same path on all ranks",
    ),
    (lambda m, o, path: UNTYPED.save(path, m, o, grad_scaler=1.0), TypeError, "grad_scaler is 1.0: give a GradScaler"),
    (lambda m, o, path: UNTYPED.save(path, m, o, metric="0.5"), libfsdp.Error, "metric is '0.5': give a number"),
    (lambda m, o, path: UNTYPED.AsyncSaver(o, m), TypeError, f"model is AdamW.*: {NO_MODEL}"),
    (lambda m, o, path: UNTYPED.AsyncSaver(m, "adam"), TypeError, f"optimizer is 'adam': {NO_OPTIMIZER}"),
    (lambda m, o, path: UNTYPED.AsyncSaver(m, o).save(m), TypeError, r"path is FSDPLinear\(.*: give a path"),
    (lambda m, o, path: UNTYPED.AsyncSaver(m, o).save(path, keep_last="2"), TypeError, "keep_last is '2'"),
    (lambda m, o, path: UNTYPED.AsyncSaver(m, o).save(path, 7), libfsdp.Error, "extra is 7: give a dictionary"),
    (lambda m, o, path: UNTYPED.load(m, path, o), TypeError, f"model is '.*': {NO_MODEL}"),
    (lambda m, o, path: UNTYPED.load(m, m, o), TypeError, r"path is FSDPLinear\(.*: give a path"),
    (lambda m, o, path: UNTYPED.load(path, m, path), TypeError, f"optimizer is '.*': {NO_OPTIMIZER}"),
    (
        lambda m, o, path: UNTYPED.load(path, m, o, rename={"a": "b"}),
        TypeError,
        "rename is {'a': 'b'}: give a function",
    ),
    (lambda m, o, path: UNTYPED.load(path, m, o, ignore=["a"]), TypeError, "ignore is .'a'.: give a function that"),
    (lambda m, o, path: UNTYPED.load(path, m, o, strict="no"), TypeError, "strict is 'no': give True or False"),
    (lambda m, o, path: UNTYPED.load(path, m, o, grad_scaler="x"), TypeError, "grad_scaler is 'x': give a GradScaler"),
    (lambda m, o, path: UNTYPED.load(path, m, o, model_prefix=None), TypeError, "model_prefix is None: give a text"),
    (lambda m, o, path: UNTYPED.load_latest(m, path, o), TypeError, f"model is '.*': {NO_MODEL}"),
    (lambda m, o, path: UNTYPED.load_latest(None, m, o), TypeError, "folder is None: give a path"),
    (lambda m, o, path: UNTYPED.latest(m), TypeError, r"folder is FSDPLinear\("),
    (lambda m, o, path: UNTYPED.best(None), TypeError, "folder is None"),
    (lambda m, o, path: UNTYPED.read_rank_extra(None), TypeError, "path is None"),
]


@on_ranks(2)
def test_wrong_types_of_checkpoints_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    path = str(folder / "step-1")
    for call, error, text in WRONG_OF_CHECKPOINTS:
        with pytest.raises(error, match=f"(?s){text}"):
            call(model, optimizer, path)
    assert not folder.exists() or not list(folder.iterdir())
    UNTYPED.save(Path(path), model, [optimizer], metric=torch.ones(()), keep_last=1)  # The ranks are as they were.
    loaded = UNTYPED.load(path.encode(), model, (optimizer,))
    assert (loaded.path, loaded.metric) == (path, 1)


@pytest.mark.parametrize("grouped", [False, True])
@on_ranks(2)
def test_outer_modules_come_last(grouped: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    fully_shard(model)
    with pytest.raises(
        ValueError, match=r"parameters \['weight', 'bias'.* are shards .* call fully_shard for inner modules first"
    ):
        fully_shard([model[0], model[2]] if grouped else model[0])
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


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


@on_ranks(2)
def test_clipping_names_what_is_wrong() -> None:
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
