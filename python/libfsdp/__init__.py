"""Fully Sharded Data Parallel training for PyTorch, with its engine in C++."""

import os

import torch

from libfsdp import _build_info, _torch_version

# Before anything loads the extension: beside another torch, that ends in undefined symbols, or worse.
_torch_version.require_same_binaries(
    _build_info.torch_version, torch.__version__, os.path.dirname(os.path.abspath(torch.__file__))
)

from libfsdp import _C  # noqa: E402

__version__: str = _C.version

__all__ = ["__version__"]
