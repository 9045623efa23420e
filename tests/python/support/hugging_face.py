"""Models of the package `transformers`, small and random, from their configurations: nothing is downloaded."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from support.models import VOCABULARY, Batch, Case, floats, tokens

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def build(family: str, model: str, **config: Any) -> Callable[[], nn.Module]:
    """A builder of `model` with the family's configuration."""

    def builder() -> nn.Module:
        transformers = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        made = getattr(transformers, f"{family}Config")(**config)
        made._attn_implementation = "sdpa"
        network: nn.Module = getattr(transformers, model)(made)
        return network.train()

    return builder


def language_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """The model's own loss, of tokens as labels."""
    loss: Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return loss


def image_loss(model: Callable[..., Any], batch: Batch) -> Tensor:
    """A number from the logits of images."""
    loss: Tensor = model(pixel_values=batch[0]).logits.float().square().mean()
    return loss


def layers(path: str) -> Callable[[Any], list[nn.Module]]:
    """Each module of the lists at the paths is a unit."""
    return lambda model: [unit for part in path.split() for unit in model.get_submodule(part)]


COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER: dict[str, Any] = {**COMMON, "intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# With one decoder layer, no tensor goes into two units, whose hooks change the order in which autograd adds up.
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_heads": 2,
}

LANGUAGE = {
    "llama": (build("Llama", "LlamaForCausalLM", **DECODER), "model.layers"),
    "qwen2": (build("Qwen2", "Qwen2ForCausalLM", **DECODER, tie_word_embeddings=True), "model.layers"),
    "mixtral": (
        build("Mixtral", "MixtralForCausalLM", **DECODER, num_local_experts=2, num_experts_per_tok=2),
        "model.layers",
    ),
    "gpt2": (
        build("GPT2", "GPT2LMHeadModel", **GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        "transformer.h",
    ),
    "bert": (build("Bert", "BertForMaskedLM", **COMMON, intermediate_size=24, **NO_DROPOUT), "bert.encoder.layer"),
    "t5": (
        build("T5", "T5ForConditionalGeneration", **T5, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0),
        "encoder.block decoder.block",
    ),
}
VIT = {name: value for name, value in COMMON.items() if name != "vocab_size"}
CASES = {
    **{name: Case(builder, tokens(2, 8), layers(path), language_loss) for name, (builder, path) in LANGUAGE.items()},
    "vit": Case(
        build(
            "ViT", "ViTForImageClassification", **VIT, intermediate_size=24, image_size=8, patch_size=4, **NO_DROPOUT
        ),
        floats(2, 3, 8, 8),
        layers("vit.layers"),
        image_loss,
    ),
}


def available() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("transformers") is not None
