"""Scripts, torchrun's ranks and functions, forked from a process that has imported what takes seconds."""

import contextlib
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Callable

import torch

from moe_aiter.config import PREFIX, Settings, interpret, settings

ROOT = pathlib.Path(__file__).parent.parent
SLOW = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "moe_aiter.distributed", "pytest"]
if not interpret:
    SLOW += ["torch._dynamo", "torch._inductor", "torch.distributed.tensor.parallel", "moe_aiter.cli"]
    SLOW += ["transformers.modeling_utils", "peft"]
KEPT: list[object] = []  # what a script leaves: torch may hang where it frees a model in DDP after its group
PATIENCE = 600  # seconds, then a process prints where it is, and fails
HOSTS_PATIENCE = 180  # seconds, then all hosts are ended


def environment() -> dict[str, str]:
    """That of a user: without the settings of the tests, nor those of a make that runs them."""
    hidden = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTEST_ADDOPTS", "VENV", "PYTHON", "ARGS", "NPROC", "FULL"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) and k not in hidden}
    return kept | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}


@functools.cache
def server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SLOW)
    with unittest.mock.patch.dict(os.environ, environment(), clear=True):
        multiprocessing.forkserver.ensure_running()
    return context


def run(
    script: pathlib.Path, *words: object, cwd: pathlib.Path = ROOT, ranks: int = 0, **variables: str
) -> subprocess.CompletedProcess:
    """Run `python script words`, or `torchrun script words` with so many ranks, in the folder `cwd`."""
    variables = {"TORCHDYNAMO_DISABLE": "1"} | variables  # compiling takes minutes
    with tempfile.TemporaryDirectory() as out:
        files = [pathlib.Path(out, name) for name in ("stdout", "stderr")]
        processes = []
        for told in [{}] if not ranks else torchrun(ranks):
            given = str(script), [*map(str, words)], cwd, files, variables | told
            processes.append(server().Process(target=become, args=given))
            processes[-1].start()
        wait(processes)
        printed = [file.read_text() for file in files]
    status = next((p.exitcode for p in processes if p.exitcode), 0)
    return subprocess.CompletedProcess([script, *words], status, *printed)


def wait(processes: list[multiprocessing.process.BaseProcess]) -> None:
    """Wait for all, or for the first that fails: the others would wait for its messages."""
    while running := [p for p in processes if p.exitcode is None]:
        multiprocessing.connection.wait([p.sentinel for p in running])
        if any(p.exitcode for p in processes):
            for p in running:
                p.kill()


def torchrun(ranks: int) -> list[dict[str, str]]:
    """The variables with which torchrun starts each rank."""
    with contextlib.closing(socket.create_server(("localhost", 0))) as free:
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": "0"}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def on_hosts(commands: list[list[str]], folder: pathlib.Path) -> str:
    """Run `torchrun words` for each list of words as one of several hosts, and return what they print.

    A free port stands in for 29500.  If one host hangs, all are ended.
    """
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = str(free.getsockname()[1])
    env = environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = {"cwd": folder, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    hosts = []
    try:
        for words in commands:
            words = [word.replace("29500", port) for word in words]
            command = [sys.executable, "-m", "torch.distributed.run", *words]
            hosts.append(subprocess.Popen(command, text=True, **options))
        printed = "\n".join(host.communicate(timeout=HOSTS_PATIENCE)[0] for host in hosts)
    finally:
        for host in hosts:
            host.terminate()  # torchrun then ends its ranks, which it has put into sessions of their own
        for host in hosts:
            host.wait(HOSTS_PATIENCE)
    assert not any(host.returncode for host in hosts), printed
    return printed


def become(script: str, words: list[str], cwd: pathlib.Path, files: list[pathlib.Path], variables: dict):
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    os.chdir(cwd)
    os.environ.update(variables)
    sys.argv, sys.path[0] = [script, *words], os.path.dirname(script)
    try:
        KEPT.append(runpy.run_path(script, run_name="__main__"))
    except (Exception, SystemExit) as error:
        KEPT.append(error)  # whose frames have the variables
        raise
    if "RANK" in variables:
        end()


def end() -> None:
    """End this process at once: gloo's threads may abort it while Python ends, in plain torch too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def call(function: Callable, world: int, *args: object) -> None:
    """Call `function(rank, *args)` in `world` processes with the settings of this one; raise their errors."""
    server()
    torch.multiprocessing.start_processes(
        with_settings, (function, settings, dict(os.environ), *args), world, start_method="forkserver"
    )


def with_settings(rank: int, function: Callable, given: Settings, variables: dict, *args: object) -> None:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    for name, value in vars(given).items():
        object.__setattr__(settings, name, value)  # those of the server are a user's
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    if interpret:
        import hurry

        hurry.hurry()
    function(rank, *args)
