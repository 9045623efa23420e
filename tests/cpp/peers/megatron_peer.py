"""The Python side of tests/cpp/state/megatron_test.cpp: NVIDIA's Megatron-FSDP itself trains, saves and loads.

    megatron_peer.py NAMES SOURCE TARGET FIRST STEPS    run by torchrun: loads SOURCE, if it is not "-", trains steps FIRST to
                                                        FIRST + STEPS - 1 with AdamW, saves TARGET by its own names. NAMES: whose
                                                        SOURCE has, "megatron" or "cpp"

Exits with 0 if all went well.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))  # its support
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from stack import Block, Stack, loss_of
from support.end_of_rank import end_rank

PREFIX = "module."


def load(names: str, source: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As the package's page does; or by the names that C++ gives, into the same tensors."""
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if names == "megatron":
        dcp.load(state, checkpoint_id=source)
    else:
        by_number = state["optimizer"]["state"]
        parameters = [name.removeprefix(PREFIX) for name, _ in model.named_parameters()]
        named = {
            "model": {name.removeprefix(PREFIX): value for name, value in state["model"].items()},
            "optim": {"state": {parameters[number]: of_it for number, of_it in by_number.items()}},
        }
        dcp.load(named, checkpoint_id=source)
        state["optimizer"]["state"] = {parameters.index(name): of_it for name, of_it in named["optim"]["state"].items()}
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])


def main(names: str, source: str, target: str, first: int, steps: int) -> None:
    """Loads, trains and saves."""
    sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))
    package = importlib.import_module("contenders.megatron_on_cpu").peer()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = package.fully_shard_model(
        Stack(10, (13, 7, 22, 16)), fsdp_unit_modules=[Block], zero_dp_strategy=3, device=torch.device("cpu")
    )
    optimizer = package.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    if source != "-":
        load(names, source, model, optimizer)
    for step in range(first, first + steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    end_rank()
