"""Makes Megatron-FSDP's imports give libfsdp, and undoes this."""

from __future__ import annotations

import importlib
import sys
import types
from importlib.machinery import PathFinder

from libfsdp import _C

# The package's name on its own, and within Megatron-Core.
_PACKAGES = ("megatron_fsdp", "megatron.core.distributed.fsdp.src.megatron_fsdp")
# The modules that programs import from the package, and those of libfsdp that have their names.
_MODULES = {
    "": "libfsdp.megatron",
    "fully_shard": "libfsdp.megatron",
    "megatron_fsdp": "libfsdp.megatron",
    "mixed_precision": "libfsdp.megatron",
    "distributed_data_parallel_config": "libfsdp.megatron",
    "utils": "libfsdp.megatron",
    "uneven_dtensor": "libfsdp.megatron.uneven_dtensor",
    "v2": "libfsdp.megatron.v2",
    "experimental": "libfsdp.megatron.experimental",
    "experimental.module": "libfsdp.megatron.experimental.module",
    "experimental.parameter_group": "libfsdp.megatron.experimental.parameter_group",
    "experimental.placement": "libfsdp.megatron.experimental.placement",
    "experimental.fully_shard": "libfsdp.megatron.experimental.fully_shard",
    "experimental.optimizer": "libfsdp.megatron.experimental.optimizer",
    "experimental.checkpoint": "libfsdp.megatron.experimental.checkpoint",
}
_before: dict[str, types.ModuleType | None] = {}


def install_megatron() -> None:
    """Makes ``import megatron_fsdp`` and the like give libfsdp's names from now on. Real packages of these names are hidden.

    Names that programs have imported before stay as they are: where Megatron-Core is installed, it must be imported after this, since
    its own adapter takes its names when it is imported. Nothing happens if it is installed already.
    """
    if _before:
        return
    for package in _PACKAGES:
        for parent in _missing_parents(package):
            empty = types.ModuleType(parent)
            empty.__path__ = []
            _put(parent, empty)
        for name, ours in _MODULES.items():
            theirs = f"{package}.{name}" if name else package
            _put(theirs, _stand_in(theirs, ours))


def uninstall_megatron() -> None:
    """Undoes install_megatron()."""
    while _before:
        name, module = _before.popitem()
        parent, _, child = name.rpartition(".")
        if module is None:
            made = sys.modules.pop(name, None)
            if parent in sys.modules and vars(sys.modules[parent]).get(child) is made:
                delattr(sys.modules[parent], child)
        else:
            sys.modules[name] = module
            if parent in sys.modules:
                setattr(sys.modules[parent], child, module)


def _missing_parents(package: str) -> list[str]:
    """Returns the parent packages that are not installed. None is imported, because one of Megatron-Core's imports the peer's names."""
    parts = package.split(".")[:-1]
    parents = [".".join(parts[: end + 1]) for end in range(len(parts))]
    places = None  # where the next package is searched for
    for i, parent in enumerate(parents):
        if parent in sys.modules:
            places = getattr(sys.modules[parent], "__path__", [])
            continue
        found = PathFinder.find_spec(parent, places)
        if found is None:
            return parents[i:]
        places = found.submodule_search_locations or []
    return []


def _stand_in(name: str, ours: str) -> types.ModuleType:
    """Makes a module of that name with the names of one of libfsdp's modules."""
    made = types.ModuleType(name, f"libfsdp's, in the place of {name}.")
    source = importlib.import_module(ours)
    vars(made).update({key: value for key, value in vars(source).items() if not key.startswith("__")})
    made.__path__ = []
    made.__all__ = getattr(source, "__all__", [])  # type: ignore[attr-defined]
    made.__version__ = _C.version  # type: ignore[attr-defined]
    return made


def _put(name: str, module: types.ModuleType) -> None:
    _before[name] = sys.modules.get(name)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    # A function of the package may have the name of its module, as fully_shard has. The package then shows the function.
    if parent in sys.modules and child not in getattr(sys.modules[parent], "__all__", ()):
        setattr(sys.modules[parent], child, module)
