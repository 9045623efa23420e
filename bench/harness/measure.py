"""The cases: which contenders step in turn, and what becomes a row of the results."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import truediv
from pathlib import Path
from typing import Protocol, TypeVar

from contenders.gpt import GPTConfig
from contenders.optimizer_steps import OPTIONS

from harness.fleet import BenchError, Contender, Fleet, Launch
from harness.hosts import Hosts, HostsUnavailable
from harness.intervals import median_interval
from harness.theory import FORMULA, least_link_mib, theory_mib

RANKS = 2
WARM_UP_STEPS = 3
WATCHED_STEPS = 4
HOSTS = 2
HOST_MBIT = 1000
ON_HOSTS = ("libfsdp", "libfsdp_messages", "fsdp2", "ddp")
LOSS_TOLERANCE = 1e-5  # Relative: some ulps of fp32, for sums in another order.
ROUNDED = ("libfsdp_8bit", "libfsdp_4bit", "ddp_powersgd")
ROUNDED_TOLERANCE = 1e-2  # Parameters that are gathered in eight bits; later losses differ.
BF16_TOLERANCE = 1e-2  # Autocast, with which DDP computes in bf16, leaves other operators in fp32.

# Each contender's program, and its name there.
TRAINERS = {
    "libfsdp": ("cpp", "libfsdp"),
    "libfsdp_no_reshard": ("cpp", "libfsdp_no_reshard"),
    "libfsdp_messages": ("cpp", "libfsdp_messages"),
    "libfsdp_8bit": ("cpp", "libfsdp_8bit"),
    "libfsdp_4bit": ("cpp", "libfsdp_4bit"),
    "local_cpp": ("cpp", "local"),
    "libfsdp_python": ("python", "libfsdp_python"),
    "libfsdp_python_no_reshard": ("python", "libfsdp_python_no_reshard"),
    "libfsdp_python_fuse": ("python", "libfsdp_python_fuse"),
    "fsdp2": ("python", "fsdp2"),
    "fsdp2_no_reshard": ("python", "fsdp2_no_reshard"),
    "fsdp2_tuned": ("python", "fsdp2_tuned"),
    "fsdp2_tuned_2": ("python", "fsdp2_tuned_2"),
    "fsdp2_tuned_no_reshard": ("python", "fsdp2_tuned_no_reshard"),
    "libfsdp_megatron": ("python", "libfsdp_megatron"),
    "megatron_fsdp": ("python", "megatron_fsdp"),
    "ddp": ("python", "ddp"),
    "ddp_powersgd": ("python", "ddp_powersgd"),
    "local": ("python", "local"),
}
# For host time: those that shard over a world of which one rank is there. Each has the same model unsharded beside it.
LONE_RANKS = {
    "libfsdp": ("cpp", "libfsdp"),
    "libfsdp_python": ("python", "libfsdp_python"),
    "empty_hooks": ("python", "empty_hooks"),  # Not sharded: the floor of what hooks take.
    "fsdp2": ("python", "fsdp2"),
    "fsdp2_instant": ("python", "fsdp2_instant"),
}
# AdamW over sharded parameters: torch's own in each of its ways, and libfsdp's.
OPTIMIZERS = {kind: ("python", f"optimizer_{kind}") for kind in OPTIONS}
COLLECTIVES = {
    "libfsdp": ("cpp", "collectives"),
    "libfsdp_messages": ("cpp", "collectives_messages"),
    "c10d": ("python", "collectives"),
}
LOCALS = ("local", "local_cpp")
# Plain training in the language of each contender that is not Python's.
PLAIN = {"libfsdp": "local_cpp", "libfsdp_no_reshard": "local_cpp", "libfsdp_messages": "local_cpp"}
# The settings of FSDP2, the fastest of which is what others are measured against.
BEST = "fsdp2_best"
# Release 0.6.1 scales the first update of AdamW by 0.746: only its first loss is everybody's.
OTHER_UPDATES = (*LOCALS, "megatron_fsdp")
REFERENCES = ("fsdp2", "ddp", "megatron_fsdp")
HOST_REFERENCES = ("fsdp2", "fsdp2_instant")

Sample = TypeVar("Sample")  # What a step gives.
Rounds = list[list[float]]  # For each round, the milliseconds of its steps.
Losses = dict[str, list[list[float]]]  # By contender, rank and step.


@dataclass(frozen=True)
class Row:
    """One line of the results."""

    case: str
    contender: str
    metric: str
    unit: str
    median: float
    low: float
    high: float
    min: float
    max: float
    n: int


@dataclass(frozen=True)
class Programs:
    """What ranks are started with, and which contenders take part (all, if none is named)."""

    python: str
    binary: Path
    only: frozenset[str]

    def launches(self, contenders: dict[str, tuple[str, str]], arguments: Sequence[str], ranks: int) -> list[Launch]:
        """How to start those of the contenders that take part."""
        commands = {"cpp": (str(self.binary),), "python": (self.python, "-m", "contenders.contender")}
        return [
            Launch(name, (*commands[program], kind, *arguments), ranks)
            for name, (program, kind) in contenders.items()
            if not self.only or name in self.only
        ]


@dataclass(frozen=True)
class Pace:
    """Rounds of a case, and the steps that a contender makes each time its turn comes."""

    rounds: int
    turn: int


@dataclass(frozen=True)
class ModelCase:
    """A model to train over `ranks` ranks, or (world > 0) on one rank of `world` whose collectives move no data.

    `options` are contender.py's. `only`: who takes part; without it, all that train exactly. C++ contenders know no options.
    """

    name: str
    config: GPTConfig | None  # None: the model that `options` name.
    sequences: int
    world: int = 0
    ranks: int = RANKS
    options: tuple[str, ...] = ()
    only: frozenset[str] = frozenset()

    def takes(self, contender: str) -> bool:
        """The contender takes part."""
        return contender in self.only if self.only else contender not in ROUNDED

    def arguments(self) -> list[str]:
        """The sizes, as both programs take them, and the options."""
        if self.config is None:
            return list(self.options)
        fields = ("vocab", "dim", "layers", "heads", "context")
        sizes = [text for field in fields for text in (f"--{field}", str(getattr(self.config, field)))]
        return [*sizes, "--batch", str(self.sequences), *self.options]


def row(case: str, contender: str, metric: str, unit: str, values: Sequence[float]) -> Row:
    """Median, how sure it is, and range of the values."""
    low, high = median_interval(values)
    return Row(case, contender, metric, unit, statistics.median(values), low, high, min(values), max(values), len(values))


class Taker(Protocol[Sample]):
    """Steps when its turn comes."""

    def take(self, steps: int) -> list[Sample]:
        """One sample of each step."""


@dataclass(frozen=True)
class Turn:
    """Who does what when its turn comes."""

    contender: Contender
    verb: str

    def take(self, steps: int) -> list[float]:
        """Milliseconds of each step: the slowest rank's."""
        replies = self.contender.ask(self.verb, steps)
        return [max(times) for times in zip(*(reply["ms"] for reply in replies), strict=True)]


@dataclass(frozen=True)
class StepPair:
    """A step of a sharded model, and the same step of the model unsharded: milliseconds of the thread's processor time."""

    sharded: float
    plain: float


@dataclass(frozen=True)
class HostTurn:
    """A lone rank makes pairs of steps when its turn comes."""

    contender: Contender

    def take(self, steps: int) -> list[StepPair]:
        """The pairs, one after the other."""
        (reply,) = self.contender.ask("host", steps)
        return [StepPair(*pair) for pair in zip(reply["ms"], reply["plain_ms"], strict=True)]


def interleave(case: str, turns: Sequence[Taker[Sample]], pace: Pace) -> list[list[list[Sample]]]:
    """Everybody steps once a round; the order rotates, so that none is always first. Results are in turns' order."""
    samples: list[list[list[Sample]]] = [[] for _ in turns]
    for number in range(pace.rounds):
        print(f"{case}: round {number + 1} of {pace.rounds}", file=sys.stderr)
        for place in range(len(turns)):
            index = (number + place) % len(turns)
            samples[index].append(turns[index].take(pace.turn))
    return samples


def flat(rounds: Rounds) -> list[float]:
    """All steps of all rounds."""
    return [value for steps in rounds for value in steps]


def paired(one: Rounds, other: Rounds, combine: Callable[[float, float], float]) -> list[float]:
    """For each round, both medians combined: what slows a whole round down cancels out."""
    return [combine(statistics.median(a), statistics.median(b)) for a, b in zip(one, other, strict=True)]


def ratio_rows(case: str, metric: str, samples: dict[str, Rounds], references: Sequence[str]) -> list[Row]:
    """Each contender against each reference, paired by round."""
    return [
        row(case, name, f"{metric}_ratio_to_{reference}", "x", paired(rounds, samples[reference], truediv))
        for reference in references
        if reference in samples
        for name, rounds in samples.items()
        if name != reference
    ]


def warm_up(contenders: Sequence[Contender], verb: str) -> Losses:
    """Makes the first steps of every contender."""
    return {c.name: [reply["loss"] for reply in c.ask(verb, WARM_UP_STEPS)] for c in contenders}


def check_losses(case: str, losses: Losses, steps: int, tolerance: float = LOSS_TOLERANCE) -> None:
    """Stops the benchmark unless the contenders computed the same in their first steps: times would mean nothing."""
    for (reference, expected), (name, got) in pairwise(losses.items()):
        for rank, both in enumerate(zip(expected, got, strict=True)):
            for step, (a, b) in enumerate(zip(both[0][:steps], both[1][:steps], strict=True)):
                if not math.isclose(a, b, rel_tol=tolerance):
                    raise BenchError(
                        f"{case}: at step {step} on rank {rank}, {reference} has loss {a} and {name} has {b}: "
                        "they do not train the same model on the same data"
                    )


def memory_rows(case: ModelCase, contenders: Sequence[Contender]) -> list[Row]:
    """Memory over what it was before the model was built (a value per rank), beside the theoretical minimum."""
    rows: list[Row] = []
    peaks: dict[str, float] = {}
    for contender in contenders:
        used = contender.watch_memory("step", WATCHED_STEPS)
        replies = contender.ask("memory")
        peak = [(kib - reply["anonymous_base_kib"]) / 1024 for kib, reply in zip(used, replies, strict=True)]
        peaks[contender.name] = statistics.median(peak)
        rows.append(row(case.name, contender.name, "peak_memory_mib", "MiB", peak))
        over_base = [(reply["high_water_kib"] - reply["base_kib"]) / 1024 for reply in replies]
        rows.append(row(case.name, contender.name, "rss_over_base_mib", "MiB", over_base))
        if "engine_peak_kib" in replies[0]:
            counted = [reply["engine_peak_kib"] / 1024 for reply in replies]
            rows.append(row(case.name, contender.name, "engine_peak_mib", "MiB", counted))
    if case.config is not None and not case.options:
        least = theory_mib(case.config, case.sequences, case.ranks)
        rows.append(row(case.name, "theory", "peak_memory_mib", f"MiB: {FORMULA}", [least]))
        peaks["theory"] = least
    for reference in REFERENCES:
        if reference in peaks:
            pairs = {name: mib / peaks[reference] for name, mib in peaks.items() if name != reference}
            rows += [row(case.name, name, f"memory_ratio_to_{reference}", "x", [value]) for name, value in pairs.items()]
    return rows


def with_best(samples: dict[str, Rounds]) -> dict[str, Rounds]:
    """The samples, and once more those of FSDP2's fastest setting, as BEST's."""
    settings = [name for name in samples if name.startswith("fsdp2")]
    if not settings:
        return samples
    fastest = min(settings, key=lambda name: statistics.median(flat(samples[name])))
    return {**samples, BEST: samples[fastest]}


def overhead_rows(case: str, samples: dict[str, Rounds]) -> list[Row]:
    """What each contender takes longer than plain training, as a part of that; and against FSDP2's fastest setting."""

    def part(step: float, plain: float) -> float:
        return (step - plain) / plain

    overheads = {
        name: [[value] for value in paired(rounds, samples[plain], part)]
        for name, rounds in samples.items()
        if name not in LOCALS and (plain := PLAIN.get(name, "local")) in samples
    }
    rows = [row(case, name, "step_overhead", "x", flat(rounds)) for name, rounds in overheads.items()]
    return rows + ratio_rows(case, "overhead", overheads, (BEST,))


def measure_steps(case: ModelCase, pace: Pace, programs: Programs) -> list[Row]:
    """(a) step time and (c) memory of a training step, optimizer included."""
    trainers = {name: program for name, program in TRAINERS.items() if case.takes(name)}
    with Fleet(programs.launches(trainers, case.arguments(), case.ranks)) as contenders:
        losses = warm_up(contenders, "step")
        check_losses(case.name, losses, steps=1)
        check_losses(case.name, {name: v for name, v in losses.items() if name not in OTHER_UPDATES}, WARM_UP_STEPS)
        rounds = interleave(case.name, [Turn(contender, "step") for contender in contenders], pace)
        samples = {contender.name: of_it for contender, of_it in zip(contenders, rounds, strict=True)}
        samples = with_best(samples)
        rows = [row(case.name, name, "step_ms", "ms", flat(of_it)) for name, of_it in samples.items()]
        rows += overhead_rows(case.name, samples)
        return rows + ratio_rows(case.name, "step", samples, (*REFERENCES, BEST)) + memory_rows(case, contenders)


def measure_hosts(case: ModelCase, pace: Pace, programs: Programs) -> list[Row]:
    """(f) a training step of ranks on two hosts, whose links are slow, and what crosses a link in it."""
    in_bf16 = "--bf16" in case.options
    try:
        with Hosts(HOSTS, HOST_MBIT) as hosts:
            launches = programs.launches({name: TRAINERS[name] for name in case.only or ON_HOSTS}, case.arguments(), case.ranks)
            with Fleet([replace(launch, hosts=hosts) for launch in launches]) as contenders:
                losses = warm_up(contenders, "step")
                check_losses(case.name, losses, 1, ROUNDED_TOLERANCE)
                exact = {name: of_it for name, of_it in losses.items() if name not in (*ROUNDED, *OTHER_UPDATES)}
                check_losses(case.name, exact, WARM_UP_STEPS, BF16_TOLERANCE if in_bf16 else LOSS_TOLERANCE)
                rounds = interleave(case.name, [Turn(contender, "step") for contender in contenders], pace)
                crossed = {contender.name: crossing_mib(contender, hosts) for contender in contenders}
    except HostsUnavailable as reason:
        print(f"{case.name}: skipped: {reason}", file=sys.stderr)
        return []
    samples = {contender.name: of_it for contender, of_it in zip(contenders, rounds, strict=True)}
    config = case.config
    assert config is not None
    return [
        *(row(case.name, name, "step_ms", "ms", flat(of_it)) for name, of_it in samples.items()),
        *(row(case.name, name, "link_mib_per_step", "MiB", of_links) for name, of_links in crossed.items()),
        row(case.name, "theory", "link_mib_per_step", "MiB without headers", [least_link_mib(config, HOSTS, 2 if in_bf16 else 4)]),
        *ratio_rows(case.name, "step", samples, ("libfsdp", "libfsdp_messages", "fsdp2", "ddp", "local_cpp")),
    ]


def crossing_mib(contender: Contender, hosts: Hosts) -> list[float]:
    """What each host sends in a step, headers of packets included."""
    before = hosts.sent_bytes()
    contender.ask("step", WATCHED_STEPS)
    return [(now - then) / 2**20 / WATCHED_STEPS for now, then in zip(hosts.sent_bytes(), before, strict=True)]


def measure_host(case: ModelCase, pace: Pace, programs: Programs) -> list[Row]:
    """(b) what sharding adds to forward and backward on the host, where collectives cost nothing."""
    fake_world = ("--fake-world", str(case.world))
    with Fleet(programs.launches(LONE_RANKS, (*case.arguments(), *fake_world), ranks=1)) as contenders:
        check_losses(case.name, warm_up(contenders, "host"), WARM_UP_STEPS)
        rounds = interleave(case.name, [HostTurn(contender) for contender in contenders], pace)
    return host_rows(case, {contender.name: of_it for contender, of_it in zip(contenders, rounds, strict=True)})


def host_rows(case: ModelCase, samples: dict[str, list[list[StepPair]]]) -> list[Row]:
    """Per unit and step: (sharded - plain) / units, of each pair. Ratios are paired by round."""
    assert case.config is not None
    us_per_unit = 1e3 / case.config.layers
    added: dict[str, Rounds] = {}
    rows: list[Row] = []
    for name, rounds in samples.items():
        pairs = [pair for of_round in rounds for pair in of_round]
        added[name] = [[(pair.sharded - pair.plain) * us_per_unit for pair in of_round] for of_round in rounds]
        rows.append(row(case.name, name, "forward_backward_ms", "ms", [pair.sharded for pair in pairs]))
        rows.append(row(case.name, name, "plain_forward_backward_ms", "ms", [pair.plain for pair in pairs]))
        rows.append(row(case.name, name, "host_us_per_unit", "us", flat(added[name])))
    return rows + ratio_rows(case.name, "host", added, HOST_REFERENCES)


def measure_optimizers(pace: Pace, programs: Programs) -> list[Row]:
    """(e) a step of AdamW on 2,000 small parameters, of which a lone rank has an eighth each."""
    case = "optimizer2000"
    with Fleet(programs.launches(OPTIMIZERS, (), ranks=1)) as contenders:
        check_losses(case, warm_up(contenders, "step"), WARM_UP_STEPS)
        rounds = interleave(case, [Turn(contender, "step") for contender in contenders], pace)
    samples = {contender.name: of_it for contender, of_it in zip(contenders, rounds, strict=True)}
    rows = [row(case, name, "optimizer_ms", "ms", flat(of_it)) for name, of_it in samples.items()]
    return rows + ratio_rows(case, "optimizer", samples, ("torch", "torch_foreach", "torch_fused"))


def measure_collectives(case: str, ranks: int, pace: Pace, programs: Programs) -> list[Row]:
    """(d) collectives over a whole buffer of 64 MiB, and a plain copy of 64 MiB on every rank at once."""
    with Fleet(programs.launches(COLLECTIVES, (), ranks)) as contenders:
        turns = [Turn(contender, verb) for verb in ("all_gather", "reduce_scatter") for contender in contenders]
        turns += [Turn(contender, "memcpy") for contender in contenders if contender.name == "c10d"]
        for turn in turns:
            check_collective(turn, case, ranks)
        rounds = interleave(case, turns, pace)
    rows = []
    for verb in ("all_gather", "reduce_scatter"):
        samples = {
            "memcpy" if turn.verb == "memcpy" else turn.contender.name: of_it
            for turn, of_it in zip(turns, rounds, strict=True)
            if turn.verb in (verb, "memcpy")
        }
        rows += [row(case, name, f"{verb}_ms", "ms", flat(of_it)) for name, of_it in samples.items()]
        rows += ratio_rows(case, verb, samples, ("c10d", "memcpy"))
    return rows


def result_of_collective(verb: str, ranks: int) -> list[float]:
    """First and last element of an operation's result on every rank r, whose own elements are r + 1 (for memcpy: all 1)."""
    total = float(sum(range(1, ranks + 1)))
    return {"all_gather": [1.0, float(ranks)], "reduce_scatter": [total, total], "memcpy": [1.0, 1.0]}[verb]


def check_collective(turn: Turn, case: str, ranks: int) -> None:
    """Warms an operation up, and stops the benchmark if its result is wrong."""
    expected = result_of_collective(turn.verb, ranks)
    for rank, reply in enumerate(turn.contender.ask(turn.verb, WARM_UP_STEPS)):
        if reply["check"] != expected:
            got = f"{turn.contender.name}'s {turn.verb} gave {reply['check']} on rank {rank}, not {expected}"
            raise BenchError(f"{case}: {got}")
