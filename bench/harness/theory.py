"""What a sharded step needs at the least: the yardsticks for the measured memory and traffic."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from contenders.gpt import GPT, BatchPlace, GPTConfig, cross_entropy, draw_batch
from torch import Tensor, nn

MIB = 1024.0 * 1024.0
FORMULA = "4 shards (parameters, gradients, 2 moments) + 2 largest units gathered + their gradients + saved activations"


def theory_mib(config: GPTConfig, sequences: int, world: int) -> float:
    """MiB of one rank by FORMULA; two units: one is computed with while the next is gathered or the last is reduced."""
    model = GPT(config)
    blocks = [parameter_bytes(block.parameters()) for block in model.blocks]
    whole = parameter_bytes(model.parameters())
    two_largest = sum(sorted([*blocks, whole - sum(blocks)])[-2:])
    return (4 * whole / world + 2 * two_largest + saved_bytes(model, config, sequences)) / MIB


def least_link_mib(config: GPTConfig, hosts: int, gathered_bytes: int) -> float:
    """MiB that each host has to send to the others in a step with resharding, where every byte crosses once per host.

    Forward gathers all units. The root and the last block are still there when backward begins, the others are gathered again; all
    gradients are reduced: their sums are of fp32. `gathered_bytes`: of a gathered element.
    """
    model = GPT(config)
    blocks = [parameter_bytes(block.parameters()) for block in model.blocks]
    whole = parameter_bytes(model.parameters())
    gathered = (whole + sum(blocks[:-1])) * gathered_bytes / torch.float32.itemsize
    return (gathered + whole) * (hosts - 1) / hosts / MIB


def parameter_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the parameters' elements."""
    return sum(p.numel() * p.element_size() for p in parameters)


def saved_bytes(model: GPT, config: GPTConfig, sequences: int) -> int:
    """Bytes of the distinct storages that autograd holds between forward and backward, the model's own left out."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, targets = draw_batch(config, sequences, BatchPlace(step=0, rank=0, world=1))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = cross_entropy(model(tokens), targets)
    assert loss.grad_fn is not None  # Keeps the graph, and so the storages and their addresses, until here.
    return sum(saved.values())
