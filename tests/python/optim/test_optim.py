"""libfsdp.optim's Adam, AdamW and SGD, and libfsdp.fuse: the same bits and the same state as torch.optim over FSDP2's DTensors."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import device
from support.marks import on_ranks
from support.optimizers import ALIGNED, ODD, Shapes, give_gradients, sharded, train, whole_state, without_torchs_steps
from support.ranks import ComparedRanks, run_both
from support.states import assert_same_state, load_by_torch, save_by_torch, train_more
from support.training import full
from support.training import sharded as sharded_case
from torch import nn
from torch.distributed.tensor import distribute_tensor

import libfsdp

Making = tuple[str, dict[str, Any]]
OPTIMIZERS: dict[str, Making] = {
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "adamw_amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True}),
    "adamw_maximize": ("AdamW", {"lr": 0.01, "betas": (0.5, 0.9), "maximize": True, "eps": 1e-3}),
    "adam": ("Adam", {"lr": 0.01}),
    "adam_weight_decay": ("Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "adam_decoupled": ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adam_tensor_lr": ("Adam", {"lr": torch.tensor(0.01)}),
    "sgd": ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    "sgd_momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "sgd_nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
}
WAYS = ("optim", "fuse")


def make(way: str, making: Making, parameters: Any, **more: Any) -> torch.optim.Optimizer:
    """torch's own, ours ("optim"), or torch's that has become ours ("fuse")."""
    name, arguments = making
    module = libfsdp.optim if way == "optim" else torch.optim
    optimizer: torch.optim.Optimizer = getattr(module, name)(parameters, **{**arguments, **more})
    return libfsdp.fuse(optimizer) if way == "fuse" else optimizer


def halve_and_grow(more: nn.Parameter) -> Callable[[torch.optim.Optimizer], None]:
    """A change of groups in the middle of a run."""

    def change(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / 2
            group["weight_decay"] = 0.3
        optimizer.add_param_group({"params": [more], "lr": 0.5})

    return change


def flags_of(making: Making) -> dict[str, Any]:
    """With which torch has a step over DTensors whose bits are those of its fused kernel.

    It has no fused SGD for DTensors. Its loop has the same bits, where registers are full.
    """
    return {} if making[0] == "SGD" else {"fused": True}


def shapes_of(making: Making) -> Shapes:
    """On which it has these bits."""
    return ALIGNED if making[0] == "SGD" else ODD


@pytest.mark.parametrize(
    ("size", "name", "way", "options"),
    [
        *((2, name, way, {}) for name in OPTIMIZERS for way in WAYS),
        # Some ranks have nothing of some parameters.
        *((4, name, "optim", options) for name in ("adamw", "sgd_momentum") for options in ({}, {"replicas": 2})),
        (4, "adamw", "optim", {"dtype": torch.bfloat16}),
    ],
)
@on_ranks("size")
def test_the_same_bits_as_torchs_over_fsdp2(name: str, way: str, options: dict[str, Any]) -> None:
    making = OPTIMIZERS[name]
    shapes = shapes_of(making)
    mine, theirs = sharded("libfsdp", shapes, **options), sharded("fsdp2", shapes, **options)
    optimizers = []
    for parameters, of_way in ((mine, way), (theirs, "torch")):
        optimizer = make(of_way, making, parameters[:-1], **flags_of(making))
        with nullcontext() if of_way == "torch" else without_torchs_steps():
            train(parameters, optimizer, steps=6, change=halve_and_grow(parameters[-1]))
        optimizers.append(optimizer)
    # On a GPU, torch's loop rounds Nesterov's sum otherwise.
    tolerance = 1e-6 if device.TYPE != "cpu" and making[1].get("nesterov") else 0.0
    assert_same_state([p.data for p in mine], [p.data for p in theirs], tolerance)
    assert_same_state(optimizers[0].state_dict(), optimizers[1].state_dict(), tolerance)
    if making[1].get("momentum") != 0 and making[0] != "SGD":
        assert optimizers[0].state_dict()["state"]


def compare_with_replica(making: Making, shapes: Any) -> float:
    """Returns by what factor the greatest difference is below what roundings in each step may add up to."""
    results = []
    for implementation in ("libfsdp", "replica"):
        parameters = sharded(implementation, shapes)
        way = "torch" if implementation == "replica" else "optim"
        # torch's fused SGD fails where some parameters have a momentum already, and others not.
        optimizer = make(way, making, parameters, **flags_of(making))
        train(parameters, optimizer)
        results.append(whole_state(parameters, optimizer))
    assert results[0].keys() == results[1].keys()
    eps = torch.finfo(torch.float32).eps
    # Four steps. Gradients are below 5, updates below 2: of numbers of that size, a few roundings in each step.
    return min(4 * 8 * eps * 5 / max((results[0][n] - v).abs().max().item(), 1e-30) for n, v in results[1].items())


@pytest.mark.skipif(device.TYPE != "cpu", reason="registers are the CPU's")
@pytest.mark.parametrize("making", OPTIMIZERS.values(), ids=OPTIMIZERS)
@on_ranks(4)
def test_the_same_bits_as_of_whole_parameters_where_registers_are_full(making: Making) -> None:
    assert compare_with_replica(making, ALIGNED) > 1e20, "some differ"


@on_ranks(4)
def test_last_elements_differ_by_a_rounding_where_they_are_not() -> None:
    assert compare_with_replica(OPTIMIZERS["adamw"], ODD) > 1


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum"])
@on_ranks(2)
def test_foreach_and_fused_change_nothing(name: str) -> None:
    making = OPTIMIZERS[name]
    runs = []
    for flags in ({"fused": True}, {"foreach": True}, {"foreach": False}, {}):
        parameters = sharded("libfsdp", ODD)
        optimizer = make("fuse", making, parameters, **flags)
        train(parameters, optimizer)
        runs.append(whole_state(parameters, optimizer))
    for run in runs[1:]:
        assert_same_state(run, runs[0])


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum"])
@on_ranks(2)
def test_an_optimizer_is_fused_in_the_middle_of_a_run(name: str) -> None:
    """With a scheduler and hooks from before; the state goes on."""
    making = OPTIMIZERS[name]
    runs = []
    for fused in (False, True):
        parameters = sharded("libfsdp", shapes_of(making))
        optimizer = make("torch", making, parameters, **flags_of(making))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        told: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, told=told: told.append("pre"))
        optimizer.register_step_post_hook(lambda *_, told=told: told.append("post"))
        for step in range(4):
            if fused and step == 2:
                assert libfsdp.fuse(optimizer) is optimizer
                assert libfsdp.fuse(optimizer) is optimizer
                assert type(optimizer) is getattr(libfsdp.optim, making[0])
            give_gradients(parameters, step)
            with without_torchs_steps() if fused and step >= 2 else nullcontext():
                assert optimizer.step(lambda: 3.5) == 3.5
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # "step was called before", and the like
                schedule.step()
        assert told == ["pre", "post"] * 4
        runs.append((whole_state(parameters, optimizer), optimizer.state_dict()["param_groups"], schedule.state_dict()))
    assert_same_state(runs[1], runs[0])


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum"])
@on_ranks(2)
def test_grad_scaler_skips_on_all_ranks(name: str) -> None:
    """A step in which one rank alone finds an infinity, between two others; unscaled by hand in the last."""
    making = OPTIMIZERS[name]
    runs = []
    for implementation, way in (("libfsdp", "optim"), ("fsdp2", "torch")):
        parameters = sharded(implementation, shapes_of(making))
        optimizer = make(way, making, parameters, **flags_of(making))
        scaler = torch.amp.GradScaler(device.TYPE, init_scale=64.0, growth_interval=2)
        scales = []
        for step in range(4):
            scaler.scale(torch.ones((), device=device.TYPE))
            give_gradients(parameters, step, scale=scaler.get_scale())
            if step == 1 and torch.distributed.get_rank() == 1:
                parameters[0].grad.to_local()[0, 0] = float("inf")
            if step == 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert not hasattr(optimizer, "found_inf")
        runs.append((whole_state(parameters, optimizer), scales))
    # A GPU's kernels round SGD's sums in other places than torch's loop over DTensors does.
    assert_same_state(runs[0], runs[1], 1e-6 if device.TYPE != "cpu" and making[0] == "SGD" else 0.0)
    assert runs[0][1] == [64, 32, 32, 64]


def trained(implementation: str, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded_case("odd_shapes", implementation=implementation)
    way = "optim" if implementation == "libfsdp" else "torch"
    optimizer = make(way, OPTIMIZERS["adamw"], model.parameters(), fused=True)
    train_more(model, optimizer, "odd_shapes", range(steps))
    return model, optimizer


@pytest.mark.parametrize(("writer", "reader"), [("libfsdp", "fsdp2"), ("fsdp2", "libfsdp"), ("libfsdp", "libfsdp")])
@on_ranks(2)
def test_training_goes_on_from_a_checkpoint_of_either(tmp_path: Path, writer: str, reader: str) -> None:
    model, optimizer = trained(writer, 2)
    save_by_torch(tmp_path, model, optimizer)
    losses = train_more(model, optimizer, "odd_shapes", range(2, 4))
    model, optimizer = trained(reader, 1)
    load_by_torch(tmp_path, model, optimizer)
    assert train_more(model, optimizer, "odd_shapes", range(2, 4)) == losses
    assert losses[0] != losses[1]


@on_ranks(2)
def test_load_state_dict() -> None:
    """By torch.optim's own load_state_dict: the state is other objects afterwards."""
    parameters = sharded("libfsdp", ODD)
    optimizer = make("optim", OPTIMIZERS["adamw"], parameters)
    train(parameters, optimizer)
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    other = make("optim", OPTIMIZERS["adamw"], copies)
    train(copies[:1], other, steps=1)
    with torch.no_grad():
        copies[0].copy_(parameters[0])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # which shares what it is given
    for of_either, its in ((parameters, optimizer), (copies, other)):
        train(of_either, its)
    assert_same_state(whole_state(copies, other), whole_state(parameters, optimizer))


@on_ranks(2)
def test_gradients_that_lie_otherwise_are_placed() -> None:
    """Replicated, transposed, of another dtype: placed, ordered and converted as the parameter is."""
    results = []
    for other in (False, True):
        parameters = sharded("libfsdp", [(6, 4)])
        optimizer = make("optim", OPTIMIZERS["sgd"], parameters)
        give_gradients(parameters, 0)
        gradient = parameters[0].grad
        assert gradient is not None
        if other:
            mesh = gradient.device_mesh
            whole = full(gradient).t().contiguous().t()
            parameters[0].grad = distribute_tensor(whole, mesh, [torch.distributed.tensor.Replicate()])
        optimizer.step()
        results.append(full(parameters[0]))
    assert torch.equal(results[0], results[1])


def test_plain_tensors_are_stepped_in_their_order_of_elements() -> None:
    """A value that is not dense, gradient and state in another order than the value."""
    base = torch.arange(48.0).view(6, 8)
    results = []
    for module in (torch.optim, libfsdp.optim):
        values = [base.clone()[:, ::2], base.clone().t()]
        parameters = [nn.Parameter(value) for value in values]
        optimizer: torch.optim.Optimizer = module.AdamW(parameters, lr=0.1, foreach=False)
        for step in range(3):
            for number, p in enumerate(parameters):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + number))
            optimizer.step()
        results.append([p.detach().clone() for p in parameters])
    for mine, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_plain_tensors_keep_8_bits_in_their_order_of_elements() -> None:
    base = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    results = []
    for is_dense in (True, False):
        bases = [base.clone(), base.clone()]
        values = [bases[0][:, ::2], bases[1].t()]
        parameters = [nn.Parameter(value.contiguous() if is_dense else value) for value in values]
        optimizer = libfsdp.optim.AdamW8bit(parameters, lr=0.1, min_8bit_size=0)
        for step in range(3):
            for number, p in enumerate(parameters):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + number))
            optimizer.step()
        assert torch.equal(bases[0][:, 1::2], base[:, 1::2])  # which are no parameter's
        state = [value.contiguous() for p in parameters for value in optimizer.state[p].values()]
        results.append([*(p.detach().contiguous() for p in parameters), *state])
    assert all(map(torch.equal, *results))


class Wrapped(torch.Tensor):
    """A tensor that computes otherwise than its class says."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape)

    def __init__(self, like: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0])


def test_what_cannot_be_stepped_is_refused() -> None:
    def step(parameter: torch.Tensor, gradient: torch.Tensor, **options: Any) -> None:
        parameter.grad = gradient
        libfsdp.optim.AdamW([("weight", parameter)], **options).step()

    three = nn.Parameter(torch.ones(3))
    with pytest.raises(
        libfsdp.Error, match=r"AdamW: parameter 0 of group 0 \('weight'\) has a sparse gradient.*sparse=False"
    ):
        step(three, torch.ones(3).to_sparse())
    with pytest.raises(libfsdp.Error, match=r"not of a real floating-point dtype. Use an optimizer of torch.optim"):
        step(nn.Parameter(torch.ones(3, dtype=torch.complex64)), torch.ones(3, dtype=torch.complex64))
    wrapped = nn.Parameter(Wrapped(torch.ones(3)), requires_grad=True)
    with pytest.raises(
        libfsdp.Error, match=r"is a Wrapped; plain tensors and DTensors of them.*Use an optimizer of torch.optim"
    ):
        step(wrapped, torch.ones(3))
    with pytest.raises(
        ValueError, match=r"AdamW: differentiable=True needs a step that autograd records; use torch.optim.AdamW"
    ):
        step(three, torch.ones(3), differentiable=True)
    with pytest.raises(ValueError, match="AdamW: capturable=True is for steps within a graph capture"):
        step(three, torch.ones(3), capturable=True)
    with pytest.raises(ValueError, match="AdamW: capturable=True"):
        libfsdp.fuse(torch.optim.AdamW([three], capturable=True))
    with pytest.raises(TypeError, match="fuse: RMSprop is none of torch's Adam, AdamW and SGD"):
        libfsdp.fuse(torch.optim.RMSprop([three]))
    replaced = torch.optim.SGD([three], lr=0.1)
    replaced.step = print
    with pytest.raises(TypeError, match=r"has replaced SGD.step; call fuse before that"):
        libfsdp.fuse(replaced)
    state = libfsdp.optim.AdamW([three])
    three.grad = torch.ones(3)
    state.step()
    state.state[three]["exp_avg"] = torch.zeros(2)
    with pytest.raises(libfsdp.Error, match=r"the shape \[3\] has state or a gradient of the shape \[2\]"):
        state.step()


@pytest.mark.parametrize(("decay", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_sgd_in_16_bits_is_computed_in_32(way: str, dtype: torch.dtype, decay: float, nesterov: bool) -> None:
    """torch's fused kernel for CPUs is wrong there, and no reference."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(rows, 7).to(dtype)) for rows in (1, 8, 33)]
    optimizer = make(
        way, ("SGD", {"lr": 0.1, "momentum": decay, "weight_decay": 0.1, "nesterov": nesterov}), parameters
    )
    for step in range(4):
        expected = []
        for p in parameters:
            p.grad = torch.randn_like(p)
            gradient = p.grad.float() + 0.1 * p.detach().float()
            momentum = gradient
            if decay and step > 0:
                momentum = decay * optimizer.state[p]["momentum_buffer"].float() + gradient
            direction = gradient + decay * momentum if nesterov else momentum
            expected.append((p.detach().float() - 0.1 * direction, momentum))
        optimizer.step()
        for p, (value, momentum) in zip(parameters, expected, strict=True):
            pairs = [(p.detach(), value)]
            if decay:
                pairs.append((optimizer.state[p]["momentum_buffer"], momentum))
            for got, wanted in pairs:
                assert got.dtype == dtype
                torch.testing.assert_close(got.float(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)


EVEN: Shapes = ((8, 4), (4,), (4, 2, 2))
EVEN_MATRICES: Shapes = ((8, 4), (4, 6))
ODD_MATRICES: Shapes = ((5, 3), (1, 9), (7, 4))


def optimizers_of_torch() -> Iterator[tuple[str, Making]]:
    """All optimizers of torch.optim, with each way to compute that they have."""
    for name, kind in vars(torch.optim).items():
        if not inspect.isclass(kind) or kind is torch.optim.Optimizer or not issubclass(kind, torch.optim.Optimizer):
            continue
        has = inspect.signature(kind).parameters
        base = {"momentum": 0.9} if "momentum" in has else {}
        yield name, (name, {})
        for switch in ("foreach", "fused", "capturable"):
            if switch in has:
                yield f"{name}({switch})", (name, {**base, switch: True})
        if "foreach" in has:
            yield f"{name}(for)", (name, {**base, "foreach": False})


def stepped(making: Making, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """The values after two steps, whole."""
    optimizer = make("torch", making, parameters)
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            give_gradients(parameters, step)
            return torch.tensor(1.0)

        optimizer.step(closure)
    return [full(p).detach() for p in parameters]


def outcomes(implementation: str) -> dict[str, str]:
    """How each optimizer of torch does over sharded parameters, in comparison with the same one over whole ones in one process."""
    found = {}
    for name, making in optimizers_of_torch():
        for cut, shapes, matrices in (("even", EVEN, EVEN_MATRICES), ("uneven", ODD, ODD_MATRICES)):
            chosen = matrices if making[0] == "Muon" else shapes
            try:
                expected = stepped(making, sharded("replica", chosen))
            except (RuntimeError, AssertionError):
                continue  # SparseAdam takes no dense gradients, and capturable is for GPUs.
            try:
                got = stepped(making, sharded(implementation, chosen))
            except (RuntimeError, NotImplementedError) as error:
                found[f"{name} {cut}"] = type(error).__name__
                continue
            pairs = list(zip(got, expected, strict=True))
            is_close = all(torch.allclose(mine, one, atol=1e-3) for mine, one in pairs)
            found[f"{name} {cut}"] = "equal" if all(torch.equal(*pair) for pair in pairs) else f"close: {is_close}"
    return found


def in_the_guide(case: str) -> str:
    """What docs/use/python-guide.md says of a case."""
    name, cut = case.split()
    kind = name.partition("(")[0]
    if kind in ("Adafactor", "Rprop") or name in ("SGD(fused)", "Adagrad(fused)"):
        return "an error"
    if kind in ("LBFGS", "Muon") and cut == "uneven":
        return "an error"
    return "close: True" if kind == "Muon" else "equal"


def test_optimizers_of_torch_work_as_over_fsdp2_and_as_the_guide_says(compared_ranks: ComparedRanks) -> None:
    (mine, *_), (theirs, *_) = run_both(compared_ranks, 2, outcomes)
    assert mine == theirs
    assert len(mine) > 60
    assert {case: mine[case] for case in mine if in_the_guide(case) != "an error"} == {
        case: in_the_guide(case) for case in mine if in_the_guide(case) != "an error"
    }
