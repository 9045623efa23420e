"""The Python side of tests/cpp/state/python_package_test.cpp: goes on with the package where C++ has stopped, on as many ranks.

    package_peer.py OPTIMIZER SOURCE TARGET FIRST STEPS    run by torchrun: loads SOURCE, trains steps FIRST to FIRST + STEPS - 1
                                                           with AdamW, Muon or AdamW8bit, saves TARGET, with each rank's losses,
                                                           and TARGET.own, by libfsdp.save

Exits with 0 if all went well.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))  # its support
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from stack import Stack, loss_of
from support.end_of_rank import end_rank
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import libfsdp
from libfsdp import _C


def make_optimizers(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """With the settings of the test in C++, whose Muon updates with AdamW what is no matrix of a block."""
    if kind == "AdamW":
        return [libfsdp.optim.AdamW(model.parameters(), lr=1e-2)]
    if kind == "AdamW8bit":
        return [libfsdp.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256)]
    hidden = {name: p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2}
    others = [p for name, p in model.named_parameters() if name not in hidden]
    muon = libfsdp.optim.Muon(hidden.values(), lr=0.02, weight_decay=0.1)
    return [muon, libfsdp.optim.AdamW(others, lr=1e-2)]


def make(kind: str) -> tuple[Stack, list[torch.optim.Optimizer]]:
    model = Stack(32, (64, 32))
    for block in model.blocks:
        libfsdp.fully_shard(block)
    libfsdp.fully_shard(model)
    return model, make_optimizers(kind, model)


def check_own_load(kind: str, source: str, expected: Stack, its: list[torch.optim.Optimizer]) -> None:
    """By libfsdp.load, the state is what torch.distributed.checkpoint has loaded."""
    model, optimizers = make(kind)
    libfsdp.load(source, model, optimizers)
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(found.to_local(), wanted.to_local())
    for one, other in zip(optimizers, its, strict=True):
        for group, its_group in zip(one.param_groups, other.param_groups, strict=True):
            for p, wanted in zip(group["params"], its_group["params"], strict=True):
                assert one.state[p].keys() == other.state[wanted].keys()
                for name, value in one.state[p].items():
                    assert torch.equal(_C.local_of(value), _C.local_of(other.state[wanted][name])), name


def main(kind: str, source: str, target: str, first: int, steps: int) -> None:
    """Loads, trains and saves."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizers = make(kind)
    model_state, optimizer_state = get_state_dict(model, optimizers)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=source)
    set_state_dict(model, optimizers, model_state_dict=model_state, optim_state_dict=optimizer_state)
    check_own_load(kind, source, model, optimizers)
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    model_state, optimizer_state = get_state_dict(model, optimizers)
    state = {"model": model_state, "optim": optimizer_state, f"losses_{dist.get_rank()}": torch.stack(losses)}
    dcp.save(state, checkpoint_id=target)
    libfsdp.save(f"{target}.own", model, optimizers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    end_rank()
