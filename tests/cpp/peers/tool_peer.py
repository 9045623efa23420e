"""The Python side of tests/cpp/tools/fsdp_ckpt_test.cpp: writes what the command is to read, and checks what it wrote.

    tool_peer.py COMMAND FOLDER

Exits with 0 if all is as expected; otherwise with an exception that says what is not.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from checkpoint_peer import check_same, write_two_ranks
from safetensors.torch import load_file, save_file


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        # More than one block of the converter.
        "large.weight": torch.randn(1100, 1000, generator=generator),
        "half": torch.randn(3, 5, generator=generator).half(),
        "bfloat": torch.randn(7, generator=generator).bfloat16(),
        "count": torch.arange(6),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }


def state(of_model: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"model": of_model, "optim": {"m": torch.ones(4)}, "step": 7, "name": "a 'run'\n"}


def write(folder: Path) -> None:
    """Checkpoints that differ, and one of several ranks."""
    dcp.save(state(model()), checkpoint_id=folder / "dcp", no_dist=True)
    other: dict[str, Any] = state(model())
    other["model"]["large.weight"][1000, 3] += 0.5
    other["model"]["half"] = other["model"]["half"].float()
    other["model"]["bfloat"] = other["model"]["bfloat"][:6]
    other["model"]["new"] = other["model"].pop("count")
    other["step"] = 8
    dcp.save(other, checkpoint_id=folder / "other", no_dist=True)
    save_file(model(), folder / "python.safetensors")
    write_two_ranks(folder)


def load_model(folder: Path) -> dict[str, torch.Tensor]:
    """Of safetensors in one file or several."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def check_converted(folder: Path) -> None:
    check_same(sorted_by_name(load_model(folder / "one")), sorted_by_name(model()))
    check_same(sorted_by_name(load_model(folder / "many")), sorted_by_name(model()))
    assert len(list((folder / "many").glob("*.safetensors"))) > 1
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        expected = {key: value.to(dtype) if value.is_floating_point() else value for key, value in model().items()}
        check_same(sorted_by_name(load_model(folder / name)), sorted_by_name(expected))
    whole = {
        "rows": torch.arange(15.0).reshape(5, 3),
        "few": torch.arange(3.0).reshape(1, 3),
        "columns": torch.arange(8).reshape(2, 4),
    }
    check_same(sorted_by_name(load_model(folder / "two_ranks_converted")), sorted_by_name(whole))
    for name, prefix in (("back", "model"), ("back_many", "net")):
        found = {prefix: {key: torch.zeros_like(value) for key, value in model().items()}}
        dcp.load(found, checkpoint_id=folder / name, no_dist=True)
        check_same(found[prefix], model())
    assert len(list((folder / "back_many").glob("*.distcp"))) == len(model())


def sorted_by_name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(sorted(tensors.items()))


def main() -> None:
    command, folder = sys.argv[1:]
    {"write": write, "check_converted": check_converted}[command](Path(folder))


if __name__ == "__main__":
    main()
