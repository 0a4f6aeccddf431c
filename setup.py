"""Builds the C++ extension `moe_aiter._host`, where there is a compiler; the rest is in pyproject.toml."""

from setuptools import setup
from setuptools.command.build_ext import build_ext as BuildExt
from setuptools.errors import CCompilerError, CompileError, ExecError, PlatformError

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:  # `make extension` with a Python that lacks pybind11
    Pybind11Extension = None

MISSING = (
    "moe_aiter._host was not built: {}\n"
    "The package works without it; its CPU path then runs in plain torch, which is slower."
)


class BuildIfPossible(BuildExt):
    """Build the extension, or say why not and go on without it."""

    def run(self):
        try:
            super().run()
        except (CCompilerError, CompileError, ExecError, PlatformError, OSError) as error:
            self.skip(error)

    def build_extension(self, ext):
        if self.compiler.compiler_type == "unix":
            # nothing here reads errno or traps; loops with comparisons are vectorised only without both
            ext.extra_compile_args += ["-O3", "-fno-math-errno", "-fno-trapping-math"]
        try:
            super().build_extension(ext)
        except (CCompilerError, CompileError, ExecError, PlatformError, OSError) as error:
            self.skip(error)

    def skip(self, error):
        self.announce(MISSING.format(error), level=3)
        self.extensions = []


def extensions():
    if Pybind11Extension is None:
        print(MISSING.format("pybind11 is not installed"))
        return []
    headers = ["csrc/glu.h", "csrc/numbers.h", "csrc/parallel.h", "csrc/rows.h"]
    return [Pybind11Extension("moe_aiter._host", ["csrc/host.cpp"], depends=headers, cxx_std=17)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildIfPossible})
