"""Packs the kit for a machine with a GPU: the tree, the headers that it needs, and what was built for that machine's Python and torch.

    pack.py --build BUILD --out FOLDER [--nccl libnccl.so.2]      (see `make gpu-kit`)
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 60 * 2**20  # bytes of all
# Debian's packages of headers; libgtest-dev has its library, too, for tests that are compiled on that machine.
HEADERS = ("gtest", "gloo", "CLI", "nlohmann")
PACKAGES = ("GTest", "CLI11", "nlohmann_json")
PEERS = ("megatron_fsdp", "einops")
EXAMPLES = ("train_gpt", "finetune_llama", "check_capture", "check_kernels")
ARCHITECTURE = 90  # Of the GPUs whose kernels of NCCL are packed: Hopper.
FAT_BINARY = 0xBA55ED50


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def commit() -> str:
    """Of the tree, which need not be one of git's."""
    try:
        return output("git", "describe", "--always", "--dirty").strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def pack(out: Path, files: dict[str, Path]) -> None:
    """An archive without owners and times: the same files give the same bytes."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with gzip.GzipFile(out, "wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, path in sorted(files.items()):
            archive.add(path.resolve(), name, recursive=False, filter=plain)


def tree() -> dict[str, Path]:
    """What git knows, and what it does not ignore; without results, pictures and what other versions of torch have saved."""
    listed = output("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    left_out = re.compile(r"bench/results/|docs/pictures/.*\.svg|tests/corpus/|\.ci/")
    return {name: ROOT / name for name in listed if not left_out.match(name) and (ROOT / name).is_file()}


def headers() -> dict[str, Path]:
    """As below a prefix. Packages that describe themselves to CMake are found by it there."""
    prefix = Path("/usr")
    files = [path for name in HEADERS for path in (prefix / "include" / name).rglob("*") if path.is_file()]
    for package in PACKAGES:
        for folder in (*prefix.glob(f"share/cmake/{package}"), *prefix.glob(f"lib/*/cmake/{package}")):
            files += [path for path in folder.iterdir() if path.is_file()]
    files += prefix.glob("lib/*/libgtest*.a")
    return {str(path.relative_to(prefix)): path for path in files}


def prebuilt(build: Path, stripped: Path) -> dict[str, Path]:
    """The package and the examples, laid out as in a build folder. Their run paths name this machine's torch; run.sh says where it is."""
    programs = {f"examples/{name}": build / "examples" / name for name in EXAMPLES}
    libraries = {f"lib/{path.name}": path for path in build.glob("libfsdp.so.*") if path.name.count(".") == 3}
    extension = {f"python/libfsdp/{path.name}": path for path in (build / "python" / "libfsdp").glob("_C*.so")}
    files: dict[str, Path] = {}
    for name, path in {**programs, **libraries, **extension}.items():
        target = stripped / name
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["strip", "--strip-unneeded", "-o", str(target), str(path.resolve())], check=True)
        files[name] = target
    package = build / "python" / "libfsdp"
    for path in package.rglob("*"):
        if path.suffix in (".py", ".pyi"):
            files[f"python/libfsdp/{path.relative_to(package)}"] = path
    return files


def thinned(library: bytes) -> bytearray:
    """A library without the kernels of other GPUs than ARCHITECTURE: zeros in their place, which a compressor makes nothing of.

    Its kernels lie in containers ("fat binaries"): a header (magic, version, its own bytes, the bytes that follow), and so on for each
    architecture that is in one.
    """
    thin = bytearray(library)
    at = 0
    while (at := thin.find(FAT_BINARY.to_bytes(4, "little"), at)) >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", thin, at)
        if (version, header) != (1, 16):  # The same bytes by chance.
            at += 4
            continue
        at, end = at + header, at + header + size
        while at < end:
            _, _, header, size = struct.unpack_from("<HHIQ", thin, at)
            (architecture,) = struct.unpack_from("<I", thin, at + 28)
            if architecture != ARCHITECTURE:
                thin[at + header : at + header + size] = bytes(size)
            at += header + size
    return thin


def pack_nccl(out: Path, library: Path) -> None:
    with tempfile.NamedTemporaryFile() as thin, tarfile.open(out, "w:xz", preset=1) as archive:
        Path(thin.name).write_bytes(thinned(library.read_bytes()))
        archive.add(thin.name, "libnccl.so.2")


def peers() -> dict[str, Path]:
    """Packages of this environment's, of Python alone, that few machines with a GPU have."""
    files: dict[str, Path] = {}
    for name in PEERS:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise SystemExit(f"pack.py: {name} is not installed")
        folder = Path(found.origin).parent
        files |= {f"{name}/{path.relative_to(folder)}": path for path in folder.rglob("*.py")}
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nccl", type=Path, help="NCCL 2.30 or newer, which hosts several ranks on a GPU")
    options = parser.parse_args()
    out: Path = options.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as stripped:
        pack(out / "tree.tar.gz", tree())
        pack(out / "headers.tar.gz", headers())
        pack(out / "peers.tar.gz", peers())
        pack(out / "prebuilt.tar.gz", prebuilt(options.build.absolute(), Path(stripped)))
    if options.nccl:
        pack_nccl(out / "nccl.tar.xz", options.nccl)
    shutil.copy(ROOT / "tests" / "gpu" / "run.sh", out / "run.sh")
    sums = {path.name: output("sha256sum", str(path.absolute())).split()[0] for path in sorted(out.glob("*.tar.*"))}
    (out / "kit.json").write_text(json.dumps({"commit": commit(), **sums}, indent=1) + "\n", encoding="utf-8")
    sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    for name, size in sizes.items():
        print(f"{name:16} {size / 2**20:6.2f} MiB")
    total = sum(sizes.values())
    print(f"{out}: {total / 2**20:.1f} MiB")
    if total > MOST:
        print(f"pack.py: more than {MOST / 2**20:.0f} MiB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
