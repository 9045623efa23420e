"""The package is found, and it is the one of this torch."""

import subprocess
import sys

import pytest
import torch

import libfsdp
from libfsdp import _C, _build_info, _torch_version


def test_extension_and_package_agree() -> None:
    assert libfsdp.__version__ == _C.version == _build_info.version
    assert torch.__version__ == _C.torch_version == _build_info.torch_version


@pytest.mark.parametrize(
    ("built", "installed", "same"),
    [
        ("2.13.0+cpu", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13.1+cpu", True),
        ("2.13.0", "2.13.0", True),
        ("2.13.0+cpu", "2.13.0+cu126", False),
        ("2.13.0+cpu", "2.13.0", False),
        ("2.13.0+cpu", "2.12.0+cpu", False),
        ("2.13.0+cpu", "2.130.0+cpu", False),
        ("2.14.0.dev20260901+cpu", "2.14.0.dev20260901+cpu", True),
        ("2.14.0.dev20260901+cpu", "2.14.0.dev20260902+cpu", False),
        ("2.14.0a0+git0123456", "2.14.0+cpu", False),
    ],
)
def test_which_torch_fits(built: str, installed: str, same: bool) -> None:
    assert _torch_version.same_binaries(built, installed) is same


def test_another_torch_is_one_clear_error_before_the_extension_is_loaded() -> None:
    program = (
        "import sys, torch\n"
        "built = torch.__version__\n"
        "torch.__version__ = '2.99.0+elsewhere'\n"
        "try:\n"
        "    import libfsdp\n"
        "except ImportError as error:\n"
        "    assert f'built with torch {built}' in str(error), error\n"
        "    assert 'torch 2.99.0+elsewhere is installed' in str(error), error\n"
        "    assert 'pip install' in str(error), error\n"
        "    assert 'libfsdp._C' not in sys.modules\n"
        "else:\n"
        "    raise AssertionError('imported')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
