"""Measures saving and loading 1 GB of state on two ranks against torch.distributed.checkpoint (DCP) and plain files.

Each round, every contender saves, saves beside training, and loads, one after the other; the numbers are medians and
ranges over rounds of the slowest rank. Files are removed after each use, and dirty pages written before the next, so
that no contender waits for another one's. All write with fsync. Loads are into the model that saved, whose memory is
there. DCP and libfsdp's "load" (check_first = false) assign what they read; libfsdp's "load, checked first" (the default)
reads all once more before that, so that a damaged checkpoint changes nothing. "warm" loads read what was just written, from the page
cache; "cold" ones after it was dropped from there. Beside an asynchronous save runs one training step: "blocked" is the
call, and what the step's update waits longer than without a save; "step delayed" is the call, and what the whole step
takes longer, as it shares the cores with the writing; "until complete" ends when the step and the save have.
libfsdp also saves in memory, once in ten steps, with a copy in the folder of the other rank.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from contenders.gpt import GPTConfig
from harness.fleet import BenchError, Contender, Fleet, Launch
from harness.machine import ROOT, describe_machine
from harness.measure import ModelCase

RANKS = 2
CONFIG = GPTConfig(vocab=4096, dim=768, layers=12, heads=8, context=16)
QUICK = GPTConfig(vocab=4096, dim=256, layers=4, heads=8, context=16)

CHECKED_FIRST = "load, checked first, warm"
TEN_STEPS, TEN_SAVED, IN_MEMORY = "ten steps", "ten steps, one saved in memory", "save in memory, alone"
RATES = ("save", "load, warm", CHECKED_FIRST, "load, cold")
"""Metrics that are the time to move all of the state."""

Times = dict[tuple[str, str], list[float]]
"""Milliseconds by contender and metric, of the slowest rank."""


def drop_from_cache(folder: Path) -> None:
    """The files must have been synced."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()


def slowest(replies: list[dict[str, list[float]]], field: str = "ms") -> float:
    return max(reply[field][0] for reply in replies)


def measure_library(contender: Contender, folder: Path, number: int, note: Callable[[str, float], None]) -> None:
    """A save, an asynchronous one, and a load warm and cold."""
    note("save", slowest(contender.ask("save", number)))
    note("load, warm", slowest(contender.ask("load", number)))
    if contender.name == "libfsdp":
        note(CHECKED_FIRST, slowest(contender.ask("load_checked_first", number)))
    drop_from_cache(folder)
    note("load, cold", slowest(contender.ask("load", number)))
    clear(folder)
    replies = contender.ask("async_save", number)
    note("async save, blocked", slowest(replies, "blocked_ms"))
    note("async save, step delayed", slowest(replies, "delayed_ms"))
    note("async save, until complete", slowest(replies))
    clear(folder)
    if contender.name == "libfsdp":
        replies = contender.ask("save_in_memory", number)
        note(TEN_STEPS, slowest(replies, "alone_ms"))
        note(TEN_SAVED, slowest(replies))
        note("save in memory, blocked", slowest(replies, "blocked_ms"))
        note(IN_MEMORY, slowest(replies, "bytes_ms"))


def measure_plain(contender: Contender, folder: Path, number: int, note: Callable[[str, float], None]) -> None:
    note("save", slowest(contender.ask("write", number)))
    note("load, warm", slowest(contender.ask("read", number)))
    drop_from_cache(folder)
    note("load, cold", slowest(contender.ask("read", number)))
    clear(folder)


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[Times, int]:
    """Times, and the bytes of the state."""
    config = QUICK if arguments.quick else CONFIG
    sizes = ModelCase("checkpoint", config, RANKS).arguments()
    launches = [
        Launch("libfsdp", (str(arguments.binary), "libfsdp", *sizes), RANKS),
        Launch("dcp", (sys.executable, "-m", "contenders.checkpoint_contender", "fsdp2", *sizes), RANKS),
    ]
    times: Times = defaultdict(list)
    with Fleet(launches) as contenders:
        for contender in contenders:
            contender.ask("step", 1)  # The optimizer's state is there after one.
        for number in range(arguments.rounds + 1):
            turns = [("libfsdp", contenders[0]), ("dcp", contenders[1]), ("plain", contenders[1])]
            first = number % len(turns)  # Nobody always writes to the disk that another one has just filled.
            for name, contender in (*turns[first:], *turns[:first]):

                def note(metric: str, milliseconds: float, name: str = name, number: int = number) -> None:
                    print(f"round {number} {name:8} {metric:28} {milliseconds:8.0f} ms", file=sys.stderr)
                    if number > 0:  # The first one warms up: buffers are made, code is read.
                        times[name, metric].append(milliseconds)

                (measure_plain if name == "plain" else measure_library)(contender, folder, number, note)
        return times, contenders[0].parameters * 4 * 3


def table(times: Times, size: int) -> str:
    lines = ["| | contender | median ms | range | MB/s |", "|---|---|---|---|---|"]
    for metric in dict.fromkeys(metric for _, metric in times):
        for name in ("libfsdp", "dcp", "plain"):
            values = times.get((name, metric))
            if values is not None:
                median = statistics.median(values)
                rate = f"{size / 1e3 / median:.0f}" if metric in RATES else ""
                lines.append(f"| {metric} | {name} | {median:.0f} | {min(values):.0f} to {max(values):.0f} | {rate} |")
    median_of = {key: statistics.median(values) for key, values in times.items()}
    lines += ["", "| | ratio | target |", "|---|---|---|"]
    for metric in RATES:
        ratio = median_of["dcp", "load, warm" if metric == CHECKED_FIRST else metric] / median_of["libfsdp", metric]
        target = "at least 2.0" if metric in ("save", "load, warm") else ""
        lines.append(f"| {metric}: DCP's time / libfsdp's | {ratio:.2f} | {target} |")
    delayed = "async save, step delayed"
    ratio = median_of["libfsdp", delayed] / median_of["dcp", delayed]
    lines.append(f"| {delayed}: libfsdp's / DCP's | {ratio:.2f} | at most 0.6 |")
    blocked = median_of["libfsdp", "async save, blocked"] / median_of["libfsdp", "save"]
    lines.append(f"| libfsdp: blocked by an async save / a save | {blocked:.2f} | at most 0.2 |")
    blocked = median_of["dcp", "async save, blocked"] / median_of["dcp", "save"]
    lines.append(f"| DCP: the same | {blocked:.2f} | |")
    own = "libfsdp"
    extra = (median_of[own, TEN_SAVED] - median_of[own, IN_MEMORY]) / median_of[own, TEN_STEPS] - 1
    lines.append(f"| {TEN_SAVED}: longer than {TEN_STEPS} and a {IN_MEMORY} | {100 * extra:.1f} % | at most 5 % |")
    return "\n".join(lines)


def main() -> int:
    """Measures, writes the results, prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a model of a tenth of the size")
    parser.add_argument("--binary", type=Path, default=ROOT / "build/bench/bench_contender", help="the C++ contender")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default the one for temporary files")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/checkpoint.md")
    arguments = parser.parse_args()
    machine = describe_machine()
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=arguments.folder))
    os.environ["BENCH_CHECKPOINTS"] = str(folder)
    path = (str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))  # All contenders inherit it.
    try:
        times, size = measure(arguments, folder)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(Path("/dev/shm") / folder.relative_to("/"), ignore_errors=True)
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    text = (
        f"# Checkpoints\n\n`python bench/checkpoint.py --rounds {arguments.rounds}`: {size / 1e9:.2f} GB of state "
        f"(parameters and AdamW's moments, fp32) on {RANKS} ranks.\n\n{table(times, size)}\n\n"
        f'{__doc__.split(chr(10), 2)[2].strip()} "dcp" is dcp.save, dcp.async_save and dcp.load of '
        "FSDP2's state dict with torch's defaults, which sync files, too (sync_files=True); making the state dict and "
        "setting it are not counted. libfsdp also sums all bytes (CRC-32), checks them at loading, and "
        "syncs folders. "
        '"plain" is as many bytes in one file per rank, written in blocks of 1 MiB with one fsync at the end, and read '
        f"into one block.\n\n## Machine\n{facts}\n"
    )
    arguments.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
