"""Measures gathers among ranks of one host: by copies, or without, with the pages of all ranks' shards mapped side by side.

A unit's parameters lie in equal parts in memory files of two ranks. In turns, both ranks at the same time gather the unit, compute with it
(one product of [rows, width] activations and the whole of it), and free it:

- "copy": both parts are copied into an anonymous buffer with huge pages, which is kept, as the engine's slots are;
- "map": all parts are mapped side by side, private, and their page table is filled at once (MADV_POPULATE_READ);
- "map, lazily": the same, and the first product takes the page faults;
- "stay mapped": they are mapped once and never freed, so that a gather costs nothing.

Prints medians and ranges over rounds of the slower rank, in milliseconds. docs/design.md draws the conclusion.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import numpy
import torch

RANKS = 2
WIDTH = 4096
ROWS = 512
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MADV_HUGEPAGE = 14
MADV_POPULATE_READ = 22
WAYS = ("copy", "map", "map, lazily", "stay mapped")
STAGES = ("gather", "compute", "free")

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_at(address: int | None, length: int, file: int, flags: int) -> int:
    """Maps a file, or anonymous memory if `file` is -1, at an address that is the caller's already, or anywhere."""
    kind = mmap.MAP_ANONYMOUS if file < 0 else 0
    fixed = 0 if address is None else MAP_FIXED
    mapped = libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags | kind | fixed, file, 0)
    if mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    assert isinstance(mapped, int)
    return mapped


def advise(address: int, length: int, advice: int) -> None:
    if libc.madvise(address, length, advice) != 0:
        raise OSError(ctypes.get_errno(), "madvise")


def tensor_at(address: int, count: int) -> torch.Tensor:
    return torch.from_numpy(numpy.ctypeslib.as_array((ctypes.c_float * count).from_address(address)))


class Unit:
    """A rank's view of a unit that lies in parts in the ranks' files."""

    def __init__(self, files: Sequence[int], part: int) -> None:
        self.files, self.part, self.whole = files, part, part * len(files)
        huge = 2 << 20
        self.buffer = map_at(None, self.whole + huge, -1, mmap.MAP_PRIVATE)
        self.buffer += -self.buffer % huge
        advise(self.buffer, self.whole, MADV_HUGEPAGE)
        self.place = map_at(None, self.whole, -1, mmap.MAP_PRIVATE | MAP_NORESERVE)
        self.kept = map_at(None, self.whole, -1, mmap.MAP_PRIVATE | MAP_NORESERVE)
        self.parts = [tensor_at(map_at(None, part, file, mmap.MAP_SHARED), part // 4) for file in files]
        self.map(self.kept)

    def map(self, address: int) -> None:
        for rank, file in enumerate(self.files):
            map_at(address + rank * self.part, self.part, file, mmap.MAP_PRIVATE)

    def gather(self, way: str) -> int:
        """The address of the whole."""
        if way == "copy":
            whole = tensor_at(self.buffer, self.whole // 4)
            for rank, part in enumerate(self.parts):
                whole.narrow(0, rank * part.numel(), part.numel()).copy_(part)
            return self.buffer
        if way == "stay mapped":
            return self.kept
        self.map(self.place)
        if way == "map":
            advise(self.place, self.whole, MADV_POPULATE_READ)
        return self.place

    def free(self, way: str) -> None:
        if way.startswith("map"):
            map_at(self.place, self.whole, -1, mmap.MAP_PRIVATE | MAP_NORESERVE)


def now() -> float:
    """In milliseconds."""
    return time.perf_counter() * 1e3


def run_rank(
    rank: int, files: Sequence[int], arguments: argparse.Namespace, barrier: Barrier, results: Connection
) -> None:
    torch.set_num_threads(1)
    part = arguments.mib * (1 << 20) // RANKS
    unit = Unit(files, part)
    unit.parts[rank].normal_()
    activations = torch.randn(ROWS, WIDTH)
    product = torch.empty(ROWS, unit.whole // 4 // WIDTH)
    times: dict[tuple[str, str], list[float]] = {(way, stage): [] for way in WAYS for stage in STAGES}
    for number in range(arguments.rounds + 1):
        for turn in range(len(WAYS)):
            way = WAYS[(number + turn) % len(WAYS)]
            barrier.wait()
            begin = now()
            address = unit.gather(way)
            gathered = now()
            torch.mm(activations, tensor_at(address, unit.whole // 4).view(-1, WIDTH).t(), out=product)
            computed = now()
            unit.free(way)
            stages = (gathered - begin, computed - gathered, now() - computed)
            if number > 0:  # The first round fills pages and caches.
                for stage, value in zip(STAGES, stages, strict=True):
                    times[way, stage].append(value)
    results.send(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of the unit")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    files = [os.memfd_create(f"part-{rank}") for rank in range(RANKS)]
    for file in files:
        os.ftruncate(file, arguments.mib * (1 << 20) // RANKS)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(RANKS)
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    ranks = [
        context.Process(target=run_rank, args=(rank, files, arguments, barrier, pipes[rank][1]))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for _, sender in pipes:
        sender.close()  # A rank that fails is then an EOFError here.
    received = [pipe[0].recv() for pipe in pipes]
    for process in ranks:
        process.join()
    print(f"{arguments.mib} MiB in {RANKS} parts, {arguments.rounds} rounds, ms of the slower rank: median (range)")
    for way in WAYS:
        cells = []
        for stage in STAGES:
            slower = [max(values) for values in zip(*(times[way, stage] for times in received), strict=True)]
            cells.append(f"{stage} {statistics.median(slower):6.2f} ({min(slower):.2f} to {max(slower):.2f})")
        print(f"{way:12} " + ", ".join(cells))


if __name__ == "__main__":
    main()
