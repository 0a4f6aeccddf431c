"""Scripts that run in a process of their own, forked from one that has imported what takes seconds."""

import functools
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import unittest.mock

from moe_aiter.config import PREFIX

ROOT = pathlib.Path(__file__).parent.parent
SLOW = ["torch._dynamo", "torch.distributed.fsdp", "moe_aiter.cli", "transformers.modeling_utils", "peft"]


def environment() -> dict[str, str]:
    """That of a user: without the settings of the tests, nor those of a make that runs them."""
    hidden = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTEST_ADDOPTS", "VENV", "PYTHON", "ARGS", "NPROC", "FULL"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) and k not in hidden}
    return kept | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}


@functools.cache
def server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SLOW)
    compiles_nothing = environment() | {"TORCHDYNAMO_DISABLE": "1"}  # compiling takes minutes
    with unittest.mock.patch.dict(os.environ, compiles_nothing, clear=True):
        multiprocessing.forkserver.ensure_running()
    return context


def run(
    script: pathlib.Path, *words: object, cwd: pathlib.Path = ROOT, **variables: str
) -> subprocess.CompletedProcess:
    """Run `python script words` in the folder `cwd`, with these environment variables."""
    with tempfile.TemporaryDirectory() as out:
        files = [pathlib.Path(out, name) for name in ("stdout", "stderr")]
        process = server().Process(
            target=become, args=(str(script), [*map(str, words)], cwd, files, variables)
        )
        process.start()
        process.join()
        printed = [file.read_text() for file in files]
    return subprocess.CompletedProcess([script, *words], process.exitcode, *printed)


def become(script: str, words: list[str], cwd: pathlib.Path, files: list[pathlib.Path], variables: dict):
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.update(variables)
    sys.argv, sys.path[0] = [script, *words], os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
