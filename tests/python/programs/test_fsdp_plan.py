"""`fsdp plan`: the worked examples of its page, models that transformers knows, too, and safetensors files."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.marks import needs_transformers

COMMAND = os.environ.get("FSDP_COMMAND", "")
ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "examples" / "configs"

pytestmark = pytest.mark.skipif(not COMMAND, reason="ctest says where the command is: FSDP_COMMAND")


def run(*arguments: str, code: int = 0) -> str:
    """What the command prints."""
    ran = subprocess.run(
        [COMMAND, "plan", *arguments], cwd=ROOT, text=True, capture_output=True, check=False, timeout=100
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


@pytest.mark.parametrize("number", range(5))
def test_an_example_prints_what_the_page_says(number: int) -> None:
    command, printed = examples()[number]
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


@needs_transformers
@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "llama3_405b", "deepseek_v3"])
def test_models_have_the_elements_that_transformers_gives_them(name: str) -> None:
    import transformers

    given = json.loads((CONFIGS / f"{name}.json").read_text())
    config: Any = transformers.AutoConfig.for_model(**given)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    planned = json.loads(run(str(CONFIGS / f"{name}.json"), "--ranks", "64", "--json"))
    assert planned["elements"] == sum(parameter.numel() for parameter in model.parameters())
    names = {unit["name"] for unit in planned["units"]} - {"(root)"}
    assert names == {f"model.layers.{k}" for k in range(config.num_hidden_layers)}
    for unit in planned["units"][1::10]:
        layer = model.get_submodule(unit["name"])
        assert unit["elements"] == sum(parameter.numel() for parameter in layer.parameters())


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


def test_safetensors_files_and_their_index(tmp_path: Path) -> None:
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
    assert "--flops needs the model's config.json" in run(
        str(tmp_path), *["--ranks", "2", "--flops", "1e12", "--sequence", "8", "--rate", "1GB"], code=2
    )
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "which the index names, is not there" in run(str(index), "--ranks", "2", code=2)
    assert "has neither a config.json nor safetensors files" in run(str(tmp_path / ".."), "--ranks", "2", code=2)


def test_a_file_alone(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "weights.safetensors", ["model.norm.weight", "model.layers.0.mlp.experts.0.w"])
    planned = json.loads(run(str(tmp_path / "weights.safetensors"), "--ranks", "2", "--json"))
    assert [unit["elements"] for unit in planned["units"]] == [8, 32]
