"""Builds the C++ extension `moe_aiter._host`, where there is a compiler; the rest is in pyproject.toml."""

import sys

from setuptools import setup
from setuptools.command.build_ext import build_ext as BuildExt
from setuptools.errors import CCompilerError, ExecError, PlatformError

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:  # not installed from pyproject.toml, which asks for it
    Pybind11Extension = None


def skip(reason) -> None:
    print(
        f"moe_aiter._host was not built: {reason}\n"
        "The package works without it; on a CPU it then runs in plain torch, which is slower.",
        file=sys.stderr,
    )


class BuildIfPossible(BuildExt):
    """Build the extension, or say why not and go on without it."""

    def build_extension(self, ext):
        if self.compiler.compiler_type == "unix":
            # nothing here reads errno or traps; loops with comparisons are vectorised only without both
            ext.extra_compile_args += ["-O3", "-fno-math-errno", "-fno-trapping-math"]
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError, OSError) as error:
            skip(error)
            self.extensions.remove(ext)


def extensions() -> list:
    if Pybind11Extension is None:
        skip("pybind11 is not installed")
        return []
    headers = ["csrc/glu.h", "csrc/numbers.h", "csrc/system.h", "csrc/rows.h"]
    return [Pybind11Extension("moe_aiter._host", ["csrc/host.cpp"], depends=headers, cxx_std=17)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildIfPossible})
