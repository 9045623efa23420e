"""The Python side of the tests in tests/cpp/checkpoint: writes what C++ is to read, and checks what C++ wrote.

    checkpoint_peer.py COMMAND FOLDER

Exits with 0 if all is as expected; otherwise with an exception that says what is not.
"""

import math
import pickle
import shutil
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))  # its support
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.end_of_rank import end_rank
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]

PLAIN: dict[Any, Any] = {
    "none": None,
    "truth": [True, False],
    "integers": [0, 255, 256, 65535, 65536, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), -1],
    "reals": [0.0, -0.0, 1.5, 1e300, math.inf],
    "text": "gr\u00fc\u00dfe \U0001f600",
    "bytes": bytes(range(256)),
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "nested": {"list": [[], [[]]], "dict": {}},
    7: "seven",
    "again": ["text", "text"],
}


def write_pickles(folder: Path) -> None:
    for protocol in range(2, 6):
        (folder / f"plain.{protocol}").write_bytes(pickle.dumps(PLAIN, protocol))
    (folder / "ordered").write_bytes(pickle.dumps(OrderedDict(a=1, b=2), 2))


def check_pickle(folder: Path) -> None:
    with (folder / "plain").open("rb") as file:
        restricted = torch._weights_only_unpickler.load(file, encoding="utf-8")
    for found in (pickle.loads((folder / "plain").read_bytes()), restricted):
        assert repr(found) == repr(PLAIN), found


def state() -> dict[str, Any]:
    """Tensors of all dtypes and shapes, and objects. Byte k of a dtype's tensor is k modulo 251 (2 for booleans)."""
    tensors: dict[str, Any] = {}
    for dtype in DTYPES:
        count = 6 * torch.empty((), dtype=dtype).itemsize
        data = torch.arange(count) % (2 if dtype == torch.bool else 251)
        tensors[str(dtype).removeprefix("torch.")] = data.to(torch.uint8).view(dtype).reshape(2, 3)
    shapes = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "cube": torch.arange(24.0).reshape(2, 3, 4)}
    return {"dtypes": tensors, "shapes": [shapes, "between", 3], "plain": PLAIN["nested"], "none": None, "pi": 3.25}


def two_ranks(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = {
        "rows": torch.arange(15.0).reshape(5, 3),
        "few": torch.arange(3.0).reshape(1, 3),
        "columns": torch.arange(8).reshape(2, 4),
    }
    sharded = {
        name: distribute_tensor(tensor, mesh, [Shard(1 if name == "columns" else 0)]) for name, tensor in whole.items()
    }
    dcp.save({**sharded, "step": 7}, checkpoint_id=folder / "two_ranks")
    dcp.save(sharded, storage_writer=HuggingFaceStorageWriter(str(folder / "shards"), save_distributed=True))
    dist.destroy_process_group()
    end_rank()


def write_one_rank(folder: Path) -> None:
    dcp.save(state(), checkpoint_id=folder / "one_rank", no_dist=True)


def write_enums_by_name(folder: Path) -> None:
    """As Python 3.11.2 does."""
    by_name: Any = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
    _MEM_FORMAT_ENCODING.__reduce_ex__ = by_name
    write_one_rank(folder)


def write_two_ranks(folder: Path) -> None:
    torch.multiprocessing.start_processes(two_ranks, args=(folder,), nprocs=2, start_method="fork")


def read_metadata(folder: Path) -> Metadata:
    metadata = FileSystemReader(folder).read_metadata()
    metadata.storage_meta = StorageMeta()
    return metadata


def loaded(folder: Path) -> dict[str, Any]:
    """The checkpoint's content, loaded into a state of other values."""
    found = torch.utils._pytree.tree_map_only(torch.Tensor, torch.zeros_like, state())
    found.update(none=1, pi=0)
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def check_same(found: Any, expected: Any, name: str = "state") -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, name
        assert found.shape == expected.shape, name
        # By their bytes: some are NaN.
        assert found.contiguous().view(-1).view(torch.uint8).equal(expected.contiguous().view(-1).view(torch.uint8)), (
            name
        )
    elif isinstance(expected, dict):
        assert list(found) == list(expected), name
        for key, value in expected.items():
            check_same(found[key], value, f"{name}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), name
        for index, value in enumerate(expected):
            check_same(found[index], value, f"{name}.{index}")
    else:
        assert repr(found) == repr(expected), name


def check_rewritten(folder: Path) -> None:
    """C++ has read `.metadata` of one_rank and two_ranks, and written it into one_rank.again and two_ranks.again."""
    for name in ("one_rank", "two_ranks"):
        again = read_metadata(folder / f"{name}.again")
        first = read_metadata(folder / name)
        for entry in first.state_dict_metadata.values():
            # torch 2.15 keeps them beside the tensor, which has its own. What C++ writes is for any torch, and has none.
            properties: Any = getattr(entry, "properties", None)
            if hasattr(properties, "strides"):
                properties.strides = None
        assert again == first, again
        assert list(again.state_dict_metadata) == list(read_metadata(folder / name).state_dict_metadata)
        for file in (folder / name).glob("*.distcp"):
            shutil.copy(file, folder / f"{name}.again")
    check_same(loaded(folder / "one_rank.again"), state())


def check_records(folder: Path) -> None:
    """C++ has written a record per dtype, some of other shapes, and PLAIN."""
    tensors = {**state()["dtypes"], **state()["shapes"][0]}
    for name, tensor in tensors.items():
        with zipfile.ZipFile(folder / name) as archive:
            assert archive.testzip() is None, name
        for mmap in (False, True):
            check_same(torch.load(folder / name, weights_only=True, mmap=mmap), tensor, name)
    check_same(torch.load(folder / "plain", weights_only=True), PLAIN)


def check_copied(folder: Path) -> None:
    """C++ has read all of one_rank and written it again, some tensors in parts."""
    check_same(loaded(folder / "copied"), state())


def check_huge(folder: Path) -> None:
    """A record of more than 4 GiB, of zeros and a last 7."""
    size = 5 * 2**30
    with zipfile.ZipFile(folder / "huge") as archive:
        assert archive.getinfo("archive/data/0").file_size == size
    tensor = torch.load(folder / "huge", weights_only=True, mmap=True)
    assert tensor.shape == (size,)
    assert tensor[0] == 0
    assert tensor[-1] == 7


def write_safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = state()["dtypes"]
    del tensors["complex128"]
    save_file({**tensors, **state()["shapes"][0]}, folder / "python.safetensors", metadata={"format": "pt", "by": "x"})


def check_safetensors(folder: Path) -> None:
    """C++ has written the tensors of write_safetensors into model.safetensors, and into three files with an index."""
    import json

    from safetensors import safe_open
    from safetensors.torch import load_file

    expected = {**state()["dtypes"], **state()["shapes"][0]}
    del expected["complex128"]
    one = folder / "model.safetensors"
    found = load_file(one)
    check_same({name: found[name] for name in expected}, expected)
    assert len(found) == len(expected)
    with safe_open(one, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}

    index = json.loads((folder / "sharded" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected)
    assert len(set(index["weight_map"].values())) == 3
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for name, file in index["weight_map"].items():
        check_same(load_file(folder / "sharded" / file)[name], expected[name], name)


def main() -> None:
    command, folder = sys.argv[1:]
    globals()[command](Path(folder))


if __name__ == "__main__":
    main()
