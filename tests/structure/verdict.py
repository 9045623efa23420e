"""What the checks of this folder have in common: they print what they find, and fail if that is something."""

import sys
from collections.abc import Callable
from pathlib import Path


def tell(faults: Callable[[Path], list[str]]) -> int:
    """Runs a check on the root that the command names.

    Returns:
        The exit code.
    """
    found = faults(Path(sys.argv[1]))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0
