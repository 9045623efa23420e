"""Stage 6 of the kit: what has an interface or memory of its own, each against the gradients of the same model unsharded."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rows
import torch
import torch.distributed as dist
from cpp import SMALL, TINY_GPT, train_gpt
from support import device
from support.megatron import STRATEGIES, gathered_gradients, plain_model, whole
from support.megatron import batch as small_batch
from support.megatron import shard as shard_as_megatron
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import libfsdp


def reference() -> list[Tensor]:
    """The gradients of one batch."""
    model = plain_model()
    model(small_batch(0, 0)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def largest_difference(got: list[Tensor], expected: list[Tensor]) -> float:
    assert len(got) == len(expected)
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True))


def check(name: str, gradients: Callable[[], list[Tensor]], bound: float = 1e-5) -> None:
    with rows.recorded(name) as row:
        row["difference"] = largest_difference(gradients(), reference())
        assert row["difference"] <= bound, f"gradients differ by {row['difference']:.3g}"


def by_megatron(strategy: str) -> list[Tensor]:
    model = shard_as_megatron(plain_model(), strategy)
    model(small_batch(0, 0)).square().mean().backward()
    model.finish_grad_sync()
    return gathered_gradients(model)


def by_fully_shard(*dims: int, prepare: Callable[[Any], object] = lambda model: None) -> list[Tensor]:
    """The second step's, in which all buffers are used again."""
    mesh = init_device_mesh(device.TYPE, dims, mesh_dim_names=("replicate", "shard")[-len(dims) :])
    model: Any = plain_model()
    for block in model:
        libfsdp.fully_shard(block, mesh=mesh)
    libfsdp.fully_shard(model, mesh=mesh)
    prepare(model)
    for _ in range(2):
        model.zero_grad()
        model(small_batch(0, 0)).square().mean().backward()
    return [whole(p.grad) for p in model.parameters()]


def check_float8() -> None:
    """Weights travel in eight bits: less exact, so the loss is what is compared."""
    with rows.recorded("8-bit gathers of train_gpt") as row, tempfile.TemporaryDirectory() as folder:
        size = (*TINY_GPT, "--steps", 20)
        exact = train_gpt(Path(folder) / "exact", device.TYPE, *size)
        rounded = train_gpt(Path(folder) / "rounded", device.TYPE, *size, "--float8-gather")
        row["difference"] = abs(rounded[-1] - exact[-1]) / exact[-1]
        assert rounded != exact, "nothing was rounded"
        assert row["difference"] < 0.1, f"the last loss differs by {row['difference']:.3g}"


def registered(**options: Any) -> list[Tensor]:
    """By pools that are registered with NCCL's groups: as windows, or on each rank for itself."""
    model = shard_as_megatron(plain_model(), "optim_grads_params", nccl_ub=True, **options)
    for _ in range(2):
        model.zero_grad()
        model(small_batch(0, 0)).square().mean().backward()
        model.finish_grad_sync()
    return gathered_gradients(model)


def check_full_weights() -> None:
    """Of a model on the device, in small buckets, and converted on the way."""
    for dtype in (None, torch.bfloat16):
        with rows.recorded(f"full weights{'' if dtype is None else ' in bf16'}") as row:
            torch.manual_seed(0)
            model: Any = plain_model()
            expected = {name: p.detach().clone() for name, p in model.named_parameters()}
            for block in model:
                libfsdp.fully_shard(block, mesh=init_device_mesh(device.TYPE, (1,)))
            libfsdp.fully_shard(model, mesh=init_device_mesh(device.TYPE, (1,)))
            found = {}
            for bucket in libfsdp.full_weights(model, bucket_bytes=1 << 10, dtype=dtype):
                found.update({name: value.clone() for name, value in bucket})
            row["tensors"] = len(found)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value if dtype is None else value.to(dtype)), name


def train_offloaded(offloaded: bool) -> list[Tensor]:
    """Parameters of some MB each, after three steps of which each drops its gradients."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(700, 700) for _ in range(3))).to(device.TYPE)
    if offloaded:
        for layer in (*model, model):
            libfsdp.fully_shard(layer, mesh=init_device_mesh(device.TYPE, (1,)), offload_policy=CPUOffloadPolicy())
        assert SMALL or all(p.to_local().is_pinned() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batch = torch.randn(8, 700, generator=torch.Generator().manual_seed(step)).to(device.TYPE)
        model(batch).square().mean().backward()
        assert SMALL or not offloaded or all(p.grad.to_local().is_pinned() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return [whole(p.detach()).to("cpu") if offloaded else p.detach().to("cpu") for p in model.parameters()]


def check_pinned_memory() -> None:
    """What is offloaded lies in pages pinned for it alone: torch's allocator of pinned memory gives nothing."""
    with rows.recorded("offloaded parameters of some MB") as row:
        trained = train_offloaded(True)
        if not SMALL:
            row["mib_of_torch"] = round(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) / 2**20, 2)
            assert row["mib_of_torch"] < 1, "torch's allocator has given some of it"
        row["difference"] = largest_difference(trained, train_offloaded(False))
        assert row["difference"] <= 1e-5, f"parameters differ by {row['difference']:.3g}"


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        device.join(0, 1, init_method=f"file://{folder}/store")
        for strategy in STRATEGIES:
            check(f"Megatron's {strategy}", functools.partial(by_megatron, strategy))
        check_pinned_memory()
        check("HSDP of one rank", lambda: by_fully_shard(1, 1))
        check_float8()
        check_full_weights()
        check("buffers of the process group", lambda: by_fully_shard(1, prepare=of_group))
        if SMALL:
            for name in ("nccl_ub", "symmetric memory"):
                rows.record(name, "skipped", why="it needs NCCL")
        else:
            check("nccl_ub, as windows", registered)
            check("nccl_ub, not as windows", lambda: registered(disable_symmetric_registration=True))
            check("symmetric memory", lambda: by_fully_shard(1, prepare=lambda model: model.set_symm_mem_for_comm()))
        dist.destroy_process_group()


def of_group(model: nn.Module) -> None:
    model.set_allocate_memory_from_process_group_for_comm(True)


if __name__ == "__main__":
    main()
