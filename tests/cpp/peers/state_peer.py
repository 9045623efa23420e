"""The Python side of tests/cpp/state/python_test.cpp: reads what C++ wrote, trains on, and writes it again.

    state_peer.py plain IN OUT     loads into plain tensors in one process, and saves these
    state_peer.py fsdp2 IN OUT     run by torchrun: loads into a model of FSDP2, saves to OUT/0, trains, saves to OUT/3
    state_peer.py programs IN OUT  run by torchrun: loads, and saves to OUT/titan and OUT/trainer, as other programs do
    state_peer.py types IN         values have the types that torch.optim.Muon, AdamW and GradScaler give them
    state_peer.py settings L OUT   run by torchrun: saves an optimizer with groups and a schedule; L is "listed" or "flattened"
    state_peer.py check_settings IN   the same settings, without the schedule
    state_peer.py extra OUT        saves None, dictionaries and lists of all kinds
    state_peer.py check_extra IN   the same values

Exits with 0 if all went well.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))  # its support
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.end_of_rank import end_rank
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

HIDDEN = (13, 7, 22, 16)
WIDTH = 10
STEPS = 3


class Block(nn.Module):
    """StackBlock of tests/cpp/engine/stack.h."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Stack of tests/cpp/engine/stack.h, with the buffer that the tests give it."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for hidden in HIDDEN)
        self.head = nn.Linear(WIDTH, 2)
        self.register_buffer("counts", torch.zeros(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain(source: str, target: str) -> None:
    """Every tensor and value of a checkpoint, through plain tensors."""
    metadata = FileSystemReader(source).read_metadata()
    state: dict[str, Any] = {}
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, BytesStorageMetadata):
            state[name] = None
        else:
            state[name] = torch.zeros(item.size, dtype=item.properties.dtype)
    dcp.load(state, checkpoint_id=source, no_dist=True)
    assert state["optim.param_groups.0.betas"] == (0.9, 0.999), state["optim.param_groups.0.betas"]
    assert state["optim.param_groups.0.lr"] == 1e-2
    assert state["extra.step"] == 2
    assert state["extra.name"] == "a run"
    dcp.save(state, checkpoint_id=target, no_dist=True)


def types(source: str) -> None:
    """Of a checkpoint of C++'s Muon (groups of Muon and of AdamW), of a GradScaler, and of lists and bytes."""
    metadata = FileSystemReader(source).read_metadata()
    items = metadata.state_dict_metadata
    state: dict[str, Any] = {name: None for name, item in items.items() if isinstance(item, BytesStorageMetadata)}
    dcp.load(state, checkpoint_id=source, no_dist=True)

    def check(prefix: str, expected: dict[str, Any]) -> None:
        found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        assert set(found) == set(expected), (found, expected)
        for name, value in expected.items():
            if name != "params":
                assert type(found[name]) is type(value), (prefix, name, found[name], value)
                assert repr(found[name]) == repr(value), (prefix, name, found[name], value)

    weight = nn.Parameter(torch.zeros(2, 2))
    muon = torch.optim.Muon([weight], lr=0.02, weight_decay=0.1, ns_steps=3, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([weight], lr=1e-3)
    check("optim.param_groups.0.", muon.param_groups[0])
    check("optim.param_groups.1.", adamw.param_groups[0])
    weight.grad = torch.ones(2, 2)
    muon.step()
    name = "optim.state.blocks.0.up.weight."
    kinds = {key.removeprefix(name) for key in items if key.startswith(name)}
    assert kinds - {"step"} == set(muon.state[weight]), kinds
    assert items[name + "momentum_buffer"].properties.dtype == muon.state[weight]["momentum_buffer"].dtype
    check("scaler.", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7).state_dict())
    assert state["extra.bytes"] == bytes(range(256))
    assert state["extra.list"] == [1, 2.5, "three", True, [b"four"]], state["extra.list"]
    assert state["rank_extra.1.position"] == 101, state["rank_extra.1.position"]


def sharded() -> tuple[Stack, torch.optim.AdamW]:
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = Stack()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def programs(source: str, target: str) -> None:
    """What is loaded, as torchtitan's Checkpointer, accelerate (for transformers' Trainer) and Megatron-FSDP's programs save it."""
    model, optimizer = sharded()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=source)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    _, flat_optimizer_state = get_state_dict(model, optimizer, options=flat)
    titan = {
        **model_state,
        "optimizer": flat_optimizer_state,
        "lr_scheduler": {"last_epoch": 2, "_last_lr": [1e-2]},
        "dataloader": {f"dp_rank_{dist.get_rank()}": b"state of a loader"},
        "train_state": {"step": torch.tensor(2, dtype=torch.int32), "ntokens_seen": torch.tensor(8)},
    }
    dcp.save(titan, checkpoint_id=Path(target) / "titan")
    dcp.save({"model": model_state}, checkpoint_id=Path(target) / "trainer" / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": optimizer_state}, checkpoint_id=Path(target) / "trainer" / "optimizer_0")
    megatron = {"model": {f"module.{k}": v for k, v in model_state.items()}, "optimizer": optimizer.state_dict()}
    dcp.save(megatron, checkpoint_id=Path(target) / "megatron")
    dist.destroy_process_group()


def settings(layout: str, target: str) -> None:
    """An optimizer whose groups and schedule have settings of their own."""
    model, _ = sharded()
    rest = [*model.entry.parameters(), *model.head.parameters()]
    groups = [{"params": model.blocks.parameters(), "lr": 0.25}, {"params": rest, "betas": (0.6, 0.7)}]
    optimizer = torch.optim.AdamW(groups, lr=0.5, betas=(0.7, 0.8), eps=1e-4, weight_decay=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 if step == 0 else 0.125)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    schedule.step()
    options = StateDictOptions(flatten_optimizer_state_dict=layout == "flattened")
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=target)
    dist.destroy_process_group()


def values_of(source: str) -> dict[str, Any]:
    """All that is no tensor, by its flat name."""
    items = FileSystemReader(source).read_metadata().state_dict_metadata
    state: dict[str, Any] = {name: None for name, item in items.items() if isinstance(item, BytesStorageMetadata)}
    dcp.load(state, checkpoint_id=source, no_dist=True)
    return state


def check_settings(source: str) -> None:
    """Of C++, which has loaded what settings() has saved, and set the schedule's factor to 1."""
    state = values_of(source)
    found = {}
    for index in range(2):
        group = {
            name: state[f"optim.param_groups.{index}.{name}"]
            for name in ("lr", "betas", "eps", "weight_decay", "params")
        }
        found["blocks" if group.pop("params")[0].startswith("blocks.") else "rest"] = group
    assert found == {
        "blocks": {"lr": 0.25, "betas": (0.7, 0.8), "eps": 1e-4, "weight_decay": 0.25},
        "rest": {"lr": 0.5, "betas": (0.6, 0.7), "eps": 1e-4, "weight_decay": 0.25},
    }, found


def extra_values() -> dict[str, Any]:
    """Values as training scripts keep them."""
    return {
        "step": 7,
        "best": None,
        "scheduler": {"last_epoch": 3, "base_lrs": [0.5, 0.25], "warm": {"on": True, "order": torch.arange(4)}},
        "seen": [1, None, {"file": "a.txt", "line": 12}],
        "tensors": [torch.ones(2), [torch.zeros(1), "x"]],
        "nothing": [],
    }


def extra(target: str) -> None:
    """What extra_values() gives, in a checkpoint."""
    state = {"model": {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, "extra": extra_values()}
    dcp.save(state, checkpoint_id=target, no_dist=True)


def check_extra(source: str) -> None:
    """A checkpoint of C++ gives these values to a program that asks for them as DCP's users do."""

    def blank(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: blank(item) for key, item in value.items()}
        if isinstance(value, list) and any(isinstance(item, (torch.Tensor, dict, list)) for item in value):
            return [blank(item) for item in value]
        return torch.full_like(value, 9) if isinstance(value, torch.Tensor) else "blank"

    expected = extra_values()
    state = {"extra": blank(expected)}
    dcp.load(state, checkpoint_id=source, no_dist=True)

    def check(found: Any, wanted: Any) -> None:
        if isinstance(wanted, dict):
            assert set(found) == set(wanted), (found, wanted)
            for key in wanted:
                check(found[key], wanted[key])
        elif isinstance(wanted, list):
            assert len(found) == len(wanted), (found, wanted)
            for one, other in zip(found, wanted, strict=True):
                check(one, other)
        elif isinstance(wanted, torch.Tensor):
            assert torch.equal(found, wanted), (found, wanted)
        else:
            assert type(found) is type(wanted), (found, wanted)
            assert found == wanted, (found, wanted)

    check(state["extra"], expected)


def fsdp2(source: str, target: str) -> None:
    """Trains the model on with FSDP2."""
    model, optimizer = sharded()

    def save(name: str) -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=Path(target) / name)

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=source)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    save("0")
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(str(STEPS))
    dist.destroy_process_group()


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {
        "plain": plain,
        "fsdp2": fsdp2,
        "programs": programs,
        "types": types,
        "settings": settings,
        "check_settings": check_settings,
        "extra": extra,
        "check_extra": check_extra,
    }
    commands[sys.argv[1]](*sys.argv[2:])
    end_rank()
