"""What torch.distributed.checkpoint writes, beyond plain tensors and values: for tests/cpp/state/source_test.cpp.

    corpus_peer.py FOLDER

writes FOLDER/written, FOLDER/written_without_crc (the same tensors, by torch.serialization.set_crc32_options), and
FOLDER/expected: the tensors' values, contiguous and resolved. What it wrote with each version of torch is kept in
tests/corpus.
"""

import datetime
import decimal
import io
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp


def tensors() -> dict[str, torch.Tensor]:
    images = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    volumes = torch.arange(2 * 3 * 2 * 2 * 2.0).reshape(2, 3, 2, 2, 2)
    waves = torch.complex(torch.arange(6.0), torch.arange(6.0) - 2.5).reshape(2, 3)
    found = {
        "contiguous": images,
        "channels_last": images.to(memory_format=torch.channels_last),
        "channels_last_3d": volumes.to(memory_format=torch.channels_last_3d),
        "transposed": torch.arange(12).reshape(3, 4).t(),
        "permuted": torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1),
        "expanded": torch.arange(3.0).expand(4, 3),
        "part_of_storage": torch.arange(20.0)[5:9],
        "every_other": torch.arange(20.0)[::2],
        "conj": waves.conj(),
        "conj_transposed": waves.conj().t(),
        "neg": waves.conj().imag,
        "both": torch._neg_view(waves.to(torch.complex128).conj()),
        "complex128": waves.to(torch.complex128),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "one_row": torch.arange(4.0).reshape(1, 4),
    }
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
        found[name] = torch.arange(1, 65, dtype=torch.uint8).view(getattr(torch, name))
    return found


def values() -> dict[str, Any]:
    return {
        "when": datetime.datetime(2026, 11, 22, 14, 30, tzinfo=datetime.timezone.utc),
        "day": datetime.date(2026, 11, 22),
        "took": datetime.timedelta(seconds=3.5),
        "set": {1, 2, 3},
        "frozen": frozenset({"a"}),
        "size": torch.Size([2, 3]),
        "big": 2**100,
        "bigger": -(2**2100),
        "bytes_io": io.BytesIO(b"state of a layer"),
        "complex": 1 + 2j,
        "range": range(3),
        "slice": slice(1, 2),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "path": Path("a/b"),
        "decimal": decimal.Decimal("1.5"),
        "bytearray": bytearray(b"xy"),
        "tensors_in_a_set": {torch.arange(3)},
        "method": datetime.datetime.fromtimestamp,
        # What this library reads, too.
        "plain": OrderedDict(a=[1, 2.5, None], b=(True, b"bytes", "text")),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    unknown = {"unknown_dtype": torch.zeros(3, dtype=torch.complex32)}
    dcp.save({"model": {**tensors(), **unknown}, "values": values()}, checkpoint_id=folder / "written", no_dist=True)
    resolved = {name: tensor.resolve_conj().resolve_neg().contiguous().clone() for name, tensor in tensors().items()}
    dcp.save({"model": resolved}, checkpoint_id=folder / "expected", no_dist=True)
    torch.serialization.set_crc32_options(False)
    dcp.save({"model": tensors()}, checkpoint_id=folder / "written_without_crc", no_dist=True)


if __name__ == "__main__":
    main()
