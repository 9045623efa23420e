#!python
"""Runs the command of this file's name in the installed package libfsdp, beside the torch of this Python."""

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path


def folder_of(package: str) -> Path:
    """Where a package is, without importing it: that would take seconds."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        sys.exit(f"{name}: {sys.executable} has no {package}; install it: pip install {package}")
    return Path(spec.origin).parent


name = Path(sys.argv[0]).name
package, torch = folder_of("libfsdp"), folder_of("torch")
try:
    runpy.run_path(str(package / "_torch_version.py"))["require_same_binaries"](
        runpy.run_path(str(package / "_build_info.py"))["torch_version"],
        runpy.run_path(str(torch / "version.py"))["__version__"],
        str(torch),
    )
except ImportError as error:
    sys.exit(f"{name}: {error}")
# torch may lie in another site-packages than this package. `fsdp plan` asks this Python for transformers.
libraries = [str(torch / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
os.environ.setdefault("FSDP_PYTHON", sys.executable)
os.execv(package / "bin" / name, [name, *sys.argv[1:]])
