"""Ranks of a run that goes wrong in its third step: `hanging_run.py HOW FOLDER [STORE]`.

Without RANK in the environment, three ranks are forked here; for the HOW "chain" four, two by two. FOLDER is where
checkpoints go; STORE is the process that serves the ranks' store, if none of them does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

import libfsdp

STEPS = 6
FOR_EVER = 1000.0
HOW, FOLDER, *STORE = sys.argv[1:]
SIZE = 4 if HOW == "chain" else 3
GUILTY = SIZE - 1 if HOW == "chain" else 1
step_number = 0


def now(how: str) -> bool:
    """Whether this rank goes wrong here."""
    return how == HOW and step_number == 3 and dist.get_rank() == GUILTY


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        odd = HOW == "other_shapes" and number == 2 and dist.get_rank() == GUILTY
        self.linear = nn.Linear(8, 8, bias=not odd)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.number == 1:
            go_wrong_in_forward()
        if y.requires_grad:
            y.register_hook(self.in_backward)
        return y

    def in_backward(self, gradient: Tensor) -> None:
        if self.number == 1 and now("sleeps_in_backward"):
            time.sleep(FOR_EVER)


def go_wrong_in_forward() -> None:
    if now("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if now("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if now("killed_in_gather"):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if HOW == "killed_in_gather" and step_number == 3 and dist.get_rank() == GUILTY + 1:
        time.sleep(2)
    if now("exit_code"):
        sys.exit(3)
    if now("exits_at_once"):
        os._exit(3)
    if now("deadlock") or now("chain"):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if now("exception"):
        raise ValueError("this batch is bad")
    if now("caught_exception"):
        raise RuntimeError("this batch is bad")
    if now("slow"):
        time.sleep(0.02)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        order = [0, 1, 2, 3]
        if now("skips_a_block"):
            order = [0, 1, 3]
        if now("other_order"):
            order = [0, 2, 1, 3]
        for number in order:
            x = self.blocks[number](x)
        return x


class Batches(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> Tensor:
        if now("data_loader"):
            time.sleep(FOR_EVER)
        return torch.ones(8)


def train() -> None:
    global step_number
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")) if HOW == "chain" else None
    if HOW == "no_file" and dist.get_rank() == GUILTY:
        os.environ["FSDP_EVENTS"] = ""
    for block in model.blocks:
        libfsdp.fully_shard(block, mesh=mesh)
    libfsdp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(Batches(), batch_size=2))
    for step in range(1, STEPS + 1):
        step_number = step
        if now("too_few_steps"):
            return
        try:
            model(next(batches)).square().mean().backward()
        except RuntimeError as error:
            if "bad" not in str(error):
                raise
            continue
        optimizer.step()
        optimizer.zero_grad()
        between_steps(model, optimizer)


def between_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if now("no_file"):
        time.sleep(FOR_EVER)
    if now("extra_collective"):
        for _ in libfsdp.full_weights(model):
            pass
    if HOW == "full_disk" and step_number == 3:
        libfsdp.save(Path(FOLDER) / "step-3", model, optimizer)
    if HOW == "store_gone" and step_number == 3:
        if dist.get_rank() == GUILTY:
            os.kill(int(STORE[0]), signal.SIGKILL)
        dist.new_group([0, 1])
    if HOW == "link_cut":
        time.sleep(0.1)


def run_rank() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    while True:
        train()
        if HOW not in ("slow", "link_cut"):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    children: list[int] = []
    while "RANK" not in os.environ and len(children) < SIZE:
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = str(len(children))
            children.clear()
        else:
            children.append(child)
    if children:
        for child in children:
            os.waitpid(child, 0)
    else:
        run_rank()
