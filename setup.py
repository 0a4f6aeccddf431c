"""Build the C++ extension `moe_aiter._host` if there is a compiler; pyproject.toml has the rest."""

import pathlib
import re
import sys

from setuptools import setup
from setuptools.command.build_ext import build_ext as BuildExt
from setuptools.errors import CCompilerError, ExecError, PlatformError

try:
    from pybind11.setup_helpers import Pybind11Extension
except ImportError:  # not installed from pyproject.toml, which asks for it
    Pybind11Extension = None

REPOSITORY = ""  # its https address, once there is one: links and the badge of the package's page need it


def skip(reason) -> None:
    print(
        f"moe_aiter._host was not built: {reason}\n"
        "The package works without it; on a CPU it then runs in plain torch, which is slower.",
        file=sys.stderr,
    )


def description() -> str:
    """Return the README with links that work outside of the repository, or without relative links."""

    def link(found: re.Match) -> str:
        image, text, target = found.groups()
        if REPOSITORY:
            return f"{image}[{text}]({REPOSITORY}/{'raw' if image else 'blob'}/main/{target})"
        return "" if image else text

    title, _, text = pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8").partition("\n")
    tests = f"{REPOSITORY}/actions/workflows/tests.yml"
    badge = f"\n[![tests]({tests}/badge.svg)]({tests})\n" if REPOSITORY else ""
    return title + "\n" + badge + re.sub(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]*)\)", link, text)


def urls() -> dict[str, str]:
    pages = {"Source": "", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}
    return {name: REPOSITORY + page for name, page in pages.items()} if REPOSITORY else {}


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


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildIfPossible},
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls=urls(),
)
