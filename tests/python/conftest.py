"""What all Python tests share. ctest runs them (label python), with the build's package on PYTHONPATH."""

import importlib.util

import pytest

if importlib.util.find_spec("libfsdp") is None:
    pytest.exit("no libfsdp: run ctest -L python, or PYTHONPATH=build/python python -m pytest", returncode=2)
