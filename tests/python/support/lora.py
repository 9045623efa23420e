"""Small models of transformers with peft's LoRA adapters, and what peft itself merges."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import libfsdp
from support import hugging_face
from support.weights import gathered

RANK, SCALE = 4, 2.0  # A power of two, as are the denominators of round_adapters.


def make(family: str = "Llama", dtype: torch.dtype = torch.float32, adapters: int = 1, **config: Any) -> Any:
    """A PeftModel, the same wherever it is made. GPT2's weights are [in, out]: fan_in_fan_out."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    if family == "GPT2":
        base: Any = hugging_face.build("GPT2", "GPT2LMHeadModel", **hugging_face.GPT2)()
        options: dict[str, Any] = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    else:
        base = hugging_face.build(family, f"{family}ForCausalLM", **hugging_face.DECODER)()
        options = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    options |= {"r": RANK, "lora_alpha": int(SCALE * RANK), "init_lora_weights": False, **config}
    model: Any = get_peft_model(base.to(dtype), LoraConfig(**options))
    names = [f"more{k}" for k in range(1, adapters)]
    for k, name in enumerate(names, 1):
        model.add_adapter(name, LoraConfig(**{**options, "r": 2 * k, "lora_alpha": k}))
    if names:
        model.base_model.set_adapter(["default", *names])
    return model


def shard(model: Any, **options: Any) -> Any:
    inner = model.base_model.model
    blocks = inner.transformer.h if hasattr(inner, "transformer") else inner.model.layers
    for block in blocks:
        libfsdp.fully_shard(block, **options)
    return libfsdp.fully_shard(model, **options)


def a_step(model: Any) -> None:
    """Trains the adapters."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)
    tokens = torch.arange(8)[None] + dist.get_rank()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def round_adapters(model: Any) -> None:
    """Gives them values of few bits, so that products are exact in fp32, in whatever order they are added up."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            local = getattr(parameter, "_local_tensor", parameter)
            local.copy_((local * 64).round() / 64)


def merged_by_peft(plain: Any, model: nn.Module) -> dict[str, Tensor]:
    """What a whole copy of the model has after merge_and_unload()."""
    copied = copy.deepcopy(plain)
    copied.load_state_dict(gathered(model))
    return {name: value.detach().clone() for name, value in copied.merge_and_unload().state_dict().items()}
