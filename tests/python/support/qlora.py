"""QLoRA: bitsandbytes' four-bit weights, which are frozen, under peft's adapters, which are trained."""

from __future__ import annotations

import copy
import importlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from support import hugging_face
from support.clients import STEPS, Trained, common_folder
from support.training import api, full

VOCABULARY = 64
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


def make(options: str, seed: int = 0) -> Any:
    """A model, the same wherever it is made with the seed.

    Options: the dtype that codes are stored in, "uint8" by default; "double" also quantizes the scales; "checkpointing" lets
    the embedding's result have gradients.
    """
    import bitsandbytes
    from peft import LoraConfig, get_peft_model

    words = options.split()
    storage = next((getattr(torch, word) for word in words if word in ("bfloat16", "float32")), torch.uint8)
    torch.manual_seed(seed)
    base: Any = hugging_face.build("Llama", "LlamaForCausalLM", **LLAMA)()
    kind = {"quant_type": "nf4", "quant_storage": storage, "compress_statistics": "double" in words}
    for layer in base.model.layers:
        for name, linear in [(n, m) for n, m in layer.named_modules() if isinstance(m, nn.Linear)]:
            made = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, **kind)
            made.load_state_dict({"weight": linear.weight.data})
            layer.set_submodule(name, made.to("cpu"))  # which quantizes
    base.is_loaded_in_4bit = True  # as from_pretrained does
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = get_peft_model(base, adapters).train()
    if "checkpointing" in words:
        model.enable_input_require_grads()  # without which a first product that needs no gradient takes another kernel
    return model


def blocks(model: Any) -> list[nn.Module]:
    """The units besides the root."""
    return list(model.base_model.model.model.layers)


def packed(module: nn.Module) -> list[Any]:
    """Its modules with four-bit weights."""
    import bitsandbytes

    return [m for m in module.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]


def shard(model: Any, implementation: str, options: str, **arguments: Any) -> Any:
    """Options: "policy" computes in bfloat16; "checkpointing" repeats the blocks' forwards; "offload"."""
    fsdp = api(implementation)
    if "policy" in options:
        arguments["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "offload" in options:
        arguments["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=False)
    if "checkpointing" in options:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for block in blocks(model):
        fsdp.fully_shard(block, **arguments)
    return fsdp.fully_shard(model, **arguments)


def ids(step: int, rank: int) -> Tensor:
    """A rank's batch of tokens."""
    return torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(100 * step + rank))


def trained_ones(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def bits(tensor: Tensor) -> Tensor:
    """Whole, as integers: codes that are stored in a floating-point dtype may be NaN there."""
    return full(tensor).contiguous().view(torch.uint8)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Updates that are large enough to show every error."""
    return torch.optim.AdamW(trained_ones(model).values(), lr=0.01)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The losses of this rank."""
    losses = []
    for step in steps:
        batch = ids(step, dist.get_rank())
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def with_qlora(implementation: str, options: str) -> Trained:
    """Some steps, sharded."""
    model = shard(make(options), implementation, options)
    losses = train(model, optimizer_of(model), range(STEPS))
    return Trained(losses=losses, parameters={name: bits(p) for name, p in model.named_parameters()})


def in_one_process(world: int, options: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The same training of one model without sharding: the losses by rank, and the bits of all parameters."""
    model = make(options)
    masters = trained_ones(model)
    optimizer = optimizer_of(model)
    kept = {name: p for name, p in model.named_parameters()}
    computed = make(options) if "policy" in options else model  # in the dtype of the computation
    if computed is not model:
        codes = {id(linear.weight) for linear in packed(computed)}
        for p in computed.parameters():
            if id(p) not in codes:
                p.data = p.data.to(torch.bfloat16)
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(STEPS):
        leaves = trained_ones(computed)
        by_rank: list[dict[str, Tensor]] = []
        for rank in range(world):
            if computed is not model:
                for name, leaf in leaves.items():
                    leaf.data.copy_(masters[name].data)
            loss = computed(input_ids=ids(step, rank), labels=ids(step, rank)).loss
            losses[rank].append(loss.item())
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            by_rank.append({name: gradient.float() for name, gradient in zip(leaves, gradients, strict=True)})
        for name, master in masters.items():
            terms = [of_rank[name] for of_rank in by_rank]
            while len(terms) > 1:  # in pairs, as the engine adds up
                terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
            master.grad = terms[0] / world
        optimizer.step()
    return losses, {name: bits(p) for name, p in kept.items()}


def gathered_bytes(options: str) -> tuple[int, int]:
    """What this rank has sent for one gather of each unit, and what that is for codes and other parameters in their dtypes."""
    libfsdp = importlib.import_module("libfsdp")
    model = make(options)
    codes = sum(linear.weight.nbytes for linear in packed(model))
    others = sum(p.numel() for p in model.parameters()) - sum(linear.weight.numel() for linear in packed(model))
    size = others * (2 if "policy" in options else 4) + codes
    shard(model, "libfsdp", options)
    batch = ids(0, 0)
    with torch.no_grad():
        model(input_ids=batch)
        before = libfsdp.wire_stats(model)["all_gather_bytes"]
        model(input_ids=batch)
    world = dist.get_world_size()
    assert size % world == 0
    return libfsdp.wire_stats(model)["all_gather_bytes"] - before, size // world * (world - 1)


@contextmanager
def seen_in_forward(model: Any, see: Callable[[Any], None]) -> Iterator[None]:
    """Calls `see` with each module of four-bit weights, in its forward."""
    hooks = [linear.register_forward_pre_hook(lambda linear, _: see(linear)) for linear in packed(model)]
    yield
    for hook in hooks:
        hook.remove()


def check_forms(options: str) -> None:
    """The class, quant_state and codes of weights while they are gathered, and between steps."""
    import bitsandbytes

    model = make(options)
    codes = {linear: linear.weight.detach().clone().view(torch.uint8) for linear in packed(model)}
    states = {linear: linear.weight.quant_state for linear in packed(model)}
    shard(model, "libfsdp", options)
    seen = []

    def see(linear: Any) -> None:
        weight = linear.weight
        assert type(weight) is bitsandbytes.nn.Params4bit
        assert weight.quant_state is states[linear]
        assert weight.absmax is states[linear].absmax
        assert weight.bnb_quantized
        assert weight.quant_type == "nf4"
        assert not weight.requires_grad
        assert torch.equal(weight.detach().view(torch.uint8), codes[linear])
        seen.append(linear)

    def check_shards() -> None:
        for linear, state in states.items():
            weight = linear.weight
            assert isinstance(weight, DTensor)
            assert isinstance(weight, nn.Parameter)
            assert weight.quant_state is state
            assert weight.absmax is state.absmax
            assert torch.equal(bits(weight).view(-1), codes[linear].view(-1))

    check_shards()
    with seen_in_forward(model, see):
        train(model, optimizer_of(model), range(2))
    assert all(seen.count(linear) >= 2 for linear in states)
    check_shards()
    for block in blocks(model):
        block.unshard()
        for linear in packed(block):
            see(linear)
        block.reshard()
    check_shards()


def saved_by(way: str, model: Any, optimizer: Any, folder: str) -> Callable[[Any, Any], None]:
    """Saves a checkpoint, and gives a function that loads it into a model and its optimizer."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_state_dict,
    )

    libfsdp = importlib.import_module("libfsdp")
    # Without sharding, too, the names of quant_state's parts are unexpected ones when a state dict is loaded.
    not_strict = StateDictOptions(strict=False)
    if way == "libfsdp":
        libfsdp.save(folder, model, optimizer)
        return lambda m, o: libfsdp.load(folder, m, o)
    if way == "dcp":
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=folder)

        def load(m: Any, o: Any) -> None:
            found = dict(zip(("model", "optimizer"), get_state_dict(m, o), strict=True))
            dcp.load(found, checkpoint_id=folder)
            set_state_dict(
                m, o, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=not_strict
            )

        return load
    if way == "whole":
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        of_optimizer = copy.deepcopy(optimizer.state_dict())

        def set_whole(m: Any, o: Any) -> None:
            set_model_state_dict(m, whole, options=StateDictOptions(full_state_dict=True, strict=False))
            o.load_state_dict(of_optimizer)

        return set_whole
    assert way == "pickle"
    path = f"{folder}-{dist.get_rank()}.pt"
    torch.save((model.state_dict(), optimizer.state_dict()), path)

    def unpickle(m: Any, o: Any) -> None:
        of_model, of_optimizer = torch.load(path, weights_only=False)
        m.load_state_dict(of_model, strict=False)
        o.load_state_dict(of_optimizer)

    return unpickle


def check_checkpoint(options: str, way: str) -> None:
    """A model that loads goes on as the one that was saved, bit for bit."""
    model = shard(make(options), "libfsdp", options)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    expected_names = list(make(options).state_dict())
    state = model.state_dict()
    assert list(state) == expected_names
    folder = common_folder()
    load = saved_by(way, model, optimizer, str(folder / "saved"))
    losses = train(model, optimizer, range(2, 4))

    second = make(options)
    with torch.no_grad():
        for p in second.parameters():
            if p.requires_grad:
                p.normal_()
            elif "4bit" in type(p).__name__:
                p.data.view(torch.uint8).bitwise_not_()
            else:
                p.add_(1.0)
    shard(second, "libfsdp", options)
    of_second = optimizer_of(second)
    load(second, of_second)
    assert train(second, of_second, range(2, 4)) == losses
    for (name, p), q in zip(second.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(bits(p), bits(q)), name
    for linear in packed(second):
        assert linear.weight.quant_state == linear.quant_state
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def whole_state(options: str) -> dict[str, Tensor]:
    """What torch's function gathers on this rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = shard(make(options), "libfsdp", options)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: bits(tensor) for name, tensor in whole.items()}


def gathers_of_a_step(how: str, microbatches: int = 4) -> tuple[list[int], dict[str, int]]:
    """What this rank has sent for the gathers of each of three steps, and for one gather of codes, of blocks' others, of the root.

    "kept" frees the frozen units in the last backward of a step, "kept forever" never, "freed" after each use. Checks that
    parameters are those of a training that sets nothing.
    """
    libfsdp = importlib.import_module("libfsdp")
    model, reference = make(""), shard(make(""), "libfsdp", "")
    frozen: list[Any] = []
    for block in blocks(model):
        weights = packed(block)
        libfsdp.fully_shard(weights, reshard_after_forward=how == "freed")  # a unit of the block's frozen weights
        frozen.append(weights[0])
    shard(model, "libfsdp", "")
    world = dist.get_world_size()
    codes = sum(linear.weight.to_local().nbytes for linear in packed(model))
    others = sum(p.to_local().nbytes for block in blocks(model) for p in block.parameters()) - codes
    root = sum(p.to_local().nbytes for p in model.parameters()) - codes - others
    both = ((reference, optimizer_of(reference)), (model, optimizer_of(model)))
    found = []
    for step in range(3):
        for one, optimizer in both:
            if one is model:
                before = libfsdp.wire_stats(reference)["all_gather_bytes"]  # The mesh counts, which both have.
            for micro in range(microbatches):
                last = micro == microbatches - 1
                one.set_requires_gradient_sync(last)
                if one is model:
                    for unit in frozen:
                        unit.set_reshard_after_backward(how == "freed" or (how == "kept" and last))
                batch = ids(microbatches * step + micro, dist.get_rank())
                (one(input_ids=batch, labels=batch).loss / microbatches).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(libfsdp.wire_stats(model)["all_gather_bytes"] - before)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(bits(p), bits(q)), name
    return found, {name: size * (world - 1) for name, size in (("codes", codes), ("others", others), ("root", root))}
