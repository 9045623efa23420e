"""Modules that not all ranks use in every forward.

The references are a pass whose gradients are zero, to the last bit, and the plain model in one process.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparison import differences  # noqa: F401  # it makes MKL's products independent of addresses
from support.errors import raises
from support.marks import needs_transformers, on_ranks
from support.ranks import PRELOADED
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import libfsdp
from libfsdp import FSDPModule, attend, fully_shard

PRELOADED.append("transformers.models.llava.modeling_llava")
WIDTH = 8
EXPERTS = 3


class Expert(nn.Sequential):
    """A unit with a unit in it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))


class Layer(nn.Module):
    """Uses the experts for which this rank has tokens, and runs the others on zeros where it does not attend."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor, uses: list[bool], used: list[bool], attends: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        result = x.clone()  # Its gradient is added last, whichever experts are used.
        for k, expert in enumerate(self.experts):
            if attends:
                attend(expert, uses[k])
            if uses[k]:
                result = result + expert(x[k : k + 2]).mean()
            elif not attends and used[k]:
                result = result + expert(x[:2] * 0).mean() * 0
        return result


class Mixture(nn.Module):
    """Two layers with experts."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor, step: int, attends: bool, ranks: list[int]) -> Tensor:
        """Computes what each of these ranks would."""
        for k, layer in enumerate(self.layers):
            uses = [any(is_used(step, rank, 3 * k + expert) for rank in ranks) for expert in range(EXPERTS)]
            everyone = range(dist.get_world_size())
            used = [any(is_used(step, rank, 3 * k + expert) for rank in everyone) for expert in range(EXPERTS)]
            run = functools.partial(layer, uses=uses, used=used, attends=attends)
            x = run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant)
        return self.head(x)

    def shard(self, **options: Any) -> Any:
        for layer in self.layers:
            for expert in layer.experts:
                fully_shard(expert[0], **options)
                fully_shard(expert, **options)
            fully_shard(layer, **options)
        return fully_shard(self, **options)


def is_used(step: int, rank: int, part: int) -> bool:
    """Some parts are used by all ranks, by none, by all but the last one, and by the last one alone; the others, by some."""
    last = rank == dist.get_world_size() - 1
    certain = {0: True, 1: False, 2: not last, 3: last}
    return certain.get((step + part) % 6, (step * 5 + rank * 3 + part) % 4 < 2)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), requires_grad=True)


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: Any, *, attends: bool, accumulates: bool = False, together: bool = False, visible: bool = False) -> list[Any]:
    """Losses, gradients and parameters of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    rank, found = dist.get_rank(), []
    each = 2 if accumulates else 1

    def forward(number: int) -> Tensor:
        return model(batch(number, rank), number, attends, [rank]).float().square().mean()

    def backward(loss: Tensor, k: int) -> None:
        model.set_requires_gradient_sync(k == each - 1)
        loss.backward()

    for step in range(6):
        with CommDebugMode() if visible and step % 2 == 1 else nullcontext():
            if together:
                for k, loss in enumerate([forward(each * step + k) for k in range(each)]):
                    backward(loss, k)
            else:
                for k in range(each):
                    backward(forward(each * step + k), k)
        stats = libfsdp.memory_stats(model)
        assert stats["unreduced_gradients.live"] == stats["communication.live"] == 0
        found += [full(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(batch(step, rank), step + 1, attends, [rank]))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # What an option keeps after a forward is unsharded on the ranks that have used it.
    return [*found, *(full(parameter) for parameter in model.parameters())]


def assert_as_zeros(make: Callable[[], Any], **how: Any) -> None:
    expected, actual = train(make(), attends=False, **how), train(make(), attends=True, **how)
    assert len(actual) == len(expected)
    for k, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert (one is None) == (other is None), k
        assert one is None or torch.equal(one, other), (k, (one - other).abs().max())


OPTIONS: dict[str, dict[str, Any]] = {
    **{placements: {"placements": placements} for placements in ("no_shard", "optim", "optim_grads", "optim_grads_params")},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "kept": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on_ranks(2, 3, 4)
def test_as_a_pass_on_zeros(options: dict[str, Any]) -> None:
    assert_as_zeros(lambda: Mixture().shard(**options))


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
@on_ranks(4)
def test_as_a_pass_on_zeros_on_two_dimensions(outer: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    options = {"mesh": mesh, **({} if outer == "no_shard" else {"outer_placements": outer})}
    assert_as_zeros(lambda: Mixture().shard(**options))


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_as_a_pass_on_zeros_with_checkpoints(reentrant: bool) -> None:
    assert_as_zeros(lambda: Mixture(reentrant).shard())


@pytest.mark.parametrize("together", [False, True])
@on_ranks(2, 3)
def test_as_a_pass_on_zeros_with_accumulation(together: bool) -> None:
    assert_as_zeros(lambda: Mixture().shard(), accumulates=True, together=together)


@on_ranks(2, 3)
def test_as_a_pass_on_zeros_by_process_groups_of_torch() -> None:
    assert_as_zeros(lambda: Mixture().shard(), visible=True)


@on_ranks(2, 4)
def test_a_mixture_trains_as_in_one_process() -> None:
    """Each expert is a unit; some have no token on some ranks, or on all."""
    plain, ranks = Mixture(), dist.get_world_size()
    model = copy.deepcopy(plain).shard()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, model)]
    for step in range(5):
        for rank in range(ranks):
            (plain(batch(step, rank), step, False, [rank]).square().mean() / ranks).backward()
        model(batch(step, dist.get_rank()), step, True, [dist.get_rank()]).square().mean().backward()
        unused = 0
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            is_none = other.grad is None or not bool(other.grad.any())
            assert (one.grad is None) <= is_none, name
            unused += one.grad is None
            if one.grad is not None:
                assert other.grad is not None
                torch.testing.assert_close(full(one.grad), other.grad, rtol=1e-4, atol=1e-6)
        assert unused > 0
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def sent_since(before: dict[str, int], model: Any) -> dict[str, int]:
    """The bytes that this rank has sent. Process groups count those of all models."""
    return {name: value - before[name] for name, value in libfsdp.wire_stats(model).items()}


@on_ranks(2)
def test_parameters_that_no_rank_uses_are_skipped() -> None:
    """They have no gradient, so that weight decay does not change them. Nothing is sent for them."""
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), fully_shard(nn.Linear(WIDTH, WIDTH))))
    model.register_forward_pre_hook(lambda module, args: attend(module[1], False))
    model.forward = lambda x: nn.Module.__call__(model[0], x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(torch.ones(2, WIDTH))
    before, so_far = full(model[1].weight.detach()).clone(), libfsdp.wire_stats(model)
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        assert model[0].weight.grad is not None
        assert model[1].weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(full(model[1].weight.detach()), before)
    sent = sent_since(so_far, model)
    used = 4 * (WIDTH * WIDTH + WIDTH) // 2  # this rank's shard of the first layer
    assert 0 < sent["all_gather_bytes"] <= 6 * used
    assert sent["reduce_scatter_bytes"] == 3 * used


class Parts(nn.Module):
    """A trunk, and a large part that some ranks skip."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(WIDTH, 16)
        self.part = nn.Linear(16, width)

    def forward(self, x: Tensor, uses: bool, **options: Any) -> Tensor:
        attend(self.part, uses, **options)
        x = self.trunk(x)
        return x.sum() + (self.part(x).sum() if uses else 0)

    def shard(self) -> Any:
        fully_shard(self.part)
        return fully_shard(self)


@on_ranks(2, 4)
def test_an_absent_rank_neither_receives_nor_holds_the_part() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    absent = rank > 0
    model = Parts().shard()
    shard = 4 * 64 * (16 + 1) // ranks
    trunk = 4 * 16 * (WIDTH + 1)
    model(batch(0, rank), not absent).backward()
    so_far = libfsdp.wire_stats(model)
    libfsdp.reset_peak_memory_stats(model)
    model(batch(1, rank), not absent).backward()
    stats, sent = libfsdp.memory_stats(model), sent_since(so_far, model)
    part = ranks * shard
    assert stats["gathered_parameters.peak"] == (trunk if absent else trunk + part)
    assert (stats["unreduced_gradients.peak"] <= 2 * trunk) == absent
    # Each rank sends its shard to those that are present, and those that are present send gradients to all.
    others = ranks - 1
    assert sent["all_gather_bytes"] == (shard if absent else 0) + others * trunk // ranks
    assert sent["reduce_scatter_bytes"] == (0 if absent else others * shard) + others * trunk // ranks
    assert stats["communication.peak"] <= shard  # with shared memory, nothing


@pytest.mark.parametrize("present", [1, 2])
@on_ranks(3)
def test_division_by_the_ranks_that_are_present(present: int) -> None:
    rank = dist.get_rank()
    gradients = []
    for divides, factor in ((True, 0.0), (False, float(present))):
        model = Parts().shard()
        if factor:
            model.part.set_gradient_divide_factor(factor)
        model(batch(0, rank), rank < present, divide_by_present=divides).backward()
        gradients.append((full(model.part.weight.grad), full(model.trunk.weight.grad)))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
    with raises(libfsdp.Error, "set_gradient_divide_factor", "divide_by_present"):
        model(batch(0, rank), True, divide_by_present=True)


@on_ranks(2)
def test_where_it_may_be_called() -> None:
    model = Parts().shard()
    with raises(RuntimeError, "within the forward of the root"):
        attend(model.part, True)
    with raises(ValueError, "attend expects", "Call fully_shard on it"):
        attend(nn.Linear(2, 2), True)
    with raises(TypeError, "present is 'yes': give True or False"):
        model(batch(0, 0), "yes")
    model(batch(0, 0), True).backward()


@on_ranks(2)
def test_a_rank_that_uses_what_it_skips() -> None:
    model = Parts().shard()
    model(batch(0, 0), True).backward()

    def lie(x: Tensor) -> Tensor:
        attend(model.part, dist.get_rank() == 0)
        return model.part(model.trunk(x)).sum()

    model.forward = lie
    if dist.get_rank() == 1:
        with raises(libfsdp.Error, "rank 1 uses unit 'part'", "present = false", "on all ranks before each use"):
            model(batch(0, 0))
    else:
        model(batch(0, 0))


@pytest.mark.parametrize("attends", ["none", "other", "late"])
@on_ranks(2, fresh=True)
def test_a_rank_that_skips_without_saying_so(attends: str) -> None:
    """Both ranks get one error, which names what to call."""
    model, rank = Parts().shard(), dist.get_rank()

    def diverge(x: Tensor) -> Tensor:
        if attends != "none" and rank == 0:
            attend(model.part, True)
        x = model.trunk(x)
        result = x.sum()
        if attends == "late" or rank == 0:
            result = result + model.part(x).sum()
        if attends == "late" and rank == 1:
            attend(model.part, True)
        return result

    model.forward = diverge
    what = "all-gather" if attends == "none" else "attendance"
    with raises(libfsdp.CommError, "the ranks make different calls", f"{what} of unit 'part'", "call attend()"):
        model(batch(0, 0)).backward()
        dist.barrier()


@needs_transformers
@on_ranks(2)
def test_a_multimodal_model_of_transformers() -> None:
    """One rank has no images, then none has; as in one process."""
    transformers: Any = importlib.import_module("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=8),
        text_config=transformers.LlamaConfig(**sizes, vocab_size=24, num_key_value_heads=2),
        image_token_id=23,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    plain = transformers.LlavaForConditionalGeneration(config)
    model: Any = copy.deepcopy(plain)
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    # The tower itself stays what it is, as transformers looks hidden states up by its class. The root has its norms.
    inside = [one for one in tower.modules() if type(one).__name__ in ("CLIPEncoderLayer", "CLIPVisionEmbeddings")]
    assert len(inside) == 3
    for module in (*inside, projector, *model.model.language_model.layers, model):
        fully_shard(module)

    def attend_to_images(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        for module in (tower, projector):
            attend(module, kwargs.get("pixel_values") is not None)

    model.register_forward_pre_hook(attend_to_images, with_kwargs=True)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, model)]
    for step in range(4):
        has_images = {0: (True, False), 1: (False, False), 2: (False, True), 3: (True, True)}[step]
        for rank in range(2):
            generator = torch.Generator().manual_seed(10 * step + rank)
            tokens = torch.randint(22, (2, 9), generator=generator)
            given: dict[str, Any] = {"input_ids": tokens, "labels": tokens.clone()}
            if has_images[rank]:
                tokens[:, :4] = 23
                given["pixel_values"] = torch.randn(2, 3, 8, 8, generator=generator)
            (plain(**given).loss / 2).backward()
            if rank == dist.get_rank():
                model(**given).loss.backward()
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            gradient = full(one.grad)
            assert (gradient is None) == (other.grad is None), (step, name)
            if gradient is not None:
                torch.testing.assert_close(gradient, other.grad, rtol=1e-3, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(one), other, rtol=1e-2, atol=1e-3)
