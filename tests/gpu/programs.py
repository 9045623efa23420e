"""Stage 3 of the kit: the examples in C++ on one GPU, against the same on the CPU."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import rows
import torch
from cpp import EXAMPLES, GPT, SMALL, TINY_GPT, run, train_gpt
from safetensors.torch import load_file
from support import device, hugging_face


def check_train_gpt(name: str, bound: float, *options: object) -> None:
    """20 steps, loss by loss."""
    common = ("--steps", 20, *(TINY_GPT if SMALL else GPT), *options)
    with rows.recorded(f"train_gpt, {name}") as row, tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        here = train_gpt(Path(folder) / "here", device.TYPE, *common)
        row["seconds_here"] = round(time.monotonic() - begun, 1)
        cpu = train_gpt(Path(folder) / "cpu", "cpu", *common)
        row["difference"] = max(abs(a - b) / b for a, b in zip(here, cpu, strict=True))
        row["losses"] = f"{here[0]:.4f} to {here[-1]:.4f}"
        assert len(here) == 20, f"{len(here)} losses"
        assert here[-1] < here[0], "the loss has not fallen"
        assert row["difference"] <= bound, f"losses differ by {row['difference']:.3g} of theirs"


def finetune(folder: Path, where: str, *options: object) -> dict[str, torch.Tensor]:
    run(EXAMPLES / "finetune_llama", "--device", where, "--nproc", 1, "--out", folder / where, *options)
    return {name: value for file in (folder / where).glob("*.safetensors") for name, value in load_file(file).items()}


def check_finetune(name: str, bound: float, *options: object) -> None:
    with rows.recorded(f"finetune_llama, {name}") as row, tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        width = 32 if SMALL else 512
        model: Any = hugging_face.build(
            "Llama",
            "LlamaForCausalLM",
            vocab_size=96,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2 if SMALL else 8,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.1,
        )()
        model.save_pretrained(folder / "model")
        np.tile(np.arange(24, dtype=np.int32), 200).tofile(folder / "tokens.bin")
        common = ("--model", folder / "model", "--data", folder / "tokens.bin", "--batch", 4, "--context", 64, "--steps", 10)
        here = finetune(folder, device.TYPE, *common, *options)
        cpu = finetune(folder, "cpu", *common, *options) if device.TYPE != "cpu" else here
        before = {key: value for key, value in model.state_dict().items() if key in here}
        assert before, "no tensor of the model's names was written"
        moved = max(((here[key].float() - value).norm() / value.norm()).item() for key, value in before.items())
        row["moved"] = moved
        row["difference"] = max(((here[key].float() - cpu[key].float()).norm() / cpu[key].float().norm()).item() for key in here)
        assert moved > 1e-4, "nothing has moved"
        assert row["difference"] <= bound, f"what was trained differs by {row['difference']:.3g}"


def main() -> None:
    check_train_gpt("fp32", 1e-3)
    check_train_gpt("bf16", 3e-2, "--param-dtype", "bf16")
    check_train_gpt("offloaded", 1e-3, "--offload", "all")
    if hugging_face.available():
        check_finetune("fp32", 1e-2)
        check_finetune("bf16", 3e-2, "--dtype", "bf16")
    else:
        rows.record("finetune_llama", "skipped", why="transformers is not installed")


if __name__ == "__main__":
    main()
