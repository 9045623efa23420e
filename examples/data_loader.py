"""A DataLoader with workers, and a run that is stopped in the middle of an epoch and goes on with the sample that comes next.

torchrun --nproc-per-node 2 examples/data_loader.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import libfsdp

SAMPLES = 96
BATCH = 4  # of a rank
EPOCHS = 2


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """Samples that can be computed from their numbers; workers load them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        return number, torch.randn(8, generator=torch.Generator().manual_seed(number))


class RestOfEpoch(Sampler[int]):
    """The samples of this rank that an epoch has not used yet, in the epoch's order, which is the same on all ranks."""

    def __init__(self, epoch: int, used: int) -> None:
        """Of an epoch of which all ranks together have used so many samples."""
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        rest = order[used:]
        ranks = dist.get_world_size()
        rest = rest[: len(rest) // (ranks * BATCH) * ranks * BATCH]  # all ranks make the same number of steps
        self.mine = rest[dist.get_rank() :: ranks]

    def __iter__(self) -> Iterator[int]:
        return iter(self.mine)

    def __len__(self) -> int:
        return len(self.mine)


def train(folder: str, most_steps: int) -> list[int]:
    """Goes on from the newest checkpoint; the numbers of the samples that this rank has trained on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    libfsdp.fully_shard(model)
    optimizer = libfsdp.optim.AdamW(model.parameters(), lr=1e-2)

    # The position counts samples of all ranks, so that it holds for any number of ranks. What each rank has of its own, such as a
    # buffer of shuffled samples, goes to rank_extra; libfsdp.read_rank_extra gives a run on fewer ranks those of all.
    epoch, used, seen, steps = 0, 0, list[int](), 0
    if loaded := libfsdp.load_latest(folder, model, optimizer):
        epoch, used = loaded.extra["epoch"], loaded.extra["used"]
        seen = loaded.rank_extra.get("seen", [])
    while epoch < EPOCHS and steps < most_steps:
        # Workers read ahead; the position is that of the step, not theirs.
        loader = DataLoader(Numbers(), batch_size=BATCH, sampler=RestOfEpoch(epoch, used), num_workers=2)
        for numbers, x in loader:
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen = [*seen, *numbers.tolist()]
            used += BATCH * dist.get_world_size()
            steps += 1
            if steps == most_steps:
                break
        else:
            epoch, used = epoch + 1, 0
    libfsdp.save(
        f"{folder}/step-{epoch * SAMPLES + used}",
        model,
        optimizer,
        {"epoch": epoch, "used": used},
        rank_extra={"seen": seen},
    )
    return seen


if __name__ == "__main__":
    dist.init_process_group("gloo")
    where = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where)
    train(where[0], most_steps=5)  # as if it had been stopped in the middle of the first epoch
    found = train(where[0], most_steps=1000)
    if dist.get_rank() == 0:
        print(f"{len(found)} samples in {EPOCHS} epochs, {len(set(found))} of them different")
    dist.destroy_process_group()
