"""libfsdp.save, load, load_latest and AsyncSaver: a run goes on as if it had not stopped, and a fault changes nothing."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.marks import on_ranks
from support.ranks import StartRanks
from support.states import assert_same_state, flatten, same, save_by_torch, train_more, trained
from support.training import CASES, Options, full
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import libfsdp


def fresh(case: str, options: Options = Options()) -> tuple[Any, torch.optim.Optimizer]:  # noqa: B008
    """With other values than the saved model has."""
    model, optimizer = trained(case, "libfsdp", options, steps=0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(3.0)
    return model, optimizer


def save_and_go_on(path: str, case: str, options: Options) -> list[float]:
    """The losses after the save, of a run that does not stop."""
    model, optimizer = trained(case, "libfsdp", options)
    libfsdp.save(path, model, optimizer, {"step": 2})
    return train_more(model, optimizer, case, range(2, 4))


@pytest.mark.parametrize("options", [Options(), Options(optimizer="sgd")], ids=["adamw", "sgd"])
@pytest.mark.parametrize("case", ["mlp", "tied", "batch_norm", "nested", "odd_shapes"])
@on_ranks(2)
def test_a_run_goes_on_with_the_same_bits(tmp_path: Path, case: str, options: Options) -> None:
    path = str(tmp_path / "step-2")
    expected = save_and_go_on(path, case, options)
    model, optimizer = fresh(case, options)
    loaded = libfsdp.load(path, model, optimizer)
    assert loaded.extra == {"step": 2}
    assert loaded.rng
    assert not loaded.missing
    assert not loaded.unexpected
    assert train_more(model, optimizer, case, range(2, 4)) == expected


def values_of(path: str, case: str, options: Options) -> dict[str, Any]:
    """Whole ones, of a model and an optimizer that were loaded."""
    model, optimizer = fresh(case, options)
    libfsdp.load(path, model, optimizer, rng=False)
    with torch.no_grad():
        state = get_state_dict(model, optimizer)
        return {name: full(v) if isinstance(v, torch.Tensor) else v for name, v in flatten(state).items()}


def test_other_ranks_meshes_and_dtypes_have_the_same_values(ranks: StartRanks, tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    ranks(4).run(save_and_go_on, path, "odd_shapes", Options(replicas=2))
    two = ranks(2).run(values_of, path, "odd_shapes", Options(reshard=False))
    four = ranks(4).run(values_of, path, "odd_shapes", Options())
    for found in (*two, *four):
        assert found.keys() == two[0].keys()
        assert all(same(found[name], value) for name, value in two[0].items())


@on_ranks(2)
def test_exchange_with_torchs_checkpoints(tmp_path: Path) -> None:
    """Each reads what the other wrote, with the optimizer."""
    folder = str(tmp_path)
    model, optimizer = trained("tied", "libfsdp")
    expected = get_state_dict(model, optimizer)
    libfsdp.save(f"{folder}/ours", model, optimizer)
    other, its = fresh("tied")
    model_state, optimizer_state = get_state_dict(other, its)
    # Tied parameters have one name in a checkpoint of libfsdp.
    names = set(dcp.FileSystemReader(f"{folder}/ours").read_metadata().state_dict_metadata)
    aliases = {name for name in model_state if f"model.{name}" not in names}
    assert len(aliases) == 1
    state = {"model": {k: v for k, v in model_state.items() if k not in aliases}, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=f"{folder}/ours")
    set_state_dict(other, its, model_state_dict=model_state, optim_state_dict=state["optim"])
    assert_same_state(get_state_dict(other, its), expected)

    save_by_torch(tmp_path / "theirs", model, optimizer)
    third, its = fresh("tied")
    libfsdp.load(f"{folder}/theirs", third, its)
    assert_same_state(get_state_dict(third, its), expected)


@on_ranks(2)
def test_all_kinds_of_optimizers(tmp_path: Path) -> None:
    """Those of torch and of libfsdp, some of whose parameters are not updated."""
    folder = str(tmp_path)
    makers: list[Any] = [
        lambda p: libfsdp.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: libfsdp.optim.SGD(p, lr=0.1),
        lambda p: libfsdp.optim.AdamW8bit(p, lr=0.1, min_8bit_size=256),
        lambda p: libfsdp.optim.Muon([one for one in p if one.ndim == 2], lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.1, foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    ]

    def make(maker: Any) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16))
        libfsdp.fully_shard(model[0])
        libfsdp.fully_shard(model)
        return model, maker(model.parameters())

    def steps(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
        for step in range(2):
            torch.manual_seed(seed + step)
            model(torch.randn(8, 16)).square().mean().backward()
            for p in model[2].parameters():
                p.grad = None
            optimizer.step()
            optimizer.zero_grad()

    for number, maker in enumerate(makers):
        path = f"{folder}/{number}"
        model, optimizer = make(maker)
        steps(model, optimizer, 0)
        libfsdp.save(path, model, optimizer)
        other, its = make(maker)
        before = [full(p) for p in other.parameters()]
        with pytest.raises(libfsdp.Error, match="not there"):
            libfsdp.load(f"{folder}/not there", other, its)
        assert type(optimizer).__name__ == "Adagrad" or not its.state  # nothing was loaded
        assert all(map(torch.equal, map(full, other.parameters()), before))
        libfsdp.load(path, other, its)
        assert {n for n, p in other.named_parameters() if its.state.get(p)} == {
            n for n, p in model.named_parameters() if optimizer.state.get(p)
        }
        for one in ((model, optimizer), (other, its)):
            steps(*one, 2)
        assert_same_state(other.state_dict(), model.state_dict())
        assert_same_state(its.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("placements", ["no_shard", "optim", "optim_grads_params"])
@on_ranks(2)
def test_placements_and_schedules(tmp_path: Path, placements: str) -> None:
    """Parameters that each rank has whole, buffers, frozen parameters, and a schedule."""
    path = str(tmp_path / "a")

    def make() -> tuple[Any, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        model[0].weight.requires_grad_(False)
        libfsdp.fully_shard(model, placements=placements)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def steps(model: Any, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        for _ in range(2):
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    torch.manual_seed(dist.get_rank())
    run = make()
    steps(*run)
    libfsdp.save(path, *run[:2], {"schedule": run[2].state_dict()})
    steps(*run)
    torch.manual_seed(9)
    other = make()
    loaded = libfsdp.load(path, *other[:2])
    other[2].load_state_dict(loaded.extra["schedule"])
    steps(*other)
    assert other[1].param_groups[0]["lr"] == run[1].param_groups[0]["lr"] == 0.1 / 16
    assert_same_state(dict(other[0].named_parameters()), dict(run[0].named_parameters()))
    third = make()
    libfsdp.load(path, *third[:2], optimizer_settings=False)
    assert third[1].param_groups[0]["lr"] == 0.1


def values_of_programs(path: str) -> None:
    rank = dist.get_rank()
    model, _ = trained("mlp", "libfsdp", steps=0)
    extra = {
        "none": None,
        "flag": True,
        "step": 7,
        "large": -(2**63),
        "loss": 0.5,
        "text": "ü",
        "bytes": b"\0\xff",
        "tensor": torch.arange(6).view(2, 3).t(),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "nested": {"a": [1, (2.5, None)], 3: {"b": "c"}},
        "counter": Counter("aab"),
    }
    with_tensors = {"state": {"a.b": torch.ones(2), "c": 1, "list": [0, torch.zeros(1), {"d": torch.ones(1)}]}}
    torch.manual_seed(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))  # makes its state
    position = {"position": 10 * rank, **({"only": "here"} if rank == 1 else {})}
    libfsdp.save(path, model, extra=extra | with_tensors, rank_extra=position, metric=0.25, grad_scaler=scaler)
    drawn = torch.rand(3)

    other = torch.amp.GradScaler("cpu", init_scale=4.0)
    other.scale(torch.ones(()))
    phases: list[libfsdp.PhaseReport] = []
    loaded = libfsdp.load(path, model, grad_scaler=other, on_phase=phases.append)
    assert torch.equal(torch.rand(3), drawn)
    for name in ("tensor", "scalar"):
        assert loaded.extra[name].dtype == extra[name].dtype
        assert torch.equal(loaded.extra.pop(name), extra.pop(name))
    found = loaded.extra.pop("state")
    assert_same_state({name: found[name] for name in with_tensors["state"]}, with_tensors["state"])
    assert loaded.extra == extra
    assert [type(value) for value in loaded.extra["nested"]["a"]] == [int, tuple]
    assert loaded.rank_extra == position
    assert libfsdp.read_rank_extra(path)[0] == {"position": 0}
    assert loaded.metric == 0.25
    assert other.get_scale() == 8.0
    assert [one.phase for one in phases] == ["open", "check", "assign"]
    assert phases[1].bytes == phases[2].bytes > 0


def test_values_of_the_program(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(2).run(values_of_programs, str(tmp_path / "a"))
    # Of another number of ranks, a rank has no values of its own.
    assert ranks(4).run(own_values, str(tmp_path / "a")) == [({}, False)] * 4


def own_values(path: str) -> tuple[dict[str, Any], bool]:
    loaded = libfsdp.load(path, trained("mlp", "libfsdp", steps=0)[0])
    return loaded.rank_extra, loaded.rng


@on_ranks(2)
def test_refusals(tmp_path: Path) -> None:
    """Errors come on all ranks, and change nothing."""
    folder = str(tmp_path)
    rank = dist.get_rank()
    model, optimizer = trained("mlp", "libfsdp")
    libfsdp.save(f"{folder}/step-1", model, optimizer)
    before = [full(p) for p in model.parameters()]

    for value, text in ((object(), "of the type object"), (2**63, "of the type int"), ((torch.ones(1),), "Tensor")):
        with pytest.raises(libfsdp.Error, match=rf"nothing was saved:\n  rank 1: 'rank_extra.1.x'.*{text}"):
            libfsdp.save(f"{folder}/step-2", model, rank_extra={"x": value} if rank == 1 else {})
    with pytest.raises(libfsdp.Error, match=r"'rank_extra.1.x' has the text 'a\\udcff', whose surrogates have no place"):
        libfsdp.save(f"{folder}/step-2", model, rank_extra={"x": ["a\udcff"]} if rank == 1 else {})
    with pytest.raises(libfsdp.Error, match=r"the name 'extra.\\udcff' has surrogates"):
        libfsdp.save(f"{folder}/step-2", model, extra={"\udcff": 1})
    with pytest.raises(libfsdp.Error, match=r"extra\['a'\]\['b'\] and extra\['a.b'\] would both be saved by the name"):
        libfsdp.save(f"{folder}/step-2", model, extra={"a.b": 1, "a": {"b": torch.ones(1)}})
    with pytest.raises(libfsdp.Error, match="keep_best is 1"):
        libfsdp.save(f"{folder}/step-2", model, keep_best=1)
    strangers = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(libfsdp.Error, match=r"a parameter of the shape \[2, 2\] that is none of the model's"):
        libfsdp.save(f"{folder}/step-2", model, strangers)
    with pytest.raises(ValueError, match="Linear is not sharded"):
        libfsdp.save(f"{folder}/step-2", nn.Linear(2, 2))
    dist.barrier()
    assert os.listdir(folder) == ["step-1"]

    other = nn.Linear(3, 3)
    libfsdp.fully_shard(other)
    with pytest.raises(libfsdp.Error, match=r"does not fit the model.*\n  missing in the checkpoint:\n    model.bias\n"):
        libfsdp.load(f"{folder}/step-1", other)
    loaded = libfsdp.load(f"{folder}/step-1", other, strict=False)
    assert loaded.missing == ["model.bias", "model.weight"]
    assert len(loaded.unexpected) == len(before)
    with pytest.raises(libfsdp.Error, match=r"does not fit the model; it has this below 'model.'"):
        libfsdp.load(f"{folder}/step-1", model, model_prefix="m.")
    with pytest.raises(libfsdp.Error, match=r"optimizer below 'o.'; it has this below 'optim.'"):
        libfsdp.load(f"{folder}/step-1", model, optimizer, optimizer_prefix="o.")
    name = next(name for name, p in model.named_parameters() if p.ndim == 2)
    shape = list(model.get_parameter(name).shape)
    takes = {"rename": lambda key: f"model.{name}", "ignore": lambda key: key != "model.weight"}
    with pytest.raises(libfsdp.Error, match=rf"has shape \[{shape[0]}, {shape[1]}\], the model's has \[3, 3\]"):
        libfsdp.load(f"{folder}/step-1", other, **takes)  # type: ignore[arg-type]
    fitting = nn.Linear(shape[1], shape[0])
    libfsdp.fully_shard(fitting)
    libfsdp.load(f"{folder}/step-1", fitting, **takes)  # type: ignore[arg-type]
    assert torch.equal(full(fitting.weight), full(model.get_parameter(name)))
    libfsdp.save(f"{folder}/step-2", model)
    with pytest.raises(libfsdp.Error, match=r"has no state of an optimizer below 'optim.'"):
        libfsdp.load(f"{folder}/step-2", model, optimizer)
    assert all(map(torch.equal, map(full, model.parameters()), before))


@on_ranks(2)
def test_what_one_rank_finds_is_everybodys_error(tmp_path: Path) -> None:
    """What one rank finds, or can't open, is everybody's error, and changes nothing."""
    folder = str(tmp_path)
    rank = dist.get_rank()
    model: Any = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    libfsdp.fully_shard(model)
    muon = libfsdp.optim.Muon(model.parameters(), lr=0.1)
    for number in (1, 2):
        model(torch.ones(2, 16)).sum().backward()
        muon.step()
        muon.zero_grad()
        libfsdp.save(f"{folder}/step-{number}", model, muon)
    before = [full(p) for p in model.parameters()]
    with pytest.raises(libfsdp.Error, match=r"rank 1: .*step-2 is another checkpoint than rank 0 reads"):
        libfsdp.load(f"{folder}/step-{1 + rank}", model)
    fresh_muon = libfsdp.optim.Muon(model.parameters(), lr=0.1)
    with pytest.raises(libfsdp.Error, match=r"nothing was loaded:\n  rank 1: "):
        libfsdp.load(f"{folder}/step-{1 + 6 * rank}", model, fresh_muon)
    assert not fresh_muon.state
    assert all(map(torch.equal, map(full, model.parameters()), before))
    libfsdp.load(f"{folder}/step-2", model, fresh_muon)
    assert fresh_muon.state


@on_ranks(2)
def test_how_an_optimizer_computes_is_the_programs(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model, _ = trained("mlp", "libfsdp", steps=0)
    saved = torch.optim.AdamW(model.parameters(), lr=0.25, fused=True)
    train_more(model, saved, "mlp", range(1))
    for group in saved.param_groups:
        group["capturable"] = True
    libfsdp.save(f"{folder}/step-1", model, saved)
    given = libfsdp.optim.AdamW(model.parameters(), lr=0.5)
    libfsdp.load(f"{folder}/step-1", model, given)
    assert (given.param_groups[0]["lr"], given.param_groups[0]["capturable"]) == (0.25, False)
    train_more(model, given, "mlp", range(1))


def settings_of_groups(folder: str) -> None:
    """Settings belong to parameters, whatever the groups are, and however they are laid out in the checkpoint."""

    def make(*sizes: int) -> tuple[Any, torch.optim.Optimizer]:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        libfsdp.fully_shard(model)
        parameters = list(model.parameters())
        groups = [{"params": [parameters.pop(0) for _ in range(size)], "lr": 0.5 / size} for size in sizes]
        return model, torch.optim.SGD(groups, lr=1.0, momentum=0.9)

    model, optimizer = make(4, 2)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    libfsdp.save(f"{folder}/ours", model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=f"{folder}/flat")
    for name in ("ours", "flat"):
        other, its = make(2, 2, 2)
        libfsdp.load(f"{folder}/{name}", other, its, rng=False)
        assert [group["lr"] for group in its.param_groups] == [0.125, 0.125, 0.25]
        assert_same_state(other.state_dict(), model.state_dict())
        other, its = make(2, 4)
        with pytest.raises(libfsdp.Error, match=r"in one group here, but were saved with different settings \(lr: 0.125 and 0.25\)"):
            libfsdp.load(f"{folder}/{name}", other, its, rng=False)
        assert [group["lr"] for group in its.param_groups] == [0.25, 0.125]
        assert not its.state
        libfsdp.load(f"{folder}/{name}", other, its, rng=False, optimizer_settings=False)
        assert [group["lr"] for group in its.param_groups] == [0.25, 0.125]


def test_settings_of_groups(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(2).run(settings_of_groups, str(tmp_path))


def damage(file: Path) -> None:
    """A bit of a tensor's values."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@on_ranks(2)
def test_what_is_damaged_is_not_taken(tmp_path: Path) -> None:
    folder = str(tmp_path)
    rank = dist.get_rank()
    model, optimizer = trained("mlp", "libfsdp")
    libfsdp.save(f"{folder}/step-1", model, optimizer)
    kept = get_state_dict(model, optimizer)
    expected = {name: full(v) if isinstance(v, torch.Tensor) else v for name, v in flatten(kept).items()}
    train_more(model, optimizer, "mlp", range(2, 4))
    libfsdp.save(f"{folder}/step-2", model, optimizer)
    if rank == 0:
        damage(Path(folder, "step-2", "__1_0.distcp"))
    dist.barrier()

    model, optimizer = fresh("mlp")
    with pytest.raises(libfsdp.Error, match=r"nothing was loaded:\n  rank \d: .*__1_0.distcp"):
        libfsdp.load(f"{folder}/step-2", model, optimizer, rng=False)
    assert not optimizer.state
    assert all(bool((full(p) == 3.0).all()) for p in model.parameters())

    with pytest.raises(libfsdp.Error, match="the load ended halfway"):
        libfsdp.load(f"{folder}/step-2", model, optimizer, check_first=False, rng=False)
    batch = torch.zeros(1)
    for use in (
        lambda: model(batch),
        optimizer.step,
        model.state_dict,
        lambda: libfsdp.save(f"{folder}/step-3", model),
    ):
        with pytest.raises(libfsdp.Error, match="partly loaded"):
            use()
    with pytest.raises(libfsdp.Error, match="would keep values of it"):
        libfsdp.load(f"{folder}/step-1", model, optimizer, ignore=lambda name: name.startswith("model."))
    with pytest.raises(libfsdp.Error, match="partly loaded"):
        model(batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = libfsdp.load_latest(folder, model, optimizer)
    assert loaded is not None
    assert loaded.path == f"{folder}/step-1"
    assert [skipped.split(":")[0] for skipped in loaded.skipped] == [f"{folder}/step-2"]
    assert "load_latest took" in str(caught[0].message)
    found = flatten(get_state_dict(model, optimizer))
    for name, value in expected.items():
        assert same(full(found[name]) if isinstance(value, torch.Tensor) else found[name], value), name
    train_more(model, optimizer, "mlp", range(1))  # usable again

    dist.barrier()
    if rank == 0:
        damage(Path(folder, "step-1", "__0_0.distcp"))
    dist.barrier()
    with pytest.raises(libfsdp.Error, match=r"no checkpoint in .* is intact"):
        libfsdp.load_latest(folder, model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert libfsdp.load_latest(f"{folder}/none", model) is None
    assert [f"there is no folder {folder}/none" in str(one.message) for one in caught] == [True] * (rank == 0)


@on_ranks(2)
def test_which_checkpoints_stay(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model, _ = trained("mlp", "libfsdp", steps=0)
    for step, metric in enumerate([3.0, 1.0, 2.0, 5.0, 4.0]):
        libfsdp.save(f"{folder}/step-{step}", model, keep_last=2, keep_best=1, metric=metric)
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["step-1", "step-3", "step-4"]
    assert libfsdp.latest(folder) == f"{folder}/step-4"
    assert libfsdp.best(folder) == f"{folder}/step-1"
    assert libfsdp.latest(f"{folder}/none") is None
    assert libfsdp.best(f"{folder}/none") is None


@on_ranks(2)
def test_saves_beside_training(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model, optimizer = trained("mlp", "libfsdp")
    saver = libfsdp.AsyncSaver(model, optimizer)
    expected = [full(p) for p in model.parameters()]
    os.chdir(folder)
    os.makedirs("elsewhere", exist_ok=True)
    phases: list[libfsdp.PhaseReport] = []
    saver.save("step-1", {"step": 1}, on_phase=phases.append)
    os.chdir("elsewhere")  # a relative path is resolved at the call
    train_more(model, optimizer, "mlp", range(2, 4))
    saver.save(f"{folder}/step-2", {"step": 2}, keep_last=2)
    saver.wait()
    assert [one.phase for one in phases] == ["collect", "write", "commit", "prune"]
    other, its = fresh("mlp")
    assert libfsdp.load(f"{folder}/step-1", other, its).extra == {"step": 1}
    assert all(map(torch.equal, map(full, other.parameters()), expected))
    assert libfsdp.latest(folder) == f"{folder}/step-2"

    Path(folder, "file").touch()
    saver.save(f"{folder}/file/step-3")
    with pytest.raises(libfsdp.Error, match="could not be written"):
        saver.wait()
    saver.save(f"{folder}/step-4")
    saver.wait()
    assert libfsdp.latest(folder) == f"{folder}/step-4"


@on_ranks(2)
def test_whole_parameters_that_are_kept(tmp_path: Path) -> None:
    """A model that keeps whole parameters computes with what was loaded."""
    path = str(tmp_path / "a")
    model, _ = trained("mlp", "libfsdp", Options(reshard=False), steps=0)
    batch = CASES["mlp"].batch(torch.Generator().manual_seed(0))
    libfsdp.save(path, model)
    with torch.no_grad():
        expected = model(*batch)
        for p in model.parameters():
            p.zero_()
        assert not torch.equal(model(*batch), expected)
        libfsdp.load(path, model)
        assert torch.equal(model(*batch), expected)


def test_the_package_shows_what_is_its_own() -> None:
    names = dir(libfsdp)
    assert {"os", "torch"}.isdisjoint(names)
    assert set(libfsdp.__all__) <= set(names)
