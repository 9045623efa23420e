"""The package as pip installs it: whole, and without the build folder or the source.

The wheel is built in ``FSDP_WHEEL_BUILD_DIR``, which is kept: the second time, nothing is compiled. It lies beside the
build folder, as deep as that, because what ccache knows a file by has its path relative to the folder of the build.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[3]
COMMANDS = ("fsdp", "fsdp-ckpt")
BUILD = os.environ.get("FSDP_WHEEL_BUILD_DIR")

pytestmark = [
    pytest.mark.skipif(BUILD is None, reason="ctest says where to build: FSDP_WHEEL_BUILD_DIR"),
    pytest.mark.skipif(
        shutil.which("ccache") is None and "FSDP_TEST_WHEEL" not in os.environ,
        reason="compiles the library once more, which takes minutes without ccache: install that, or set FSDP_TEST_WHEEL=1",
    ),
]


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints. It runs without the build's package on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    run(*pip, f"--config-settings=build-dir={BUILD}", f"--wheel-dir={folder}", SOURCE, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that has the wheel, and sees the torch that is installed here."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "installed_here.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    python = environment / "bin" / "python"
    # pip is one of the packages that it sees.
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-index"]
    run(*pip, wheel, cwd=environment)
    return python


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    package = {name for name in names if name.startswith("libfsdp/")}
    release = wheel.name.rsplit("-", 3)[0]
    scripts = {f"{release}.data/scripts/{name}" for name in COMMANDS}
    assert scripts <= names
    assert {name.split(".dist-info/")[0] for name in names - package - scripts} == {release}
    source = SOURCE / "python" / "libfsdp"
    files = {path.relative_to(source.parent).as_posix() for path in source.rglob("*") if path.suffix in (".py", ".pyi")}
    extension = {name for name in package if name.startswith("libfsdp/_C.") and name.endswith(".so")}
    assert len(extension) == 1
    assert package == files | extension | {
        "libfsdp/py.typed",
        "libfsdp/libfsdp.so",
        "libfsdp/_build_info.py",
        *(f"libfsdp/bin/{name}" for name in COMMANDS),
    }


def test_installed_package_uses_its_own_files(python: Path, tmp_path: Path) -> None:
    program = (
        "import json, sys, libfsdp\n"
        "modules = [m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'libfsdp']\n"
        "maps = [line.split(maxsplit=5)[5].strip() for line in open('/proc/self/maps') if 'libfsdp' in line]\n"
        "print(json.dumps([modules, sorted(set(maps)), libfsdp._C.torch_version]))\n"
    )
    modules, libraries, torch_version = json.loads(run(python, "-c", program, cwd=tmp_path))
    environment = python.parents[1]
    assert libraries
    assert [path for path in modules + libraries if not Path(path).is_relative_to(environment)] == []
    assert sorted(Path(path).name.split(".")[0] for path in libraries) == ["_C", "libfsdp"]
    assert torch_version == torch.__version__


def test_installed_package_shards(python: Path, tmp_path: Path) -> None:
    program = (
        "import libfsdp, torch\n"
        "from torch import distributed, nn\n"
        "distributed.init_process_group('gloo', store=distributed.HashStore(), rank=0, world_size=1)\n"
        "model = nn.Linear(4, 2)\n"
        "libfsdp.fully_shard(model)\n"
        "model(torch.ones(3, 4)).sum().backward()\n"
        "print(type(model.weight).__name__, model.weight.grad.full_tensor().tolist())\n"
        "distributed.destroy_process_group()\n"
    )
    assert run(python, "-c", program, cwd=tmp_path).split(maxsplit=1) == ["DTensor", f"{[[3.0] * 4] * 2}\n"]


def test_installed_commands_run(python: Path, tmp_path: Path) -> None:
    program = (
        "import libfsdp, torch\n"
        "from safetensors.torch import save_file\n"
        "from torch import distributed, nn\n"
        "distributed.init_process_group('gloo', store=distributed.HashStore(), rank=0, world_size=1)\n"
        "model = nn.Linear(4, 2)\n"
        "libfsdp.fully_shard(model)\n"
        "model(torch.ones(3, 4)).sum().backward()\n"
        "save_file({'layers.0.weight': torch.ones(3, 4)}, 'model.safetensors')\n"
        "distributed.destroy_process_group()\n"
    )
    events = tmp_path / "events"
    run("env", f"FSDP_EVENTS={events}", python, "-c", program, cwd=tmp_path)
    fsdp, ckpt = (python.parent / name for name in COMMANDS)
    assert "12 elements in " in run(fsdp, "plan", "model.safetensors", "--ranks", "2", cwd=tmp_path)
    assert run(fsdp, "timeline", events, cwd=tmp_path)
    assert run(fsdp, "why", events, cwd=tmp_path)
    assert "layers.0.weight" in run(ckpt, "inspect", "model.safetensors", cwd=tmp_path)
    # The package sees transformers where it is, in the Python that the command was installed for.
    if find_spec("transformers"):
        config = {"model_type": "gpt2"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert json.loads(run(fsdp, "plan", ".", "--ranks", "2", "--json", cwd=tmp_path))["elements"] == 124_439_808


def test_libraries_remember_no_folder_of_the_build(python: Path, tmp_path: Path) -> None:
    (package,) = python.parents[1].glob("lib/python*/site-packages/libfsdp")
    libraries = [*package.glob("*.so"), *(package / "bin").iterdir()]
    assert len(libraries) == 2 + len(COMMANDS)
    for library in libraries:
        dynamic = run("readelf", "--dynamic", "--wide", library, cwd=tmp_path).splitlines()
        (line,) = (line for line in dynamic if "RUNPATH" in line or "RPATH" in line)
        folders = line[line.index("[") + 1 : line.index("]")].split(":")
        assert [folder for folder in folders if not folder.startswith("$ORIGIN")] == []


def test_another_torch_is_one_clear_error(python: Path, tmp_path: Path) -> None:
    # A torch that is nothing but its version: the package must ask for that before it needs anything of torch.
    (tmp_path / "torch").mkdir()
    for name in ("__init__.py", "version.py"):
        (tmp_path / "torch" / name).write_text("__version__ = '2.99.0+elsewhere'\n")
    program = (
        "try:\n"
        "    import libfsdp\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "else:\n"
        "    raise AssertionError('imported')\n"
    )
    command = subprocess.run(
        [python.parent / "fsdp", "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        text=True,
        capture_output=True,
    )
    assert command.returncode == 1
    assert "but torch 2.99.0+elsewhere is installed" in command.stderr
    message = run(python, "-c", program, cwd=tmp_path)  # -c looks for modules in the working folder first
    assert f"built with torch {torch.__version__}, but torch 2.99.0+elsewhere is installed in {tmp_path}" in message
    assert "pip install" in message
