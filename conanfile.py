"""Conan's recipe: `conan create . --test-folder tests/package`; see docs/develop/building.md, Packages.

torch, Gloo's headers and nlohmann_json are none of its requirements: the library has to be built with the very torch that the Python in
front on PATH has, and with the headers that fit it.
"""

import re
import subprocess
from pathlib import Path

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain


class Libfsdp(ConanFile):
    name = "libfsdp"
    license = "Apache-2.0"
    description = "Fully Sharded Data Parallel training on LibTorch"
    package_type = "shared-library"
    settings = "os", "compiler", "build_type", "arch"
    exports_sources = "CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "src/*"

    def set_version(self) -> None:
        header = Path(self.recipe_folder) / "include" / "fsdp" / "version.h"
        self.version = ".".join(
            re.findall(r"^#define FSDP_VERSION_\w+ (\d+)", header.read_text(encoding="utf-8"), re.MULTILINE)
        )

    def generate(self) -> None:
        toolchain = CMakeToolchain(self)
        asked = subprocess.check_output(
            ["python", "-c", "import torch; print(torch.utils.cmake_prefix_path)"], text=True
        )
        toolchain.cache_variables["FSDP_TORCH_CMAKE_DIR"] = asked.strip()
        for part in ("TESTS", "EXAMPLES", "TOOLS", "BENCH", "PYTHON"):
            toolchain.cache_variables[f"FSDP_BUILD_{part}"] = "OFF"
        toolchain.generate()

    def build(self) -> None:
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self) -> None:
        CMake(self).install()

    def package_info(self) -> None:
        # The package's own fsdpConfig.cmake: it also finds torch, and refuses another version of it.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/fsdp"]
        self.cpp_info.libs = ["fsdp"]
