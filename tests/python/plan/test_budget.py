"""Memory budgets: what is chosen fits in a run, a smaller budget takes no more memory, and one that is too small says what would help."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support import training
from support.marks import at_night, needs_transformers, on_ranks
from support.training import batch_of, mesh_of, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

import libfsdp
from libfsdp import _C, MemoryBudget
from libfsdp._core.memory_budget import check_budget
from libfsdp._core.recomputation import set_recomputes

if TYPE_CHECKING:
    from collections.abc import Iterable

CASES = training.CASES
STEPS = 7  # From the sixth on, steps are alike; the first ones may need more.
MODELS = ["transformer", "mlp", "tied", "odd_shapes"]


def sharded(case_name: str, **options: Any) -> Any:
    case = CASES[case_name]
    model = seeded(case)
    for unit in case.units(model):
        libfsdp.fully_shard(unit, mesh=options.get("mesh"))
    return libfsdp.fully_shard(model, **options)


def train(case_name: str, model: Any, steps: int = STEPS) -> tuple[int, int]:
    """The peak of the memory that the engine and the optimizer have had, and what the last step has gathered."""
    case = CASES[case_name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = 0
    for step in range(steps):
        if step:
            before = libfsdp.wire_stats(model)["all_gather_bytes"]
        case.loss(model, batch_of(case, step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [state for of_one in optimizer.state.values() for state in of_one.values() if state.ndim]
    kept = sum(state._local_tensor.nbytes for state in states)
    gathered = libfsdp.wire_stats(model)["all_gather_bytes"] - before
    return libfsdp.memory_stats(model)["total.peak"] + kept, gathered


def message_of_forward(case_name: str, **options: Any) -> str:
    case = CASES[case_name]
    try:
        case.loss(sharded(case_name, **options), batch_of(case, 0, 0, dist.get_rank()))
    except (libfsdp.Error, ValueError) as error:
        return str(error)
    return ""


def needed(case_name: str, **assumed: Any) -> int:
    """The least that a budget must have, by its error."""
    text = message_of_forward(case_name, memory_budget=MemoryBudget(1, **assumed))
    assert "memory_budget 1 byte is too small by " in text, text
    return 1 + int(text.split("too small by ")[1].split()[0])


@pytest.mark.parametrize(
    ("size", "case_name", "count"),
    [
        *((2, case, 4) for case in MODELS),
        *(
            pytest.param(2, case, count, marks=[needs_transformers, *night])
            for case in ("hf_gpt2", "hf_llama")
            for count, night in ((4, ()), (10, (pytest.mark.nightly,)))
        ),
        (4, "transformer", 10),
        *(at_night(2, case, 10) for case in MODELS),
    ],
)
@on_ranks("size")
def test_runs_stay_within_budgets(case_name: str, count: int) -> None:
    least = needed(case_name)
    whole = sum(p.numel() * p.element_size() for p in seeded(CASES[case_name]).parameters())
    _, without = train(case_name, sharded(case_name))
    budgets = [least + 2 * whole * k // (count - 1) for k in range(count)]
    most, gathered = 0, without
    for budget in budgets:
        model = sharded(case_name, memory_budget=budget)
        peak, gathered = train(case_name, model)
        text = f"{budget} of {budgets}: {libfsdp.explain(model)}"
        smaller, most = most, needs(model)
        assert peak <= most <= budget, text
        assert most >= smaller, text
    assert gathered <= without  # With the largest budget.


def needs(model: Any) -> int:
    """What explain() promises."""
    return int(libfsdp.explain(model).split("a step needs at most ")[1].split()[0])


def bytes_of(tensors: Iterable[Any]) -> int:
    return sum(tensor._local_tensor.nbytes for tensor in tensors if tensor is not None and tensor.ndim)


def accumulate(case_name: str, model: Any, mode: str, since: int) -> int:
    """Steps of three microbatches from step ``since`` on. Returns the most that the engine, gradients and optimizer have had."""
    case = CASES[case_name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    peak = 0
    for step in range(STEPS):
        microbatches = 3 if step >= since else 1
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            model.set_requires_gradient_sync(last or mode not in ("unreduced", "root alone"))
            if mode == "root alone":
                model.set_requires_gradient_sync(True, recurse=False)
            if mode == "inner":
                model.set_requires_all_reduce(last)
            model.set_reshard_after_backward(last or mode != "kept")
            model.set_is_last_backward(last or mode != "left")
            others = bytes_of(p.grad for p in model.parameters())
            others += bytes_of(value for state in optimizer.state.values() for value in state.values())
            if step or microbatch:
                libfsdp.reset_peak_memory_stats(model)
            case.loss(model, batch_of(case, step, microbatch, dist.get_rank())).backward()
            peak = max(peak, libfsdp.memory_stats(model)["total.peak"] + others)
        optimizer.step()
        optimizer.zero_grad()
    return peak


# What makes steps of several microbatches need more; on replicas, also "inner".
ACCUMULATIONS = ["reduced", "unreduced", "root alone", "kept", "left"]


@pytest.mark.parametrize(
    ("size", "case_name", "replicas", "modes", "count"),
    [
        (2, "transformer", 1, ACCUMULATIONS, 1),
        (4, "transformer", 2, ["unreduced", "inner"], 1),  # partial sums of replicas
        *(at_night(2, case, 1, ACCUMULATIONS, 8) for case in ("transformer", "mlp", "odd_shapes")),
    ],
)
@on_ranks("size")
def test_gradients_that_add_up_stay_within_budgets(case_name: str, replicas: int, modes: list[str], count: int) -> None:
    whole = sum(p.numel() * p.element_size() for p in seeded(CASES[case_name]).parameters())

    def with_budget(bytes_: int, microbatches: int = 1) -> Any:
        budget = MemoryBudget(bytes_, microbatches=microbatches)
        return sharded(case_name, mesh=mesh_of(replicas), memory_budget=budget)

    def refusal(mode: str, since: int, bytes_: int, microbatches: int = 1) -> str:
        with pytest.raises(libfsdp.Error, match="too small by ") as refused:
            accumulate(case_name, with_budget(bytes_, microbatches), mode, since)
        return str(refused.value)

    plain = 1 + int(refusal("reduced", STEPS, 1).split("too small by ")[1].split()[0])
    for mode in modes:
        least = 1 + int(refusal(mode, 0, 1, microbatches=3).split("too small by ")[1].split()[0])
        text = refusal(mode, 2, least - 1)
        assert "too small by 1 byte:" in text, f"{mode}: {text}"
        assert "of gradients, those of several backwards add up" in text or least == plain, f"{mode}: {text}"
        for part in range(count):
            for since in (0, 2):  # Settings are changed before the first forward, or after it.
                budget = least + 2 * whole * part // count
                model = with_budget(budget)
                peak = accumulate(case_name, model, mode, since)
                text = f"{mode} since step {since}, {peak}: {libfsdp.explain(model)}"
                assert peak <= needs(model) <= budget, text
                assert "gradients: those of several backwards add up" in text, text


@on_ranks(2)
def test_what_is_chosen_changes_no_value() -> None:
    case = CASES["transformer"]
    plain, chosen = sharded("transformer"), sharded("transformer", memory_budget=1 << 30)
    for step in range(3):
        for model in (plain, chosen):
            case.loss(model, batch_of(case, step, 0, dist.get_rank())).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    for one, other in zip(plain.parameters(), chosen.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    assert libfsdp.explain(plain) == "no memory_budget: all options are as they were given\n"
    assert "prefetch_depth: 1, as given" in libfsdp.explain(chosen)
    assert "which saves " in libfsdp.explain(chosen)


@on_ranks(2)
def test_why_is_said() -> None:
    least = needed("transformer")
    lines = {}
    for budget in (least, 1 << 30):
        model = sharded("transformer", memory_budget=budget)
        train("transformer", model, 1)
        lines[budget] = libfsdp.explain(model).splitlines()
    assert lines[least][0].startswith(f"memory_budget: {least} bytes, of which a step needs at most {least} bytes, in ")
    assert lines[least][1].startswith("prefetch_depth: ")
    assert lines[least][-1].startswith("kept from forward into backward: ")


@on_ranks(2)
def test_activations_and_the_optimizer_count_as_given() -> None:
    train("transformer", model := sharded("transformer"), 1)
    # More than gradients: on a CPU, the larger of the two counts, as activations are gone when gradients are complete.
    more = {libfsdp.unit_info(model)[1].name: 1 << 20}
    with_activations = needed("transformer", activations=more)
    assert needed("transformer") < needed("transformer", optimizer_values=0, activations=more) < with_activations
    assert with_activations > 1 << 20


@on_ranks(2)
def test_a_budget_that_is_too_small_is_refused_on_all_ranks() -> None:
    least = needed("transformer")
    text = message_of_forward("transformer", memory_budget=least - 10)
    assert "is too small by 10 bytes: even with prefetch_depth " in text
    assert "; it fits with " in text
    assert "activations are given for ['x'], which are no units" in message_of_forward(
        "transformer", memory_budget=MemoryBudget(1 << 30, activations={"x": 1})
    )
    differing = message_of_forward("transformer", memory_budget=(1 << 30) + dist.get_rank())
    assert "rank 0 and rank 1 differ" in differing
    assert "memory_budget" in differing


@on_ranks(2)
def test_measured_activations_correct_the_choice() -> None:
    case = CASES["transformer"]
    rank = dist.get_rank()
    unit = "blocks.1"
    budget = needed("transformer", activations={unit: 1 << 20})
    model = sharded("transformer", memory_budget=budget)
    with pytest.raises(ValueError, match="first forward"):
        libfsdp.adjust_memory_budget(model, 0)
    train("transformer", model, 2)
    before = libfsdp.explain(model)
    assert "prefetch_depth: 1" in before
    assert "which saves " in before
    # The largest of all ranks counts: with it, the budget is the least that there can be.
    libfsdp.adjust_memory_budget(model, {unit: 1 << 20} if rank == 1 else 0)
    after = libfsdp.explain(model)
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, after)
    assert texts[0] == texts[1]
    assert after != before, before
    assert needs(model) == budget, after
    case.loss(model, batch_of(case, 0, 0, rank)).backward()
    # What can't be is refused on all ranks, and all is as it was.
    for activations in (1 << 30, {unit: (1 << 20) + 1}):
        with pytest.raises(libfsdp.Error, match="is too small by"):
            libfsdp.adjust_memory_budget(model, activations)
        assert libfsdp.explain(model) == after
    wrong: Any = {"x": 1} if rank == 0 else {}
    with pytest.raises(ValueError, match="which are no units" if rank == 0 else "another rank refuses"):
        libfsdp.adjust_memory_budget(model, wrong)
    libfsdp.adjust_memory_budget(model, {})
    assert libfsdp.explain(model) == before
    plain = sharded("transformer")
    train("transformer", plain, 1)
    with pytest.raises(ValueError, match="has no memory_budget"):
        libfsdp.adjust_memory_budget(plain, 0)


HALF: Any = 0.5
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"memory_budget": "1"}, ValueError, "memory_budget: '1' is no size: write a number and a unit"),
    ({"memory_budget": True}, TypeError, "memory_budget is True"),
    ({"memory_budget": HALF}, TypeError, "memory_budget is 0.5: give a whole number of bytes, or a size"),
    ({"memory_budget": 0}, ValueError, "memory_budget is 0; give how many bytes"),
    ({"memory_budget": 10, "keep_gathered_bytes": 5}, ValueError, "keep_gathered_bytes=5 sets it by hand; give one of them"),
]


@on_ranks(2)
def test_wrong_budgets_are_refused_at_once() -> None:
    for options, error, text in WRONG:
        with pytest.raises(error, match=text):
            libfsdp.fully_shard(nn.Linear(4, 4), mesh=mesh_of(1), **options)


def test_budgets_are_sizes_and_are_checked_where_they_are_made() -> None:
    budget = MemoryBudget("1GiB", activations={"a": "1.5KiB"}, recomputable={"a": 1e3})
    assert budget == MemoryBudget(2**30, activations={"a": 1536}, recomputable={"a": 1000})
    assert check_budget("1GB") == check_budget(1e9) == MemoryBudget(10**9)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"bytes": "1gb"}, ValueError, "memory_budget: '1gb' is no size"),
        ({"bytes": -1}, ValueError, "memory_budget is -1"),
        ({"bytes": float("inf")}, TypeError, "memory_budget is inf"),
        ({"bytes": 10, "optimizer_values": HALF}, TypeError, "memory_budget.optimizer_values is 0.5"),
        ({"bytes": 10, "microbatches": 0}, ValueError, "memory_budget.microbatches is 0; give 1 or more"),
        ({"bytes": 10, "activations": {"0": HALF}}, TypeError, r"memory_budget.activations\['0'\] is 0.5"),
        ({"bytes": 10, "recomputable": {"0": "1"}}, ValueError, r"memory_budget.recomputable\['0'\]: '1' is no size"),
    ]
    for options, error, text in wrong:
        with pytest.raises(error, match=text):
            MemoryBudget(**options)


def test_kept_units_save_as_much_as_a_solver_finds() -> None:
    highspy = pytest.importorskip("highspy")
    numbers = random.Random(3)
    for blocks in (20, 60, 126):
        for sizes in ([7], [7, 20], range(1, 60)):
            loads = [numbers.randrange(100) for _ in range(2 * blocks + 2)]
            units = []
            for k in range(blocks):
                size = numbers.choice(list(sizes))
                units.append((k + 1, 2 * blocks - k, size, numbers.choice((size, 1 + size // 2))))
            limit = max(loads) + sum(size for _, _, size, _ in units) // 3
            solver = highspy.Highs()
            solver.setOptionValue("output_flag", False)
            solver.setOptionValue("mip_rel_gap", 0.0)
            solver.setOptionValue("mip_abs_gap", 0.5)
            keeps = [solver.addBinary(obj=float(saved)) for _, _, _, saved in units]
            for moment, load in enumerate(loads):
                held = [
                    size * keep
                    for keep, (begin, end, size, _) in zip(keeps, units, strict=True)
                    if begin <= moment < end
                ]
                if held:
                    solver.addConstr(sum(held[1:], held[0]) <= limit - load)
            solver.changeObjectiveSense(highspy.ObjSense.kMaximize)
            solver.run()
            assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
            best = round(solver.getInfo().objective_function_value)
            kept, saved, peak = _C.choose_kept(loads, units, limit)
            assert saved == best
            assert peak <= limit
            assert saved == sum(one[3] for one, keep in zip(units, kept, strict=True) if keep)


NAMES = [str(k) for k in range(5)]
KEPT = dict.fromkeys(NAMES, 1 << 20)  # Larger than all that the engine has.
INPUTS = dict.fromkeys(NAMES, 1 << 10)


def layers(budget: MemoryBudget | None = None) -> Any:
    torch.manual_seed(5)
    blocks = [nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True) for _ in NAMES]
    model = nn.Sequential(*blocks, nn.Linear(16, 4))
    for block in blocks:
        libfsdp.fully_shard(block)
    return libfsdp.fully_shard(model, memory_budget=budget)


def train_layers(model: Any, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(2, 6, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def least_of(**assumed: Any) -> int:
    with pytest.raises(libfsdp.Error) as refused:
        train_layers(layers(MemoryBudget(1, **assumed)), 1)
    return 1 + int(str(refused.value).split("too small by ")[1].split()[0])


def count_calls(modules: dict[str, nn.Module]) -> dict[str, int]:
    calls = dict.fromkeys(modules, 0)
    for name, module in modules.items():
        module.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    return calls


@pytest.mark.parametrize("world", [2, at_night(4)])
@on_ranks("world")
def test_the_fewest_units_recompute() -> None:
    plain = layers()
    train_layers(plain, STEPS)
    least = least_of(activations=KEPT, recomputable=INPUTS)
    most = least_of(activations=KEPT)
    assert most - least > 3.9 * (1 << 20), (least, most)
    counts = []
    for part in range(5):
        # More than the least by a gather that is ahead, which both do without.
        budget = least + (most - least) * part // 4 + (part > 0) * (1 << 16)
        model = layers(MemoryBudget(budget, activations=KEPT, recomputable=INPUTS))
        calls = count_calls({name: model[int(name)].linear1 for name in NAMES})
        train_layers(model, STEPS)
        text = libfsdp.explain(model)
        assert libfsdp.memory_stats(model)["total.peak"] <= needs(model) <= budget, text
        repeated = [name for name in NAMES if calls[name] == 2 * STEPS]
        assert all(calls[name] == STEPS for name in NAMES if name not in repeated), calls
        expected = "recomputed in backward: " + ", ".join(f"'{name}'" for name in repeated)
        assert expected in text if repeated else "no unit, because all activations fit" in text, (repeated, text)
        counts.append(len(repeated))
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), other.full_tensor())
    # The last block's activations are there when backward begins, with or without.
    assert counts == [4, 3, 2, 1, 0], counts
    # Fewer activations than thought: nothing recomputes any more.
    model = layers(MemoryBudget(least, activations=KEPT, recomputable=INPUTS))
    train_layers(model, 1)
    assert sum("forward" in vars(module) for module in model.modules()) == 4
    with pytest.raises(ValueError, match="units recompute, so a sum does not contain"):
        libfsdp.adjust_memory_budget(model, 1 << 10)
    model.double().float()  # Another engine takes the units.
    train_layers(model, 1)
    assert sum("forward" in vars(module) for module in model.modules()) == 4
    libfsdp.adjust_memory_budget(model, INPUTS)
    assert not any("forward" in vars(module) for module in model.modules())
    train_layers(model, 1)


@on_ranks(2)
def test_units_that_can_not_recompute_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    libfsdp.fully_shard(model[0][0])
    libfsdp.fully_shard(model[0])
    libfsdp.fully_shard(model, memory_budget=MemoryBudget(1 << 20, recomputable={"0": 8}))
    with pytest.raises(ValueError, match="recomputable names '0', which has units within it"):
        model(torch.ones(2, 4))
    assert "call fully_shard on the part of it" in message_of_forward(
        "transformer", memory_budget=MemoryBudget(1 << 30, recomputable={"(root)": 1})
    )
    text = message_of_forward("transformer", memory_budget=MemoryBudget(1 << 30, recomputable={"x": 1}))
    assert "recomputable names ['x'], which are no units" in text


def test_a_forward_of_its_own_comes_back() -> None:
    module = nn.Linear(3, 3)
    own = vars(module)["forward"] = lambda x: x + 1
    for before in (own, None):
        if before is None:
            del module.forward
        for _ in range(2):
            set_recomputes(module, True)
        assert module(torch.ones(3, requires_grad=True)).grad_fn is not None
        for _ in range(2):
            set_recomputes(module, False)
        assert vars(module).get("forward") is before


def test_inputs_are_what_recomputed_units_keep() -> None:
    class Block(nn.Module):
        def __init__(self, recomputes: bool) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
            self.recomputes = recomputes

        def _run(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x * mask)))

        def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
            return checkpoint(self._run, x, mask, use_reentrant=False) if self.recomputes else self._run(x, mask)

    class Blocks(nn.Module):
        def __init__(self, recomputes: bool) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(recomputes) for _ in range(3))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, mask=mask)
            return x

    shapes = (torch.zeros(5, 7, 16, requires_grad=True, device="meta"), torch.zeros(5, 7, 16, device="meta"))
    plain, recomputed = (
        libfsdp.plan(Blocks(recomputes), libfsdp.PlannedMesh(ranks=2), units=Block, inputs=shapes)
        for recomputes in (False, True)
    )
    size = 5 * 7 * 16 * 4
    assert [unit.inputs for unit in plain.units] == [2 * size, size, size]  # All of them share the mask.
    assert [unit.activations for unit in recomputed.units] == [2 * size, size, size]
    assert all(unit.activations > 4 * size for unit in plain.units)
