"""Torch's collectives by the names that do not warn: those of torch 2.13 and later, else the older ones."""

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
