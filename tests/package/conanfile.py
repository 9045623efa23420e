"""What `conan create` builds and runs against the package that it has made."""

import subprocess
from pathlib import Path

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout


class PackageTest(ConanFile):
    settings = "os", "compiler", "build_type", "arch"

    def requirements(self) -> None:
        self.requires(self.tested_reference_str)

    def layout(self) -> None:
        cmake_layout(self)

    def generate(self) -> None:
        toolchain = CMakeToolchain(self)
        asked = subprocess.check_output(
            ["python", "-c", "import torch; print(torch.utils.cmake_prefix_path)"], text=True
        )
        toolchain.cache_variables["FSDP_TORCH_CMAKE_DIR"] = asked.strip()
        toolchain.generate()

    def build(self) -> None:
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def test(self) -> None:
        if can_run(self):
            self.run(str(Path(self.build_folder) / "package_test"), env="conanrun")
