"""Stage 5 of the kit: libfsdp's own kernels against the same on the CPU (check_kernels.cpp), and their bandwidth.

Not named kernels.py: programs beside it import transformers, which would take it for the package of that name.
"""

from __future__ import annotations

import subprocess
import sys

import rows
from cpp import EXAMPLES
from support import device


def main() -> int:
    command = (str(EXAMPLES / "check_kernels"), device.TYPE)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            result, _, rest = line.strip().partition(" ")
            name, _, value = rest.partition(": ")
            if result in ("passed", "failed", "measured"):
                rows.record(name, result, **({"why" if result == "failed" else "value": value} if value else {}))
    return program.returncode


if __name__ == "__main__":
    sys.exit(main())
