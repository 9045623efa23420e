"""examples/generate_llama.cpp, and the tokenizers that it shares with finetune_llama.cpp, against transformers' own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import hugging_face
from support.llama import BUILD, CASES, VOCABULARY, make, run
from support.marks import at_night

pytestmark = pytest.mark.skipif(not hugging_face.available(), reason="not installed: transformers")

PROGRAM = os.environ.get("FSDP_GENERATE_LLAMA", str(BUILD / "examples" / "generate_llama"))
FINETUNE = os.environ.get("FSDP_FINETUNE_LLAMA", str(BUILD / "examples" / "finetune_llama"))
TOKENIZE = os.environ.get("FSDP_TOKENIZER_PROBE", str(BUILD / "tests" / "python" / "tokenizer_probe"))
WITHOUT_LIBRARY = f"{TOKENIZE}_without_library"
HAS_LIBRARY = os.environ.get("FSDP_HAS_SENTENCEPIECE", "1") == "1"
needs_library = pytest.mark.skipif(
    not HAS_LIBRARY or any(importlib.util.find_spec(name) is None for name in ("sentencepiece", "google.protobuf")),
    reason="not installed: libsentencepiece-dev, or Python's sentencepiece and protobuf",
)

PROMPT = [3, 1, 4, 15, 9]
LINES = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"]


def generate(model: Path, *options: object) -> list[int]:
    printed = run(PROGRAM, "--model", model, "--prompt-tokens", ",".join(map(str, PROMPT)), *options).stdout
    return [int(token) for token in printed.split(",")]


def make_tokenizer(folder: Path) -> None:
    """tokenizer.model as Llama's: byte pairs, with bytes for what they do not know."""
    trainer: Any = importlib.import_module("sentencepiece").SentencePieceTrainer
    trainer.train(
        sentence_iterator=iter(LINES * 20 + ["x = 10 + 2.5;  // \u00e9t\u00e9"] * 20),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    described = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "qwen3 sliding in part",
        *(at_night(case) for case in ("llama 3.1", "qwen2", "mistral", "mistral sliding")),
    ],
)
def test_the_likeliest_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    model: Any = make(family, tmp_path / "model", **config, eos_token_id=None).eval()
    expected = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=20)[0].tolist()
    assert len(expected) == 25, "more than the window of those that slide"
    assert len(set(expected[5:])) > 1
    assert generate(tmp_path / "model", "--tokens", 20, "--temperature", 0) == expected


@pytest.mark.nightly
def test_what_is_left_out_is_what_transformers_takes(tmp_path: Path) -> None:
    """A Mistral whose config.json says nothing of a window has one of 4,096 tokens; null is none."""
    transformers = importlib.import_module("transformers")
    make("Mistral", tmp_path / "model", num_hidden_layers=1, max_position_embeddings=8192, eos_token_id=None)
    prompt = torch.randint(VOCABULARY, (1, 5000), generator=torch.Generator().manual_seed(1))
    path = tmp_path / "model" / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": None}
    del config["sliding_window"]
    written = []
    for entries in (config, {**config, "sliding_window": None}):
        path.write_text(json.dumps(entries))
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        expected = model.generate(prompt, do_sample=False, max_new_tokens=12)[0].tolist()
        words = ",".join(map(str, prompt[0].tolist()))
        options = ("--prompt-tokens", words, "--tokens", 12, "--temperature", 0)
        found = run(PROGRAM, "--model", tmp_path / "model", *options).stdout
        assert [int(token) for token in found.split(",")] == expected
        written.append(expected)
    assert written[0] != written[1]


@pytest.mark.nightly
def test_ends_at_the_token_that_ends_a_text(tmp_path: Path) -> None:
    """That of generation_config.json, where it is there, even if it names none; else that of config.json."""
    transformers = importlib.import_module("transformers")
    make("Llama", tmp_path / "model", eos_token_id=None)
    whole = generate(tmp_path / "model", "--tokens", 8, "--temperature", 0)
    path = tmp_path / "model" / "config.json"
    generation = tmp_path / "model" / "generation_config.json"
    config = json.loads(path.read_text())
    written = list(dict.fromkeys(whole[5:]))
    first, second = written[1], written[-1]
    assert first != second
    lengths = []
    cases: tuple[tuple[Any, Any], ...] = (
        (first, None),
        ([VOCABULARY - 1, first], None),
        (first, {"eos_token_id": [second]}),
        (first, {}),
    )
    for of_model, of_generation in cases:
        path.write_text(json.dumps({**config, "eos_token_id": of_model}))
        generation.unlink(missing_ok=True)
        if of_generation is not None:
            generation.write_text(json.dumps(of_generation))
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        theirs = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=8)[0].tolist()
        ours = generate(tmp_path / "model", "--tokens", 8, "--temperature", 0)
        # transformers prints the token that ends a text.
        assert theirs[: len(ours)] == ours
        assert theirs[len(ours) :] in ([], [first], [second])
        lengths.append(len(ours))
    assert lengths == [whole.index(first, 5), whole.index(first, 5), whole.index(second, 5), 13]


def test_a_full_context_goes_on_from_its_second_half(tmp_path: Path) -> None:
    model: Any = make("Llama", tmp_path / "model", eos_token_id=None, max_position_embeddings=16).eval()
    tokens = list(PROMPT)
    begin = 0
    with torch.no_grad():
        for _ in range(40):
            if len(tokens) - begin > 16:
                begin = len(tokens) - 8
            tokens.append(int(model(torch.tensor([tokens[begin:]])).logits[0, -1].argmax()))
    assert generate(tmp_path / "model", "--tokens", 40, "--temperature", 0) == tokens


def save(folder: Path, seed: int) -> list[int]:
    """A model with other weights, and what transformers generates with it."""
    model: Any = make("Llama", folder, eos_token_id=None, seed=seed).eval()
    written: list[int] = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12)[0].tolist()
    return written


def test_a_running_generator_has_the_weights_that_are_there_when_a_prompt_comes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    texts = [save(folder, 7)]
    command = [PROGRAM, "--model", str(folder), "--prompts", "tokens", "--tokens", "12", "--temperature", "0"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    pipes: dict[str, Any] = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as program:

        def answer() -> list[int]:
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write(",".join(map(str, PROMPT)) + "\n")
            program.stdin.flush()
            return [int(token) for token in program.stdout.readline().split(",")]

        assert answer() == texts[0]
        assert answer() == texts[0]
        # Written in place, as a trainer in Python does it.
        texts.append(save(folder, 8))
        assert answer() == texts[1]
        # Half of a file is no reason to stop; the weights stay.
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        assert answer() == texts[1]
        # Another folder that is moved to this place.
        texts.append(save(tmp_path / "new", 9))
        folder.rename(tmp_path / "old")
        (tmp_path / "new").rename(folder)
        assert answer() == texts[2]
        _, errors = program.communicate("1,two\n1,9999\n")
    assert program.returncode == 0
    assert len({tuple(text) for text in texts}) == 3
    stays, *_, no_list, unknown = errors.splitlines()
    assert stays.startswith("the weights stay as they were: ")
    assert no_list == "no answer: '1,two' is no list of tokens (1,2,3)"
    assert unknown == f"no answer: the prompt has the token 9999, and the model has {VOCABULARY} of them"


@pytest.mark.nightly
def test_draws_are_those_of_the_seed(tmp_path: Path) -> None:
    make("Llama", tmp_path / "model", eos_token_id=None)
    drawn = [generate(tmp_path / "model", "--tokens", 20, "--seed", seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len(tokens) == 25 for tokens in drawn)


@needs_library
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = importlib.import_module("transformers")
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 360}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [
        *LINES,
        "a",
        "trailing blank ",
        "two  blanks,\ttabs\nand\n\n lines",
        "numbers 1234567890",
        "\u96ea \u2603 \U0001f600 \u00e9t\u00e9",
        "\n".join(LINES * 50),
    ]
    for text in texts:
        (tmp_path / "text").write_text(text, newline="")
        printed = run(TOKENIZE, tmp_path, tmp_path / "text", tmp_path / "tokens").stdout
        tokens = np.fromfile(tmp_path / "tokens", dtype=np.int32).tolist()
        assert tokens == theirs(text).input_ids, text
        assert tokens[0] == theirs.bos_token_id
        assert printed == text


@needs_library
def test_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    make("Llama", tmp_path / "model", vocab_size=360)
    make_tokenizer(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n".join(LINES * 30))
    data = ("--model", tmp_path / "model", "--data", tmp_path / "text.txt", "--out", tmp_path / "out")
    run(FINETUNE, *data, "--steps", 60, "--batch", 4, "--context", 48, "--lr", 1e-2)
    printed = run(
        PROGRAM, "--model", tmp_path / "out", "--prompt", "the quick brown", "--temperature", 0, "--tokens", 40
    )
    assert printed.stdout.startswith("\n".join(LINES)[:60]), printed.stdout


def test_a_tokenizer_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    make("Llama", tmp_path / "model")
    model = tmp_path / "model"
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 100)
    (model / "tokenizer.json").write_text("{}")
    way_out = "make tokens of the text with Python's transformers\n"
    data = ("--data", tmp_path / "text.txt", "--out", tmp_path / "out")
    for command in ((FINETUNE, "--model", model, *data), (PROGRAM, "--model", model, "--prompt", "the")):
        error = run(*command, fails=True).stderr
        assert f"the tokenizer in {model} (tokenizer.json) is not a tokenizer.model" in error
        assert error.endswith(way_out)
        assert error.count("\n") == 1

    (model / "tokenizer.model").write_bytes(b"\xff no model")
    error = run(WITHOUT_LIBRARY, model, tmp_path / "text.txt", tmp_path / "tokens", fails=True).stderr
    assert error.startswith(f"{model / 'tokenizer.model'} is read by libsentencepiece, which was not there")
    if HAS_LIBRARY:
        error = run(TOKENIZE, model, tmp_path / "text.txt", tmp_path / "tokens", fails=True).stderr
        assert error.startswith(f"cannot read {model / 'tokenizer.model'} with libsentencepiece: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt-tokens", "3,96"), "the prompt has the token 96, and the model has 96 of them"),
        (("--prompt", ""), "the model needs a token to begin with: give --prompt or --prompt-tokens"),
        (("--prompt", "a", "--prompt-tokens", "3"), "excludes"),
    ],
)
def test_a_wrong_prompt_is_one_error(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    make("Llama", tmp_path / "model")
    assert message in run(PROGRAM, "--model", tmp_path / "model", *options, fails=True).stderr
