"""Build the kernels in C together with the package; without a C compiler, the package is built without them.

The variable ``ONNXGRAD_KERNELS=0`` leaves them out: for the pure wheel.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
import build_kernels

PACKAGE = "onnxgrad.runtime.kernels.prebuilt"


class Build(build):
    """Begin with an empty folder: a library is named after all sources, also those that an earlier version left."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib, "onnxgrad"), ignore_errors=True)
        super().run()


class BuildKernels(build_ext):
    """Compile each extension, a kind of processor, to a shared library that ONNX Runtime loads."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def copy_extensions_to_source(self) -> None:
        """Replace the libraries of a clone: what an editable installation uses."""
        shutil.rmtree(build_kernels.FOLDER, ignore_errors=True)
        build_kernels.FOLDER.mkdir()
        super().copy_extensions_to_source()

    def get_ext_filename(self, fullname: str) -> str:
        *package, kind = fullname.split(".")
        return os.path.join(*package, build_kernels.processors.name_library(build_kernels.SOURCES, kind))

    def build_extension(self, ext: Extension) -> None:
        kind = ext.name.rpartition(".")[2]
        flags = [build_kernels.contraction(COMPILER), *build_kernels.ARCHITECTURE[kind]]
        try:
            build_kernels.build_library(COMPILER, flags, Path(self.get_ext_fullpath(ext.name)))
        except build_kernels.NoCompiler as error:
            raise CompileError(str(error)) from error


class PlatformWheel(bdist_wheel):
    """The tag of a wheel with kernels: they depend on the platform, but not on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if platform == "any" else ("py3", "none", platform)


def find_compiler() -> list[str]:
    """The command of the C compiler; empty, with a message, if the kernels are not built."""
    if os.environ.get("ONNXGRAD_KERNELS") == "0":
        return []
    try:
        return build_kernels.find_compiler()
    except build_kernels.NoCompiler as error:
        print(f"onnxgrad is installed without kernels in C: {error}", file=sys.stderr)
        return []


COMPILER = find_compiler()
KINDS = build_kernels.processors.architecture_kinds() if COMPILER else []
setup(
    ext_modules=[Extension(f"{PACKAGE}.{kind}", [], optional=True) for kind in KINDS],
    cmdclass={"build": Build, "build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
