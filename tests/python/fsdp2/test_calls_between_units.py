"""Units that call units which are not below them, and groups whose weights are read between calls of their modules.

What has been entered and not left is never evicted. The reference is FSDP2 on the same ranks, to the last bit, and the plain model.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import device, hugging_face
from support.comparison import differences  # noqa: F401  # it makes MKL's products independent of addresses
from support.marks import at_night, on_ranks
from support.models import VOCABULARY
from support.ranks import PRELOADED, ComparedRanks, run_both
from support.states import assert_equal
from support.training import api, full
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import libfsdp

# What is common to its models takes most of their imports.
PRELOADED.append("transformers.models.t5.modeling_t5")
Units = Callable[[Any], list[Any]]
WIDTH = 8


class Auxiliary(nn.Module):
    """Calls a head that is not below it, between its own parameters."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.before, self.head, self.after = nn.Linear(WIDTH, WIDTH), head, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.head(self.before(x)))


class Direct(Auxiliary):
    """Its output is the head's: two units have hooks on one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.before(x)))


class TwoOwners(nn.Module):
    """A head that the root calls, and that lies below another unit, too."""

    def __init__(self, kind: type[Auxiliary], *, repeats: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.auxiliary = kind(self.head)
        self.last = nn.Linear(WIDTH, 4)
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        auxiliary = checkpoint(self.auxiliary, x, use_reentrant=False) if self.repeats else self.auxiliary(x)
        return self.last(self.head(x) + auxiliary)


class Early(nn.Module):
    """Reads the head's weight before it calls the head: with the embedding, that is one group."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.block(self.embed(x)))
        return x @ self.head.weight.t() + self.head(x)


class PassesOn(nn.Module):
    """Returns a tensor that it was given, as blocks of T5 do with the bias of positions that the first one has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            bias = self.bias(x)
        return torch.tanh(self.layer(x)) + bias, bias


class Passed(nn.Module):
    """Three such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(PassesOn() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, bias = torch.tanh(self.embed(x)), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class Recursive(nn.Module):
    """Calls itself, and then uses its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.inner(x))
        return self.outer(self(x, depth - 1) if depth else x)


class Predictor(nn.Module):
    """One more token ahead, by the trunk's own head (multi-token prediction)."""

    def __init__(self, embed: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = embed, head
        self.join, self.block = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.block(self.join(torch.cat([hidden, self.embed(ids)], -1))))
        return hidden, self.head(hidden)


class MultiToken(nn.Module):
    """A trunk and two predictors that share its embedding and its head, whose weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.predictors = nn.ModuleList(Predictor(self.embed, self.head) for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        logits = [self.head(hidden)]
        for predictor in self.predictors:
            ids = ids.roll(-1, 1)
            hidden, ahead = predictor(hidden, ids)
            logits.append(ahead)
        return torch.stack(logits)


def transformer(family: str, model: str, **config: Any) -> Callable[[], nn.Module]:
    small = {"vocab_size": VOCABULARY, "d_model": 16, "decoder_start_token_id": 0, "pad_token_id": 0}
    return hugging_face.build(family, model, **small, **config)


# With one decoder layer, no tensor goes into two units, whose hooks change the order in which autograd adds up with FSDP2.
t5 = transformer(
    "T5",
    "T5ForConditionalGeneration",
    d_kv=8,
    d_ff=24,
    num_layers=2,
    num_decoder_layers=1,
    num_heads=2,
    dropout_rate=0.0,
)
bart = transformer(
    "Bart",
    "BartForConditionalGeneration",
    encoder_layers=2,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    max_position_embeddings=16,
    dropout=0.0,
)


def tied(model: Any) -> list[nn.Module]:
    """All modules that have the embedding's weight."""
    weight = model.get_input_embeddings().weight
    return [module for module in model.modules() if any(p is weight for p in module._parameters.values())]


def blocks(model: Any) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in ("T5Block", "BartEncoderLayer", "BartDecoderLayer")]


def stacks(model: Any) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in ("T5Stack", "BartEncoder", "BartDecoder")]


MODELS: dict[str, tuple[Callable[[], nn.Module], Units]] = {
    "called between own parameters": (lambda: TwoOwners(Auxiliary), lambda m: [m.head, m.auxiliary]),
    "called last": (lambda: TwoOwners(Direct), lambda m: [m.head, m.auxiliary]),
    "called in a region that is repeated": (
        lambda: TwoOwners(Auxiliary, repeats=True),
        lambda m: [m.head, m.auxiliary],
    ),
    "a group with another unit between": (Early, lambda m: [[m.embed, m.head], m.block]),
    "tensors that are passed on": (Passed, lambda m: list(m.blocks)),
    "predictors": (MultiToken, lambda m: [[m.embed, m.head], *m.blocks, *m.predictors]),
    "predictors, blocks of the root": (MultiToken, lambda m: [[m.embed, m.head], *m.predictors]),
    "t5, tied group and blocks": (t5, lambda m: [tied(m), *blocks(m)]),
    "t5, tied group and stacks": (t5, lambda m: [tied(m), *stacks(m)]),
    "t5, all": (t5, lambda m: [tied(m), *blocks(m), *stacks(m)]),
    "bart, tied group and blocks": (bart, lambda m: [tied(m), *blocks(m)]),
    "bart, tied group and stacks": (bart, lambda m: [tied(m), *stacks(m)]),
}


def is_of_transformers(name: str) -> bool:
    return name.startswith(("t5", "bart"))


def loss_of(name: str, model: Callable[..., Any], step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if is_of_transformers(name):
        ids = torch.randint(1, VOCABULARY, (2, 6), generator=generator)
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    if name.startswith("predictors"):
        return model(torch.randint(VOCABULARY, (2, 6), generator=generator)).square().mean()
    return model(torch.randn(3, WIDTH, generator=generator)).square().mean()


def sharded(name: str, implementation: str) -> tuple[nn.Module, Any]:
    """The plain model, and a sharded copy."""
    build, units = MODELS[name]
    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    fully_shard = api(implementation).fully_shard
    for unit in units(model):
        fully_shard(unit)
    return plain, fully_shard(model)


def train(implementation: str, name: str) -> list[tuple[float, dict[str, Tensor]]]:
    """Three steps, with an evaluation in between: losses and gradients."""
    _, model = sharded(name, implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The order of a sum over four ranks is another one with FSDP2's collectives: only equal gradients have one sum.
    rank = dist.get_rank() if dist.get_world_size() == 2 else 0
    seen = []
    for step in range(3):
        loss = loss_of(name, model, step, rank)
        loss.backward()
        seen.append((loss.item(), {key: full(p.grad) for key, p in model.named_parameters() if p.grad is not None}))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append((loss_of(name, model, step, rank).item(), {}))
    return seen


@pytest.mark.parametrize("size", [2, at_night(4)])
@pytest.mark.parametrize("name", MODELS)
def test_as_fsdp2(name: str, size: int, compared_ranks: ComparedRanks) -> None:
    if is_of_transformers(name) and not hugging_face.available():
        pytest.skip("not installed: transformers")
    assert_equal(*run_both(compared_ranks, size, train, name))


@pytest.mark.parametrize("name", (name for name in MODELS if not is_of_transformers(name)))
@on_ranks(2)
def test_as_the_plain_model(name: str) -> None:
    """Forwards in all grad modes, and the gradients of one backward after two forwards."""
    plain, model = sharded(name, "libfsdp")
    wrong = []
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            got, expected = (loss_of(name, m, 0, 0) for m in (model, plain))
            if not torch.allclose(got, expected, atol=1e-6):
                wrong.append(mode.__name__)
    for m in (model, plain):
        (loss_of(name, m, 1, 0) + loss_of(name, m, 2, 0)).backward()
    for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if (p.grad is None) != (q.grad is None) or (
            q.grad is not None and not torch.allclose(full(p.grad), q.grad, atol=1e-6)
        ):
            wrong.append(key)
    assert wrong == []


@on_ranks(2)
def test_a_unit_that_calls_itself() -> None:
    """FSDP2 can't: the inner call's end takes the outer one's parameters away."""
    torch.manual_seed(0)
    plain = nn.Sequential(Recursive(), nn.Linear(WIDTH, 4))
    model: Any = copy.deepcopy(plain)
    libfsdp.fully_shard(model[0])
    libfsdp.fully_shard(model)
    x = torch.randn(3, WIDTH)
    for m in (model, plain):
        m(x).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, rtol=0, atol=1e-6)


class Generates(nn.Module):
    """A method calls the module itself, and uses its parameters afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.block(x))

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.head(self(x))
        return x


@on_ranks(2)
def test_a_method_that_calls_its_module() -> None:
    torch.manual_seed(0)
    plain = Generates().to(device.TYPE)
    model: Any = copy.deepcopy(plain)
    libfsdp.fully_shard(model.block)
    libfsdp.fully_shard(model)
    libfsdp.register_fsdp_forward_method(model, "generate")
    x = torch.ones(2, WIDTH, device=device.TYPE)
    with torch.no_grad():
        assert torch.equal(model.generate(x), plain.generate(x))
        assert torch.equal(model(x), plain(x))
    assert isinstance(model.generate, types.MethodType)
