"""GRPO: two ranks train a policy, and a third process generates with it what they learn from.

torchrun --nproc-per-node 3 examples/grpo.py

The task has a reward that is easy to check: say the digits of the prompt backwards. After each update the trainers' weights
go to the generator, whole tensor by whole tensor, and its samples come back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import libfsdp

TRAINERS, GENERATOR = [0, 1], 2  # ranks
DIGITS, LENGTH, WIDTH = 6, 3, 32
PROMPTS, GROUP = 8, 16  # of each trainer: the prompts of an update, and the samples of each prompt


class Policy(nn.Module):
    """A small transformer: tokens [samples, length] to logits [samples, length, DIGITS]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(DIGITS, WIDTH)
        self.positions = nn.Parameter(torch.randn(2 * LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x).clone()  # a view would lose the hook of backward if somebody changed it in place


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Those of the answers, [samples, LENGTH]."""
    of_answer = logits[:, LENGTH - 1 : -1].log_softmax(-1)
    return of_answer.gather(-1, tokens[:, LENGTH:, None]).squeeze(-1)


def reward_of(tokens: torch.Tensor) -> torch.Tensor:
    """The fraction of the answer that is right, [samples]."""
    return (tokens[:, LENGTH:] == tokens[:, :LENGTH].flip(1)).float().mean(1)


@torch.no_grad()
def sample(policy: Policy) -> torch.Tensor:
    """Prompts with answers, GROUP samples of each prompt one behind the other."""
    tokens = torch.randint(DIGITS, (PROMPTS, LENGTH)).repeat_interleave(GROUP, 0)
    for _ in range(LENGTH):
        tokens = torch.cat([tokens, policy(tokens)[:, -1].softmax(-1).multinomial(1)], 1)
    return tokens


def train(updates: int, mesh: DeviceMesh) -> tuple[Policy, list[float]]:
    """The sharded policy, and the mean reward of this rank's samples in each update."""
    policy = Policy()
    for layer in policy.layers:
        libfsdp.fully_shard(layer, mesh=mesh)
    libfsdp.fully_shard(policy, mesh=mesh)
    optimizer = libfsdp.optim.AdamW(policy.parameters(), lr=5e-3)
    source = libfsdp.WeightSource(policy, ranks="first")
    sends = dist.get_rank() == TRAINERS[0]
    if sends:  # what will come, once: no rank has to gather anything for it
        dist.send_object_list([source.metadata()], GENERATOR)
    rewards = []
    tokens, before = torch.empty(PROMPTS * GROUP, 2 * LENGTH, dtype=torch.long), torch.empty(PROMPTS * GROUP, LENGTH)
    for update in range(updates + 1):
        for _, tensor in source:  # on the other trainer, none; but it helps to gather them
            dist.send(tensor, GENERATOR)
        if update == updates:
            break
        dist.recv(tokens, GENERATOR)
        dist.recv(before, GENERATOR)
        reward = reward_of(tokens)
        of_group = reward.view(PROMPTS, GROUP)  # a sample is as good as it is better than others of its prompt
        advantage = (of_group - of_group.mean(1, keepdim=True)) / (of_group.std(1, keepdim=True) + 1e-4)
        for _ in range(2):
            ratio = (log_probabilities(policy(tokens), tokens) - before).exp()
            gain = torch.minimum(ratio * advantage.view(-1, 1), ratio.clamp(0.8, 1.2) * advantage.view(-1, 1))
            (-gain.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        rewards.append(reward.mean().item())
    return policy, rewards


def generate(updates: int) -> tuple[Policy, list[float]]:
    """The policy with the last weights, and the mean reward of all samples in each update."""
    policy = Policy()
    coming: list[list[libfsdp.WeightMetadata]] = [[]]
    dist.recv_object_list(coming, TRAINERS[0])

    def receive() -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in coming[0]:
            tensor = torch.empty(shape, dtype=dtype)
            dist.recv(tensor, TRAINERS[0])
            yield name, tensor

    rewards = []
    for update in range(updates + 1):
        libfsdp.load_weights(policy, receive())
        if update == updates:
            break
        samples = [sample(policy) for _ in TRAINERS]
        for rank, tokens in zip(TRAINERS, samples, strict=True):
            dist.send(tokens, rank)
            with torch.no_grad():
                dist.send(log_probabilities(policy(tokens), tokens), rank)
        rewards.append(reward_of(torch.cat(samples)).mean().item())
    return policy, rewards


def run(updates: int = 40) -> tuple[Policy, list[float]]:
    """This rank's policy and rewards."""
    mesh = DeviceMesh("cpu", TRAINERS)  # all ranks make it, and those in it train
    torch.manual_seed(0)
    return generate(updates) if dist.get_rank() == GENERATOR else train(updates, mesh)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_world_size() != len(TRAINERS) + 1:
        sys.exit(f"{len(TRAINERS)} ranks train and one generates: start it with --nproc-per-node {len(TRAINERS) + 1}")
    _, found = run()
    if dist.get_rank() == GENERATOR:
        print(f"mean reward {sum(found[:5]) / 5:.2f} at first, {sum(found[-5:]) / 5:.2f} at last")
    dist.destroy_process_group()
