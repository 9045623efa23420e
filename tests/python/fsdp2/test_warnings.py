"""What FSDP2 does without a word, and libfsdp says: once, and only where it is so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.marks import on_ranks
from support.ranks import StartRanks
from torch import nn
from torch.distributed.tensor import DTensor

import libfsdp
from libfsdp import fully_shard

PLACEMENTS = ("no_shard", "optim", "optim_grads_params")


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def sharded(placements: str = "optim_grads_params", root: bool = True) -> Any:
    model = plain()
    fully_shard(model[1], placements=placements)
    return fully_shard(model, placements=placements) if root else model


def x() -> torch.Tensor:
    return torch.ones(2, 4) * (1 + dist.get_rank())


def told(body: Callable[[], None], *parts: str) -> None:
    """The body is run twice; there is one warning, with these parts. Without parts there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        body()
        body()
    texts = [str(one.message) for one in caught]
    assert len(texts) == bool(parts), texts
    assert all(part in texts[0] for part in parts), texts


@pytest.mark.parametrize("placements", PLACEMENTS)
@on_ranks(2)
def test_a_step_between_forward_and_backward(placements: str) -> None:
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: libfsdp.optim.AdamW(p, lr=0.1),
    ):
        model = sharded(placements)
        optimizer = make(model.parameters())
        model(x()).sum().backward()
        optimizer.step()

        def body(model: Any = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            loss = model(x()).sum()
            optimizer.step()
            loss.backward()

        told(body, "before an optimizer's step", "'1'", "(root)")
        # After a later forward, with the new values, torch itself refuses the earlier graph.
        loss = model(x()).sum()
        optimizer.step()
        model(x())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@on_ranks(2)
def test_programs_that_do_it_right_are_told_nothing() -> None:
    """Other models' optimizers, closures, accumulation, evaluation, checkpoints of optimizers."""
    model, other = sharded(), sharded()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]

    def both() -> None:
        loss = model(x())
        other(loss.detach()).sum().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        loss.sum().backward()
        optimizers[0].step()
        with torch.no_grad():
            model(x())
        model(x()).sum().backward()
        optimizers[0].state_dict()

        def closure() -> torch.Tensor:
            loss = model(x()).sum()
            loss.backward()
            return loss

        optimizers[0].step(closure)

    told(both)


@on_ranks(2)
def test_options_of_the_model_that_only_an_inner_unit_has() -> None:
    def step(model: Any) -> None:
        model(x()).sum().backward()

    options: dict[str, Any]
    for options in ({"keep_gathered_bytes": 64}, {"memory_budget": 1 << 30}, {"report_nan_in_param_grad": True}):
        model: Any = plain()
        fully_shard(model[1], **options)
        fully_shard(model)
        told(partial(step, model), f"{next(iter(options))} of ['1'] does nothing", "the root's call")
        of_all: Any = plain()
        for module in (of_all[1], of_all):
            fully_shard(module, **options)
        told(partial(step, of_all))


@pytest.mark.parametrize("placements", PLACEMENTS)
@on_ranks(2)
def test_an_optimizer_made_before_fully_shard(placements: str) -> None:
    for make in (lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: libfsdp.optim.SGD(p, lr=0.1)):
        model = plain()
        optimizer = make(model.parameters())
        fully_shard(model[1], placements=placements)
        fully_shard(model, placements=placements)

        def body(model: Any = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(x()).sum().backward()
            optimizer.step()

        told(body, type(optimizer).__name__, "before fully_shard", "weight")
    # Of what is sharded no more, or was never.
    ignored = plain()
    model = plain()
    fully_shard(model[1])
    optimizer = torch.optim.SGD([*ignored.parameters(), *model.parameters()], lr=0.1)

    def right() -> None:
        (model(x()) + ignored(x())).sum().backward()
        optimizer.step()

    told(right)


@pytest.mark.parametrize("placements", PLACEMENTS)
@on_ranks(2)
def test_an_optimizer_made_of_whole_parameters(placements: str) -> None:
    model = sharded(placements)
    loss = model(x()).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # The root is whole, for backward.
    loss.backward()

    def body() -> None:
        optimizer.step()
        model(x()).sum().backward()

    told(body, "SGD does not train", "0.weight", "while they compute")


@pytest.mark.parametrize("placements", PLACEMENTS)
@on_ranks(2)
def test_an_optimizer_made_after_an_evaluation(placements: str) -> None:
    """Shards are shown after an evaluation, so that an optimizer that is made then trains all of them."""
    found = []
    for mode in (None, torch.no_grad, torch.inference_mode):
        model = sharded(placements)
        if mode is not None:
            with mode():
                model(x())
        shards = list(model.parameters())
        optimizer = torch.optim.SGD(shards, lr=0.1)
        for _ in range(2):
            model(x()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(p is q for p, q in zip(model.parameters(), shards, strict=True))
        found.append([p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in shards])
    assert all(torch.equal(p, q) for other in found[1:] for p, q in zip(found[0], other, strict=True))


def whole(p: torch.Tensor) -> torch.Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p.detach().clone()


@pytest.mark.parametrize("how", ["rows.data", "rows"])
@pytest.mark.parametrize("placements", PLACEMENTS)
@on_ranks(2)
def test_rows_that_are_assigned_are_adopted(placements: str, how: str) -> None:
    model = sharded(placements)
    for ran in (False, True):
        if ran:
            model(x()).sum().backward()
        before = [whole(p) for p in model.parameters()]
        given = []
        for p in model.parameters():
            rows = p._local_tensor if isinstance(p, DTensor) else p
            new = torch.full_like(rows, 0.25 if ran else 0.5)
            given.append(new)
            if how == "rows.data":
                rows.data = new
            elif isinstance(p, DTensor):
                p._local_tensor = new
            else:
                p.data = new
        found = model(x()).detach()
        reference = plain()
        for p, old in zip(reference.parameters(), before, strict=True):
            p.data = torch.full_like(old, 0.25 if ran else 0.5)
        torch.testing.assert_close(found, reference(x()).detach())


@on_ranks(2)
def test_data_of_a_dtensor_that_is_assigned() -> None:
    model = sharded()
    model(x()).sum().backward()
    with torch.no_grad():
        before = model(x())

    def body() -> None:
        for p in model.parameters():
            p.data = DTensor(torch.zeros_like(p._local_tensor), p._spec, requires_grad=False)
        with torch.no_grad():
            assert torch.equal(model(x()), before)
        model(x()).sum().backward()

    told(body, "assigning .data of", "'0.weight'", "copy_()")


@pytest.mark.parametrize("placements", PLACEMENTS)
@on_ranks(2)
def test_hooks_on_shards(placements: str) -> None:
    model = sharded(placements)
    calls: list[Any] = []
    handles = [p.register_hook(calls.append) for p in model.parameters()]
    removed = sharded(placements)
    for p in removed.parameters():
        p.register_hook(calls.append).remove()
    told(lambda: removed(x()).sum().backward())
    told(lambda: model(x()).sum().backward(), "register_hook", "'0.weight'", "never run")
    assert not calls
    for handle in handles:
        handle.remove()
    later = sharded(placements)
    later.set_manual_backward_finalization(True)
    for p in later.parameters():
        p.register_hook(calls.append)
    told(lambda: later(x()).sum().backward())
    told(lambda: later.finalize_backward(), "register_hook", "'0.weight'", "never run")
    assert not calls
    after = sharded(placements)
    for p in after.parameters():
        p.register_post_accumulate_grad_hook(calls.append)
    told(lambda: after(x()).sum().backward())
    assert len(calls) == 2 * len(list(model.parameters()))

    def early() -> None:
        model = plain()
        model[1].weight.register_hook(calls.append)
        fully_shard(model, placements=placements)

    with pytest.warns(UserWarning, match=r"hooks on \['weight'\] from before fully_shard never run"):
        early()


def write_whole(placements: str) -> None:
    """Writes to what modules show while it is whole; where that is no copy, nothing is lost."""
    loses = ("are lost at the next reshard", "weight'") if placements == "optim_grads_params" else ()

    def write(p: torch.Tensor) -> None:
        with torch.no_grad():
            p.mul_(2)

    model = sharded(placements)

    def unsharded() -> None:
        model[1].unshard()
        write(model[1].weight)
        model[1].reshard()

    told(unsharded, *loses)

    kept = sharded(placements)
    kept[1].set_reshard_after_forward(False)

    def after_forward() -> None:
        kept(x())
        write(kept[1].weight)
        kept.state_dict()

    told(after_forward, *loses)

    in_forward = sharded(placements)
    in_forward[1].register_forward_pre_hook(lambda module, _: write(module.weight))

    def run() -> None:
        with torch.no_grad():
            in_forward(x())

    told(run, *loses)


def write_shards(placements: str) -> None:
    """Steps, loads and the program's own writes to shards, with units that stay whole meanwhile."""
    model = sharded(placements)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body() -> None:
        model(x()).sum().backward()
        optimizer.step()
        model[1].unshard()
        model(x())
        with torch.no_grad():
            for p in model.parameters():
                p.grad = None
        model.unshard()
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        model.unshard()
        model(x()).sum().backward()
        with torch.no_grad():
            model[1].reshard()
            model[1].weight.mul_(2)
        model[1].unshard()
        model(x())

    told(body)


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_writes_to_unsharded_parameters(ranks: StartRanks, placements: str) -> None:
    ranks(2).run(write_whole, placements)
    ranks(2).run(write_shards, placements)
