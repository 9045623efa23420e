"""The Python side of the tests in tests/cpp/checkpoint: writes what C++ is to read, and checks what C++ wrote.

    checkpoint_peer.py COMMAND FOLDER

Exits with 0 if all is as expected; otherwise with an exception that says what is not.
"""

import math
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

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
    from torch import _weights_only_unpickler

    with (folder / "plain").open("rb") as file:
        restricted = _weights_only_unpickler.load(file, encoding="utf-8")
    for found in (pickle.loads((folder / "plain").read_bytes()), restricted):
        assert repr(found) == repr(PLAIN), found


def main() -> None:
    command, folder = sys.argv[1:]
    globals()[command](Path(folder))


if __name__ == "__main__":
    main()
