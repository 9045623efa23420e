"""examples/finetune_llama.cpp on two ranks, against transformers' own models: small, random, saved by `save_pretrained`."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import hugging_face
from support.llama import BUILD, CASES, LLAMA3, VOCABULARY, make, run
from support.marks import at_night
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(not hugging_face.available(), reason="not installed: transformers")

PROGRAM = os.environ.get("FSDP_FINETUNE_LLAMA", str(BUILD / "examples" / "finetune_llama"))
PROBE = os.environ.get("FSDP_LLAMA_PROBE", str(BUILD / "tests" / "python" / "llama_probe"))


def load(folder: Path) -> Any:
    """As users do, who say nothing of the dtype; in eval mode."""
    transformers = importlib.import_module("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def tokens() -> Tensor:
    """With number 5, which may be the padding."""
    drawn = torch.randint(VOCABULARY, (4, 13), generator=torch.Generator().manual_seed(3))
    drawn[1, 4:7] = 5
    return drawn


def probe(model: Path, out: Path) -> dict[str, Tensor]:
    """What the C++ model computes of tokens(), on two ranks: logits, loss and gradients, each flat."""
    out.mkdir()
    tokens().to(torch.int32).numpy().tofile(out / "tokens.bin")
    run(PROBE, model, out / "tokens.bin", out)
    return {
        file.name: torch.from_numpy(np.fromfile(file, dtype=np.float32))
        for file in out.iterdir()
        if file.name != "tokens.bin"
    }


def rewrite(model: Path, **entries: Any) -> None:
    """Entries of config.json."""
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def relative(a: Tensor, b: Tensor) -> float:
    """The norm of the difference, relative to the norm of b; 0 where both are 0."""
    a, b = a.detach().flatten(), b.detach().flatten()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def train(model: Path, folder: Path, *options: object, out: str = "out", fails: bool = False) -> str:
    data = folder / "text.bin"
    np.tile(np.arange(24, dtype=np.int32), 100).tofile(data)
    common = ("--batch", 4, "--context", 12, "--lr", 1e-2, "--warmup", 1)
    done = run(PROGRAM, "--model", model, "--data", data, "--out", folder / out, *common, *options, fails=fails)
    return done.stderr if fails else done.stdout


@pytest.mark.parametrize("case", CASES)
def test_computes_what_transformers_does(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    model: Any = make(family, tmp_path / "model", most="8KB" if case == "llama 3.1" else "1GB", **config)
    files = len(list((tmp_path / "model").glob("*.safetensors")))
    assert (files > 1) == (case == "llama 3.1")
    ours = probe(tmp_path / "model", tmp_path / "probe")

    output = model(input_ids=tokens(), labels=tokens())
    output.loss.backward()
    assert (ours.pop("logits") - output.logits.detach().flatten()).abs().max() < 1e-5
    assert abs(ours.pop("loss").item() - output.loss.item()) < 1e-5
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative(ours[name], gradient) < 1e-5, name
    if case == "llama padded":
        assert not expected["model.embed_tokens.weight"][5].any()


@pytest.mark.parametrize("case", ["llama 3.1", *(at_night(case) for case in ("qwen2 tied", "qwen3", "mistral"))])
def test_transformers_loads_what_was_fine_tuned(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    before = make(family, tmp_path / "model", **config)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    printed = train(tmp_path / "model", tmp_path, "--steps", 12)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 12, printed
    assert losses[-1] < losses[0] / 2, printed

    out = tmp_path / "out"
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_text() == (tmp_path / "model" / name).read_text()
    after = load(out)
    assert type(after).__name__ == f"{family}ForCausalLM"
    changed = zip(after.named_parameters(), before.named_parameters(), strict=True)
    assert all(mine[0] == other[0] and not torch.equal(mine[1], other[1]) for mine, other in changed)
    ours = probe(out, tmp_path / "probe")
    assert (ours["logits"] - after(input_ids=tokens()).logits.detach().flatten()).abs().max() < 1e-5


def test_trains_as_transformers_and_torch_do(tmp_path: Path) -> None:
    """One epoch of one batch: the order of sequences does not matter."""
    model: Any = make("Llama", tmp_path / "model")
    rows = torch.randint(VOCABULARY, (49,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    rows.numpy().tofile(tmp_path / "rows.bin")
    common = ("--batch", 4, "--context", 12, "--lr", 1e-3, "--warmup", 0, "--steps", 1, "--clip", 0.5)
    options = ("--model", tmp_path / "model", "--data", tmp_path / "rows.bin", "--out", tmp_path / "out")
    printed = run(PROGRAM, *options, *common).stdout

    batch = torch.stack([rows[12 * row : 12 * row + 13] for row in range(4)]).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    assert f"step 1  loss {loss.item():.4f}  gradient norm {norm.item():.3f}" in printed
    for (name, mine), (_, other) in zip(
        load(tmp_path / "out").named_parameters(), model.named_parameters(), strict=True
    ):
        # AdamW's first step is the gradient's sign: where that is nearly 0, rounding decides.
        assert relative(mine, other) < 1e-5, name


def test_a_head_beside_tie_word_embeddings(tmp_path: Path) -> None:
    """transformers ties where the files have one of the two, and where they have both only if these are equal."""
    safetensors = importlib.import_module("safetensors.torch")
    make("Llama", tmp_path / "model")
    rewrite(tmp_path / "model", tie_word_embeddings=True)
    expected = load(tmp_path / "model")
    assert expected.lm_head.weight is not expected.model.embed_tokens.weight
    found = probe(tmp_path / "model", tmp_path / "both")
    assert "lm_head.weight" in found
    assert (found["logits"] - expected(input_ids=tokens()).logits.detach().flatten()).abs().max() < 1e-5
    train(tmp_path / "model", tmp_path, "--steps", 1)
    after = load(tmp_path / "out")
    assert after.lm_head.weight is not after.model.embed_tokens.weight
    assert not torch.equal(after.lm_head.weight, expected.lm_head.weight)

    path = tmp_path / "model" / "model.safetensors"
    weights = safetensors.load_file(path)
    del weights["model.embed_tokens.weight"]
    safetensors.save_file(weights, path, metadata={"format": "pt"})
    expected = load(tmp_path / "model")
    assert expected.lm_head.weight is expected.model.embed_tokens.weight
    found = probe(tmp_path / "model", tmp_path / "head")
    assert (found["logits"] - expected(input_ids=tokens()).logits.detach().flatten()).abs().max() < 1e-5


def test_an_index_that_was_left_is_not_the_model(tmp_path: Path) -> None:
    """The files of an earlier model in several files stayed; transformers reads model.safetensors."""
    make("Llama", tmp_path / "model", most="8KB")
    changed: Any = make("Llama", tmp_path / "changed")
    with torch.no_grad():
        changed.lm_head.weight.mul_(2.0)
    changed.save_pretrained(tmp_path / "changed")
    (tmp_path / "changed" / "model.safetensors").rename(tmp_path / "model" / "model.safetensors")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    expected = load(tmp_path / "model")(input_ids=tokens()).logits.detach().flatten()
    assert (probe(tmp_path / "model", tmp_path / "probe")["logits"] - expected).abs().max() < 1e-5
    assert torch.equal(expected, changed(input_ids=tokens()).logits.detach().flatten())


def test_reads_the_files_of_dcps_ranks(tmp_path: Path) -> None:
    """As torch.distributed.checkpoint's HuggingFaceStorageWriter leaves them with save_distributed=True."""
    safetensors = importlib.import_module("safetensors.torch")
    model: Any = make("Llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    for rank in range(2):
        parts, places = {}, {}
        for name, tensor in model.state_dict().items():
            parts[name] = tensor.chunk(2)[rank].contiguous()
            places[name] = {"saved_offsets": [rank * len(tensor.chunk(2)[0])] + [0] * (tensor.dim() - 1)}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
        safetensors.save_file(
            parts, tmp_path / "model" / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors", metadata
        )
    expected = model(input_ids=tokens()).logits.detach().flatten()
    assert (probe(tmp_path / "model", tmp_path / "probe")["logits"] - expected).abs().max() < 1e-5


def test_float16_stays(tmp_path: Path) -> None:
    make("Llama", tmp_path / "model", dtype=torch.float16)
    train(tmp_path / "model", tmp_path, "--steps", 1)
    assert load(tmp_path / "out").dtype == torch.float16
    weights = importlib.import_module("safetensors.torch").load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}


def test_bf16(tmp_path: Path) -> None:
    """Computed in bf16; the files are in the dtype that config.json names."""
    make("Llama", tmp_path / "model", dtype=torch.bfloat16)
    exact = train(tmp_path / "model", tmp_path, "--steps", 6, out="exact")
    narrow = train(tmp_path / "model", tmp_path, "--steps", 6, "--dtype", "bf16", out="narrow")
    losses = [[float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)] for text in (exact, narrow)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert load(tmp_path / "narrow").dtype == torch.bfloat16


@pytest.mark.nightly
def test_recomputing_saves_memory_and_changes_no_bit(tmp_path: Path) -> None:
    """Each layer keeps 2 sequences of 512 tokens by more than 10 vectors of 256 elements: 10 MiB."""
    make("Qwen2", tmp_path / "model", hidden_size=256, intermediate_size=512, num_hidden_layers=10)
    options = ("--steps", 2, "--context", 512)
    printed = [
        train(tmp_path / "model", tmp_path, *options, *more, out=out)
        for out, more in (("out", ()), ("recomputed", ("--recompute",)))
    ]
    peaks = [int(re.findall(r"peak resident memory of rank 0: (\d+) MiB", text)[0]) for text in printed]
    assert peaks[1] < peaks[0] - 60, peaks
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "recomputed")]
    assert files[0] == files[1]


def test_resumes_with_the_same_bits(tmp_path: Path) -> None:
    make("Llama", tmp_path / "model")
    options = ("--steps", 6, "--checkpoints", tmp_path / "run", "--save-every", 4)
    train(tmp_path / "model", tmp_path, *options)
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name[0] != ".") == ["step-4", "step-6"]
    for file in (tmp_path / "run" / "step-6").iterdir():
        file.unlink()
    (tmp_path / "run" / "step-6").rmdir()
    printed = train(tmp_path / "model", tmp_path, *options, out="again")
    assert re.findall(r"step (\d+)  loss", printed) == ["5", "6"]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert files[0] == files[1]


@pytest.mark.nightly
def test_reads_older_configurations_and_files(tmp_path: Path) -> None:
    """Before transformers 5: rope_theta and rope_scaling; a tied head that is in the file; tables of frequencies."""
    safetensors = importlib.import_module("safetensors.torch")
    make("Llama", tmp_path / "model", rope_parameters=LLAMA3, tie_word_embeddings=True)
    expected = probe(tmp_path / "model", tmp_path / "new")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config.update(rope_theta=scaling.pop("rope_theta"), rope_scaling=scaling)
    del config["head_dim"], config["dtype"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    weights = safetensors.load_file(tmp_path / "model" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    safetensors.save_file(weights, tmp_path / "model" / "model.safetensors")
    found = probe(tmp_path / "model", tmp_path / "old")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bytes_are_tokens(tmp_path: Path) -> None:
    make("Llama", tmp_path / "model", vocab_size=256)
    (tmp_path / "text.txt").write_text("the quick brown fox \u2603\n" * 20)
    options = ("--model", tmp_path / "model", "--data", tmp_path / "text.txt", "--out", tmp_path / "out")
    assert (
        "480 tokens, 0.11 epochs over 1 rank"
        in run(PROGRAM, *options, "--context", 48, "--steps", 1, "--batch", 1, "--nproc", 1).stdout
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        ("Llama", {"model_type": "gpt2"}, "model_type is 'gpt2'; supported are llama, qwen2, qwen3 and mistral"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is silu"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_type is 'longrope'; supported are default, linear",
        ),
        ("Llama", {"rope_scaling": {"type": "linear"}}, "the parameters of rotary embeddings have no factor"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "yarn", "partial_rotary_factor": 0.5}},
            "rope_type 'yarn' rotates all of a head",
        ),
        ("Qwen3", {"rope_parameters": {"full_attention": {}}}, "given for each kind of layer"),
        ("Llama", {"attention_dropout": 0.1}, "attention_dropout is not 0"),
        ("Llama", {"quantization_config": {}}, "quantized weights are not supported"),
        ("Llama", {"num_key_value_heads": 3}, "num_key_value_heads does not divide num_attention_heads"),
        ("Llama", {"hidden_size": None}, "hidden_size is missing, or not positive"),
        ("Llama", {"hidden_size": "wide"}, "type must be number"),
        ("Mistral", {"sliding_window": 0}, "sliding_window is not positive"),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"]},
            "not as many entries",
        ),
        ("Llama", {"dtype": "float64"}, "dtype is 'float64'; supported are float32, bfloat16 and float16"),
        ("Llama", {"vocab_size": 20}, "text.bin: token 20 is 20, and the model has 20 of them"),
    ],
)
def test_what_is_not_supported_is_one_error(family: str, entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    make(family, tmp_path / "model")
    rewrite(tmp_path / "model", **entries)
    error = train(tmp_path / "model", tmp_path, "--steps", 1, fails=True)
    assert message in error
    assert error.startswith("finetune_llama: ")
    assert error.count("\n") == 1, "one line, not one of each rank"
    assert not (tmp_path / "out").exists()


def test_files_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    make("Llama", tmp_path / "model")
    rewrite(tmp_path / "model", num_hidden_layers=3)
    error = train(tmp_path / "model", tmp_path, "--steps", 1, fails=True)
    assert "model.layers.2.self_attn.q_proj.weight" in error, error
    error = train(tmp_path / "model", tmp_path, "--nproc", 3, fails=True)
    assert error == "finetune_llama: --batch 4 does not divide over 3 ranks\n"
    missing = run(PROGRAM, "--model", tmp_path / "model", "--data", tmp_path, "--out", tmp_path / "out", fails=True)
    assert missing.stderr == f"finetune_llama: cannot read --data {tmp_path}\n"
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    error = train(tmp_path / "model", tmp_path, "--steps", 1, fails=True)
    assert error.startswith(f"finetune_llama: {tmp_path / 'model'} has its weights in pytorch_model.bin, which only")
    assert error.count("\n") == 1
    (tmp_path / "model" / "pytorch_model.bin").rename(tmp_path / "model" / "model.safetensors")
    (tmp_path / "out").mkdir()
    error = train(tmp_path / "model", tmp_path, "--steps", 1, fails=True)
    assert error == f"finetune_llama: --out {tmp_path / 'out'} is there already\n"
