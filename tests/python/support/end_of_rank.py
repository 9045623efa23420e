"""How a rank of a process group ends."""

import os
import sys


def end_rank() -> None:
    """Ends the process with exit code 0, without the interpreter's own end.

    One of Gloo's threads may just release the tensors of the last collective, and to do so while the interpreter ends
    aborts the process ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
