"""Stage 1 of the kit: libfsdp from Python on one rank, against FSDP2. The argument is written into each row."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import rows
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import device, hugging_face
from support.training import (
    CASES,
    Options,
    Run,
    batch_of,
    full,
    full_gradients,
    make_optimizer,
    seeded,
    shard,
    train,
)
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

bf16, fp32 = torch.bfloat16, torch.float32
TABLE: list[tuple[str, str, Options]] = [
    ("fp32", "transformer", Options()),
    ("bf16, reduced in fp32", "transformer", Options(compute=bf16, reduce=fp32)),
    ("bf16, reduced in bf16", "transformer", Options(compute=bf16)),
    ("not resharded", "odd_shapes", Options(reshard=False)),
    ("clipped", "transformer", Options(clip=0.01)),
    ("offloaded", "transformer", Options(offload=True)),
    ("offloaded, clipped, bf16", "transformer", Options(offload=True, clip=0.01, compute=bf16)),
    ("accumulated", "transformer", Options(microbatches=2, sync="last")),
    ("unused parameters", "unused", Options()),
    ("SGD", "mlp", Options(optimizer="sgd")),
]


def tensors(run: Run) -> Iterator[tuple[str, Mapping[str, Tensor | None]]]:
    """What a run has recorded, with names that two runs of the same options share."""
    for number, step in enumerate(run.steps):
        yield f"step {number}", {"loss": torch.tensor(step.losses), "norm": torch.tensor(step.norm or 0.0)}
        yield f"gradients {number}", step.gradients
        yield f"clipped {number}", step.clipped
    yield "parameters", run.parameters
    yield "buffers", run.buffers


def largest_difference(got: Run, expected: Run) -> tuple[float, str]:
    """Of all tensors: the norm of the difference over the norm of what is expected; and where that is."""
    worst, where = 0.0, "all bits are equal"
    for (what, ours), (_, theirs) in zip(tensors(got), tensors(expected), strict=True):
        assert ours.keys() == theirs.keys(), f"{what}: {sorted(ours)}, not {sorted(theirs)}"
        for name, value in theirs.items():
            other = ours[name]
            assert (value is None) == (other is None), f"{what} of {name}: one has a gradient, the other has none"
            if value is None or other is None or torch.equal(value, other):
                continue
            difference = ((other.double() - value.double()).norm() / value.double().norm().clamp_min(1e-30)).item()
            if not difference <= worst:
                worst, where = difference, f"{what} of {name}"
    return worst, where


def check_training(label: str, name: str, case: str, options: Options) -> None:
    """Three steps by both. Kernels may add up in other orders where tensors lie elsewhere: that much is allowed."""
    with rows.recorded(f"{name} ({case})", kind=label) as row:
        ours, theirs = (train(case, implementation, options) for implementation in ("libfsdp", "fsdp2"))
        row["difference"], row["where"] = largest_difference(ours, theirs)
        # Adam moves by about the learning rate however small a gradient is, so that rounding shows in the parameters at that scale.
        bound = 1e-4 if options.compute is None else 3e-2
        assert row["difference"] <= bound, f"differs by {row['difference']:.3g} in {row['where']}"


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    case = CASES["transformer"]
    case.loss(model, batch_of(case, number, 0, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded(implementation: str) -> tuple[Any, torch.optim.Optimizer]:
    case = CASES["transformer"]
    model = shard(seeded(case), case, implementation, Options())
    return model, make_optimizer(Options(), model.parameters())


def check_checkpoint(label: str, reader: str) -> None:
    """What libfsdp has saved after two steps goes on as it was: the same third step."""
    with rows.recorded(f"checkpoint of libfsdp, loaded by {reader}", kind=label) as row, tempfile.TemporaryDirectory() as folder:
        model, optimizer = sharded("libfsdp")
        for number in range(2):
            step(model, optimizer, number)
        parameters, state = get_state_dict(model, optimizer)
        dcp.save({"model": parameters, "optim": state}, checkpoint_id=Path(folder) / "saved")
        step(model, optimizer, 2)

        other, other_optimizer = sharded(reader)
        parameters, state = get_state_dict(other, other_optimizer)
        dcp.load({"model": parameters, "optim": state}, checkpoint_id=Path(folder) / "saved")
        set_state_dict(other, other_optimizer, model_state_dict=parameters, optim_state_dict=state)
        step(other, other_optimizer, 2)
        expected = {name: full(p) for name, p in model.named_parameters()}
        found = {name: full(p) for name, p in other.named_parameters()}
        worst = max(((found[name] - value).norm() / value.norm()).item() for name, value in expected.items())
        row["difference"] = worst
        assert found.keys() == expected.keys()
        assert worst <= 1e-4


def check_clipping_to_nothing(label: str) -> None:
    """A bound above the norm changes no gradient."""
    with rows.recorded("clip_grad_norm_ above the norm", kind=label):
        model, _ = sharded("libfsdp")
        case = CASES["transformer"]
        case.loss(model, batch_of(case, 0, 0, dist.get_rank())).backward()
        before = full_gradients(model)
        norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)).item()
        exact = sum(g.double().square().sum().item() for g in before.values() if g is not None) ** 0.5
        assert abs(norm - exact) <= 1e-4 * exact, f"the norm is {norm}, not {exact}"
        after = full_gradients(model)
        assert all(g is None or torch.equal(g, after[name]) for name, g in before.items())


def main() -> None:
    label = sys.argv[1]
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with rows.recorded("import", kind=label) as row:
        libfsdp = __import__("libfsdp")
        row["version"] = libfsdp.__version__
    with tempfile.TemporaryDirectory() as folder:
        device.join(0, 1, init_method=f"file://{folder}/store")
        for name, case, options in TABLE:
            check_training(label, name, case, options)
        if hugging_face.available():
            check_training(label, "transformers' model, bf16", "hf_llama", Options(compute=bf16, reduce=fp32))
        check_clipping_to_nothing(label)
        for reader in ("libfsdp", "fsdp2"):
            check_checkpoint(label, reader)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
