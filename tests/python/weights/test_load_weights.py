"""Whole weights put into ordinary modules: what is in them then, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import clients, hugging_face
from support.marks import needs_transformers, on_ranks
from support.strategies import a_step
from support.training import CASES, batch_of, full, sharded
from support.weights import gathered
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import libfsdp


class Net(nn.Module):
    """Two linear layers, a buffer that counts, and a parameter under two names."""

    def __init__(self, seed: int = 0, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 3)
        self.tied = nn.Linear(3, 4, bias=False)
        if tied:
            self.tied.weight = self.first.weight
        self.register_buffer("count", torch.tensor([seed, 7]))
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_equal(module: nn.Module, expected: dict[str, Tensor]) -> None:
    found = module.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("form", ["pairs", "lists", "one list", "tuples of two", "iterator"])
def test_buckets_of_any_form(form: str) -> None:
    pairs = list(state(Net(1)).items())
    buckets: Any = {
        "pairs": pairs,
        "lists": [pairs[:2], [], pairs[2:]],
        "one list": [pairs],
        "tuples of two": [tuple(pairs[:2]), tuple(pairs[2:4]), *pairs[4:]],
        "iterator": iter(pairs),
    }[form]
    module = Net(0)
    libfsdp.load_weights(module, buckets)
    assert_equal(module, dict(pairs))


def test_tensors_stay_and_values_are_converted() -> None:
    module = Net(0).to(torch.bfloat16)
    before = {name: (value, value.data_ptr()) for name, value in module.state_dict(keep_vars=True).items()}
    expected = state(Net(1))
    libfsdp.load_weights(module, expected.items())
    for name, (value, address) in before.items():
        assert module.state_dict(keep_vars=True)[name] is value
        assert value.data_ptr() == address
        assert torch.equal(value, expected[name].to(value.dtype)), name
    assert module.count.dtype == torch.long
    assert module.first.weight.requires_grad
    assert torch.equal(module.scratch, Net(0).scratch.to(torch.bfloat16))  # a stream does not have it


def test_a_tied_parameter_needs_one_of_its_names() -> None:
    expected = state(Net(1))
    for left_out in ("first.weight", "tied.weight"):
        module = Net(0)
        libfsdp.load_weights(module, [pair for pair in expected.items() if pair[0] != left_out])
        assert_equal(module, expected)
    untied = Net(0, tied=False)
    libfsdp.load_weights(untied, expected.items())
    assert_equal(untied, expected)


def test_names_of_the_receiver() -> None:
    expected = state(Net(1))
    module = Net(0)
    sent = [("model." + name, value) for name, value in expected.items()]
    libfsdp.load_weights(module, sent, rename=lambda name: name.removeprefix("model."))
    assert_equal(module, expected)


def test_some_names_alone() -> None:
    module, new = Net(0), state(Net(1))
    old = state(module)
    names = ["first.bias", "count"]
    libfsdp.load_weights(module, [(name, new[name]) for name in names], names=names)
    assert_equal(module, {name: (new if name in names else old)[name] for name in old})


def refused(text: str, buckets: Any, module: nn.Module | None = None, **options: Any) -> nn.Module:
    module = Net(0) if module is None else module
    with pytest.raises(libfsdp.Error, match=text) as caught:
        libfsdp.load_weights(module, buckets, **options)
    assert str(caught.value).startswith("load_weights: ")
    return module


def test_what_comes_must_fit() -> None:
    new = state(Net(1))
    old = state(Net(0))
    first = [(name, new[name]) for name in ("first.weight", "first.bias")]
    wrong = [
        ("second.weight", new["second.weight"]),
        ("second.wight", new["second.weight"]),
        ("second.bias", torch.zeros(4)),
        ("scratch", torch.zeros(2)),
    ]
    module = refused(
        r"bucket 2: no parameter or buffer 'second.wight', 'second.bias' is \[4\], and here \[3\], no parameter or buffer "
        r"'scratch'; 2 of 6 were loaded before, the last of them 'first.bias'",
        [first, wrong],
    )
    # The first bucket is there, and nothing of the second.
    assert_equal(module, {**old, **dict(first), "tied.weight": new["first.weight"]})
    refused(r"bucket 1: .*; 0 of 6 were loaded before$", [wrong])
    refused(r"bucket 3: 'first.bias' was received before", [*first, first[1]])
    refused(
        r"'b' \(here 'first.bias'\) was received before, as 'a'",
        [[("a", new["first.bias"]), ("b", new["first.bias"])]],
        rename=lambda _: "first.bias",
    )
    many = [(f"wrong.{k}", torch.zeros(1)) for k in range(9)]
    refused(r"'wrong.0', .*'wrong.4' and 4 more; 0 of 6", [many])
    for entry in ("first.bias", ("first.bias", [1.0]), ("first.bias",), (1, torch.zeros(4))):
        refused("bucket 1: expected a name and a tensor, got ", [[entry]])


def test_all_must_come() -> None:
    new = state(Net(1))
    without = [pair for pair in new.items() if pair[0] not in ("count", "second.bias")]
    refused(
        r"'count', 'second.bias' did not arrive; 4 of 6 were loaded before, the last of them 'tied.weight'", [without]
    )
    refused(r"'first.bias' did not arrive; 1 of 2 were", [("count", new["count"])], names=["count", "first.bias"])
    refused(r"no parameter or buffer 'first.bias'", [("first.bias", new["first.bias"])], names=["count"])
    refused(r"names: no parameter or buffer 'first.scale' in Net", [], names=["count", "first.scale"])
    refused(r"names must be a list of names, or None, got 'count'", [], names="count")


def test_tied_names_that_differ() -> None:
    new = state(Net(1, tied=False))
    refused(r"'first.weight' and 'tied.weight' are tied here, and came with different values; ", [new.items()])


def test_tied_names_may_both_have_nan() -> None:
    new = dict(Net(1).state_dict())
    new["first.weight"][0, 0] = float("nan")
    module = Net()
    libfsdp.load_weights(module, [list(new.items())])
    assert torch.equal(module.first.weight.isnan(), new["first.weight"].isnan())


def test_modules_that_cannot_be_filled() -> None:
    with torch.device("meta"):
        module = Net()
    refused(r"'first.weight' is on the meta device: call module.to_empty", [], module)


@on_ranks(2)
def test_sharded_modules_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    module = Net()
    module.second.weight = nn.Parameter(distribute_tensor(module.second.weight.detach(), mesh))
    refused(r"'second.weight' is a DTensor: only ordinary modules can be filled", [], module)


def test_what_hooks_put_into_a_state_dict_is_not_loaded() -> None:
    module = Net(0)
    module.register_state_dict_post_hook(lambda _, found, prefix, __: found.update({prefix + "made": torch.ones(1)}))
    expected = state(Net(1))
    libfsdp.load_weights(module, expected.items())
    refused("no parameter or buffer 'made'", [("made", torch.zeros(1))], module)


@pytest.mark.parametrize(
    "name", ["tied", "batch_norm", "odd_shapes", *(pytest.param(c, marks=needs_transformers) for c in CASES if "llama" in c)]
)
@on_ranks(2)
def test_weights_of_a_sharded_model(name: str) -> None:
    model = sharded(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    receiver = CASES[name].build()
    for step in range(2):
        a_step(model, name, step, optimizer)
        libfsdp.load_weights(receiver, libfsdp.full_weights(model, bucket_bytes=1000))
        assert_equal(receiver, gathered(model))
    of_first: Any = libfsdp.full_weights(model, dtype=torch.bfloat16, ranks="first")
    if dist.get_rank() == 0:
        libfsdp.load_weights(receiver, of_first)
    else:
        assert [list(bucket) for bucket in of_first] == [[]] * len(of_first)
    for key, value in receiver.state_dict().items():
        whole = full(model.state_dict()[key])
        wanted = whole.bfloat16() if dist.get_rank() == 0 and whole.is_floating_point() else whole
        assert torch.equal(value, wanted.to(value.dtype)), key


@pytest.mark.parametrize("kind", ["stream", "generator", "names"])
@on_ranks(2)
def test_a_receiver_that_does_not_fit_stops_the_stream(kind: str) -> None:
    """One rank's module does not fit: the others get an error, and training goes on."""
    case = CASES["mlp"]
    model = sharded("mlp")
    receiver = case.build()
    if dist.get_rank() == 0 and kind != "names":
        receiver.layers[0] = nn.Linear(1, 1)
    names = ["typo"] if dist.get_rank() == 0 and kind == "names" else None
    weights: Any = libfsdp.full_weights(model, bucket_bytes=1)
    if kind == "generator":
        weights = iter(libfsdp.WeightSource(model, bucket_bytes=1))
    with pytest.raises(libfsdp.Error) as caught:  # which keeps the traceback, and what its frames have
        libfsdp.load_weights(receiver, weights, names=names)
    rank = dist.get_rank()
    own = "load_weights: names" if kind == "names" else "load_weights: bucket "
    assert (own if rank == 0 else "rank 0 has stopped before bucket") in str(caught.value)
    case.loss(model, batch_of(case, 0, 0, rank)).backward()
    libfsdp.load_weights(case.build(), libfsdp.full_weights(model))


@pytest.mark.skipif(not clients.installed_packages("transformers", "peft"), reason="needs transformers and peft")
@on_ranks(2)
def test_adapters_alone() -> None:
    from peft import LoraConfig, get_peft_model

    def make() -> Any:
        base: Any = hugging_face.build("Llama", "LlamaForCausalLM", **hugging_face.DECODER)()
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))

    torch.manual_seed(0)
    model = make()
    generator = copy.deepcopy(model)
    base = state(generator)
    for layer in model.base_model.model.model.layers:
        libfsdp.fully_shard(layer)
    libfsdp.fully_shard(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    before = libfsdp.wire_stats(model)["all_gather_bytes"]

    adapters = [name for name in model.state_dict() if "lora_" in name]
    libfsdp.load_weights(generator, libfsdp.full_weights(model, names=adapters), names=adapters)

    sent = libfsdp.wire_stats(model)["all_gather_bytes"] - before
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sent == sum(p._local_tensor.nbytes for p in trained)
    for name, value in generator.state_dict().items():
        assert torch.equal(value, full(model.state_dict()[name])), name
        assert torch.equal(value, base[name]) == (name not in adapters), name


def test_an_error_of_the_iterator_passes() -> None:
    new = state(Net(1))

    def buckets() -> Iterator[tuple[str, Tensor]]:
        yield "first.bias", new["first.bias"]
        raise ConnectionError("gone")

    module = Net(0)
    with pytest.raises(ConnectionError, match="gone"):
        libfsdp.load_weights(module, buckets())
    assert torch.equal(module.first.bias, new["first.bias"])


class Unwritable(torch.Tensor):
    """Quantized numbers that nobody can write."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            raise NotImplementedError("copy_")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_that_takes_no_values_is_named() -> None:
    module = nn.Linear(2, 3)
    module.weight = nn.Parameter(torch.ones(3, 2).as_subclass(Unwritable), requires_grad=False)
    with pytest.raises(libfsdp.Error) as caught:
        libfsdp.load_weights(module, [("bias", torch.ones(3)), ("weight", torch.ones(3, 2))])
    text = str(caught.value)
    assert "'weight' is a Unwritable, into which a Tensor of torch.float32 can't be copied (copy_); 1 of 2 were loaded" in text
    assert "load into a module that is not quantized" in text
