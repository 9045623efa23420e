"""Stage 5 of the kit: libfsdp's own kernels against the same on the CPU (check_kernels.cpp), and their bandwidth.

Not named kernels.py: programs beside it import transformers, which would take it for the package of that name.
"""

from __future__ import annotations

import sys

from cpp import record_lines_of

if __name__ == "__main__":
    sys.exit(record_lines_of("check_kernels"))
