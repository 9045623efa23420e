"""by_hand.py PROGRAM ARGUMENTS...: starts two ranks of a program, as a user without a launcher does, and fails if one of them fails."""

import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))  # its support
from support.ports import reserved_port

RANKS = 2

with reserved_port() as port:
    world = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [subprocess.Popen(sys.argv[1:], env={**world, "RANK": str(rank)}) for rank in range(RANKS)]
    sys.exit(any([rank.wait() != 0 for rank in ranks]))
