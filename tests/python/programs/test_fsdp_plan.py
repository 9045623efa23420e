"""`fsdp plan`: the worked examples of its page, models that transformers knows, too, and safetensors files."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.marks import at_night, needs_transformers

COMMAND = os.environ.get("FSDP_COMMAND", "")
ROOT = Path(__file__).resolve().parents[3]

sys.path.append(str(ROOT / "tools"))
import describe_config  # noqa: E402

pytestmark = pytest.mark.skipif(not COMMAND, reason="ctest says where the command is: FSDP_COMMAND")


def run(*arguments: str, code: int = 0) -> str:
    """What the command prints."""
    environment = {"FSDP_PYTHON": sys.executable, **os.environ}
    ran = subprocess.run(
        [COMMAND, "plan", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def examples() -> list[tuple[str, str]]:
    """The commands of the page that are printed with what they print."""
    page = (ROOT / "docs" / "use" / "plan.md").read_text()
    found = re.findall(r"^```console\n\$ fsdp plan ((?:.*\\\n)*.*)\n([^`]*)^```", page, re.MULTILINE)
    return [(command.replace("\\\n", " "), printed) for command, printed in found]


def test_the_page_has_its_examples() -> None:
    assert [command.split()[0].rsplit("/")[-1] for command, _ in examples()] == [
        "llama3_8b.json",
        "llama3_8b.json",
        "llama3_70b.json",
        "llama3_405b.json",
        "llama3_405b.json",
    ]


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, config: Path, tokens: int | None = None) -> None:
    """The model is described in this process, which has imported transformers, and not in a Python that imports it once more."""
    (folder / "described.json").write_text(json.dumps(describe_config.describe(str(config), tokens)))
    (folder / "python").write_text(f"#!/bin/sh\ncat '{folder}/described.json'\n")
    (folder / "python").chmod(0o755)
    monkeypatch.setenv("FSDP_PYTHON", str(folder / "python"))


@needs_transformers
@pytest.mark.parametrize("number", range(5))
def test_an_example_prints_what_the_page_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    command, printed = examples()[number]
    if number:  # The first one is described as users do it.
        tokens = re.search(r"--sequence (\d+)", command)
        stand_in(monkeypatch, tmp_path, ROOT / command.split()[0], int(tokens[1]) if tokens else None)
    found = [line.rstrip() for line in run(*shlex.split(command)).splitlines()]
    # The page leaves out lines, where it has dots.
    place = 0
    for line in printed.splitlines():
        if line.strip() == "...":
            continue
        begin = line.removesuffix(" ...")
        places = [
            k for k in range(place, len(found)) if found[k] == line or (begin != line and found[k].startswith(begin))
        ]
        assert places, f"{line}\n is not in\n" + "\n".join(found[place:])
        place = places[0] + 1


# By model_type, with the names of their classes with a head.
CLASSES = {
    "apertus": "ApertusForCausalLM",
    "bamba": "BambaForCausalLM",
    "bart": "BartForConditionalGeneration",
    "bloom": "BloomForCausalLM",
    "cohere": "CohereForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "idefics3": "Idefics3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "jamba": "JambaForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "mamba2": "Mamba2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "mllama": "MllamaForConditionalGeneration",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "zamba2": "Zamba2ForCausalLM",
}
BY_DAY = ("gemma3", "gpt_oss", "qwen3_moe", "t5")


def planned_as_described(monkeypatch: pytest.MonkeyPatch, folder: Path, config: dict[str, Any], *options: str) -> Any:
    """The plan of a configuration."""
    (folder / "config.json").write_text(json.dumps(config))
    stand_in(monkeypatch, folder, folder / "config.json")
    return json.loads(run(str(folder), "--ranks", "64", "--json", *options))


def elements_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@needs_transformers
@pytest.mark.parametrize("kind", [kind if kind in BY_DAY else at_night(kind) for kind in CLASSES])
def test_models_have_the_elements_that_transformers_gives_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    import transformers

    config: Any = transformers.AutoConfig.for_model(kind)
    with torch.device("meta"):
        model: Any = getattr(transformers, CLASSES[kind])(config)
    planned = planned_as_described(monkeypatch, tmp_path, config.to_dict())
    assert planned["elements"] == elements_of(model)
    units = {unit["name"]: unit["elements"] for unit in planned["units"]}
    root = units.pop("(root)")
    assert units == {name: elements_of(model.get_submodule(name)) for name in units}
    assert root + sum(units.values()) == planned["elements"]
    assert len(units) >= config.get_text_config().num_hidden_layers


# The classes' own defaults for what is left out, what they ignore, and a shape that is impossible.
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000}
INCOMPLETE: list[tuple[dict[str, Any], int]] = [
    ({"model_type": "mistral", **SIZES, "num_attention_heads": 32}, 7_241_732_096),
    ({"model_type": "mistral", **SIZES, "num_attention_heads": 32, "attention_bias": True}, 7_241_732_096),
    ({"model_type": "mixtral", **SIZES, "num_attention_heads": 32}, 46_702_792_704),
]


@needs_transformers
@pytest.mark.parametrize(("config", "elements"), INCOMPLETE)
def test_entries_that_are_left_out_have_the_defaults_of_the_class(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any], elements: int
) -> None:
    assert planned_as_described(monkeypatch, tmp_path, config)["elements"] == elements


@needs_transformers
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "llama", "hidden_size": 2050, "num_attention_heads": 32}, "hidden size"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({}, "model_type"),
    ],
)
def test_what_transformers_refuses_is_an_error(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = describe_config.describe(str(tmp_path / "config.json"), None)
    assert described["has_transformers"]
    assert says in described["error"]


ITEMSIZE = {"F32": 4, "BF16": 2, "I64": 8}
SHAPES: dict[str, tuple[str, list[int]]] = {
    "lm_head.weight": ("BF16", [50, 8]),
    "model.embed_tokens.weight": ("BF16", [50, 8]),
    "model.norm.weight": ("F32", [8]),
    **{f"model.layers.{k}.mlp.experts.{j}.w": ("BF16", [8, 4 + k]) for k in range(11) for j in range(2)},
    "model.layers.3.step": ("I64", [1]),
}


def write_safetensors(path: Path, names: list[str]) -> None:
    """Writes a file whose data are zeros."""
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        dtype, shape = SHAPES[name]
        begin, end = end, end + ITEMSIZE[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def test_safetensors_files_and_their_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = sorted(SHAPES)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, of_file in parts.items():
        write_safetensors(tmp_path / file, of_file)
    without_index = json.loads(run(str(tmp_path), "--ranks", "2", "--json"))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, some in parts.items() for name in some}}))
    for given in (tmp_path, index):
        planned = json.loads(run(str(given), "--ranks", "2", "--json"))
        assert planned == without_index
        assert planned["elements"] == sum(math.prod(shape) for _, shape in SHAPES.values())
        # In the order of their numbers, with experts in their layers.
        assert [unit["name"] for unit in planned["units"]] == ["(root)", *(f"model.layers.{k}" for k in range(11))]
        assert [unit["elements"] for unit in planned["units"]][1:] == [2 * 8 * (4 + k) + (k == 3) for k in range(11)]
        split = json.loads(run(str(given), "--ranks", "2", "--split-root", "--json"))
        assert [unit["name"] for unit in split["units"]][:3] == ["(root)", "lm_head", "model.embed_tokens"]
        assert split["units"][0]["elements"] == 8
    assert "--flops needs the model's config.json and a Python with transformers" in run(
        str(tmp_path), *["--ranks", "2", "--flops", "1e12", "--sequence", "8", "--rate", "1GB"], code=2
    )
    # Without transformers, the headers do.
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("FSDP_PYTHON", "/nowhere")
    said = run(str(tmp_path), "--ranks", "2")
    assert said.startswith("2 ranks, ")
    assert "planned from the safetensors headers, because " in said
    assert "'/nowhere' does not run" in said
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "which the index names, is not there" in run(str(index), "--ranks", "2", code=2)
    assert "has neither a config.json nor safetensors files" in run(str(tmp_path / ".."), "--ranks", "2", code=2)


def test_a_file_alone(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "weights.safetensors", ["model.norm.weight", "model.layers.0.mlp.experts.0.w"])
    planned = json.loads(run(str(tmp_path / "weights.safetensors"), "--ranks", "2", "--json"))
    assert [unit["elements"] for unit in planned["units"]] == [8, 32]
