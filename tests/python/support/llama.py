"""Small random models of the Llama family, saved by transformers; and the programs in C++ that read them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support import hugging_face

BUILD = Path(__file__).parents[3] / "build"

VOCABULARY = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
# Of the heads' frequencies, one stays, one is slowed down, and others are between.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16, "rms_norm_eps": 1e-3}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama padded": ("Llama", {"pad_token_id": 5}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"head_dim": 12, "num_key_value_heads": 1, "sliding_window": 16}),
    "mistral sliding": (
        "Mistral",
        {
            "sliding_window": 5,
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
        },
    ),
    "qwen2 sliding nowhere": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
        },
    ),
    "qwen3 sliding in part": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False},
        },
    ),
    "llama yarn": ("Llama", {"rope_parameters": {**YARN, "beta_fast": 4.0}, "head_dim": 16}),
    "llama proportional": (
        "Llama",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "proportional",
                "rope_theta": 100.0,
                "factor": 2.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
}


def make(
    family: str, folder: Path, most: str = "1GB", dtype: torch.dtype = torch.float32, seed: int = 7, **config: Any
) -> nn.Module:
    """A model with random values, biases and norms too, saved in files of at most `most`."""
    torch.manual_seed(seed)
    model: Any = hugging_face.build(family, f"{family}ForCausalLM", **{**SMALL, **config})()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-0.5, 0.5).add_(1.0 if "norm" in name else 0.0)
    model.to(dtype).save_pretrained(folder, max_shard_size=most)
    return model.to(torch.float32)


def run(*command: object, fails: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, timeout=300, env=environment)
    assert (done.returncode != 0) == fails, f"{done.stdout}\n{done.stderr}"
    return done
