"""What every test gets: poisoned outputs, a seed, a device, and markers that choose where a test runs."""

import dataclasses
import os
import pathlib
import types

os.environ.setdefault("MOE_AITER_DEBUG", "1")  # before moe_aiter is imported, which reads it once
# before the first product: cuBLAS is not deterministic without, and torch then refuses to call it so
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from pairwise import fewest

from moe_aiter.config import interpret, settings
from moe_aiter.op import ORDER

TESTS = pathlib.Path(__file__).parent / "tests"
GPU = torch.cuda.is_available() and not interpret
MUCH = 2 * 2**30  # bytes
DEVICES = [torch.device("cpu")]
if GPU:
    DEVICES.append(pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu))


def hurry_interpreter():
    """Leave out what Triton's interpreter does again or for nothing, half of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, types.SimpleNamespace(restore=lambda: None)

    def patch_once(fn):
        """A launch patches triton.language, and each call of a device function would do so again."""
        modules = [m for m in fn.__globals__.values() if m is tl or m is tl.core]
        return patch(fn) if any(tl.core.is_builtin(m.load) for m in modules) else patched

    interpreter._patch_lang = patch_once
    # it computes whether each integer overflows, and asserts it with its option `debug` alone, which is False
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if interpret:
    hurry_interpreter()


def pytest_addoption(parser):
    words = "combinations of parameters: the first of each test; of tests marked pairwise, each pair; all"
    parser.addoption("--cases", choices=["one", "pairs", "all"], default="pairs", help=f"{words} [pairs]")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if TESTS / "kernels" in item.path.parents:
            item.add_marker(pytest.mark.interpret)
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="no GPU that Triton can use"))
    kept = chosen([item for item in items if not absent(item)], config.getoption("--cases"))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def absent(item: pytest.Item) -> bool:
    """Whether this case cannot run here: no such backend, or none that computes this dtype."""
    if interpret and (item.get_closest_marker("gpu") or item.get_closest_marker("no_interpreter")):
        return True
    params = item.callspec.params if hasattr(item, "callspec") else {}
    backend, device, dtype = map(params.get, ("backend", "device", "dtype"))
    if backend is None or device is None or TESTS / "kernels" not in item.path.parents:
        return False
    if backend == "host" and (dtype == torch.float16 or item.get_closest_marker("no_host")):
        return True
    # the interpreter cuts bfloat16 off instead of rounding it
    return backend not in ("auto", *ORDER[device.type]) or (interpret and dtype == torch.bfloat16)


def chosen(items: list[pytest.Item], cases: str) -> set[pytest.Item]:
    """The tests that run: of each function the first, or of those marked pairwise each pair, or all."""
    kept, groups = set(), {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if cases == "all" or (cases == "pairs" and not item.get_closest_marker("pairwise")):
            kept.add(item)
        elif not item.get_closest_marker("skip"):
            where = params.get("device"), params.get("backend") if cases == "pairs" else None
            groups.setdefault((item.parent.nodeid, item.originalname, *where), []).append(item)
    for group in groups.values():
        numbers = [0] if cases == "one" else fewest([item.callspec.params for item in group])
        kept.update(group[i] for i in numbers)
    return kept


@pytest.fixture(params=DEVICES, ids=lambda device: device.type)
def device(request) -> torch.device:
    """Each device there is: the CPU, and the first GPU."""
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def no_debug():
    """Settings.debug off for one test: its checks synchronise, which a CUDA graph cannot capture."""
    before = settings.debug
    object.__setattr__(settings, "debug", False)
    yield
    object.__setattr__(settings, "debug", before)


@pytest.fixture(autouse=GPU)
def freed():
    """What a test took of the GPU is for the other processes again, if that was much."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MUCH:
        torch.cuda.empty_cache()


@pytest.fixture
def most_of_the_gpu(tmp_path_factory, freed):
    """For tests that take tens of gigabytes: of all processes one at a time."""
    import fcntl  # not on Windows

    with open(tmp_path_factory.getbasetemp().parent / "gpu.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()
