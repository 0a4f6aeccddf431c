"""What every test gets: poisoned outputs, a seed, a device, and markers that choose where a test runs."""

import os
import pathlib

os.environ.setdefault("MOE_AITER_DEBUG", "1")  # before moe_aiter is imported, which reads it once
# before the first product: cuBLAS is not deterministic without, and torch then refuses to call it so
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from pairwise import fewest

from moe_aiter.config import interpret, settings
from moe_aiter.op import ORDER

KERNELS = pathlib.Path(__file__).parent / "tests" / "kernels"
GPU = torch.cuda.is_available() and not interpret
MUCH = 2 * 2**30  # bytes
DEVICES = [torch.device("cpu")]
if GPU:
    DEVICES.append(pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu))


if interpret:
    import hurry

    hurry.hurry()


def pytest_addoption(parser):
    words = "combinations of parameters: the first of each test; of tests marked pairwise, each pair; all"
    parser.addoption("--cases", choices=["one", "pairs", "all"], default="pairs", help=f"{words} [pairs]")


def pytest_ignore_collect(collection_path, config):
    """With `-m interpret`, read only the files that may have such tests: importing all takes longer."""
    if config.getoption("markexpr").startswith("interpret") and collection_path.name.startswith("test_"):
        marked = KERNELS in collection_path.parents or "mark.interpret" in collection_path.read_text("utf-8")
        return None if marked else True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Make the chosen cases only: most combinations of parameters are not run, and making them takes time."""
    yield
    calls, mark = metafunc._calls, metafunc.definition.get_closest_marker
    present = [c for c in calls if not absent(metafunc.definition, c)]
    cases = metafunc.config.getoption("--cases")
    if cases == "one" or (cases == "pairs" and mark("pairwise")):
        present = chosen(present, cases)
    calls[:] = present or calls[:1]  # without any, pytest would make a test that lacks its parameters


def pytest_collection_modifyitems(config, items):
    for item in items:
        if KERNELS in item.path.parents:
            item.add_marker(pytest.mark.interpret)
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="no GPU that Triton can use"))
    left_out = [item for item in items if absent(item, getattr(item, "callspec", None))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def absent(test: pytest.Item, call) -> bool:
    """Whether this test or this call of it cannot run here: no such backend, or not with this dtype."""
    marks = {mark.name for mark in (*test.iter_markers(), *(call.marks if call else ()))}
    if interpret and marks & {"gpu", "no_interpreter"}:
        return True
    backend, device, dtype = map(call.params.get if call else {}.get, ("backend", "device", "dtype"))
    if backend is None or device is None or KERNELS not in test.path.parents:
        return False
    if backend == "host" and (dtype == torch.float16 or "no_host" in marks):
        return True
    # the interpreter cuts bfloat16 off instead of rounding it
    return backend not in ("auto", *ORDER[device.type]) or (interpret and dtype == torch.bfloat16)


def chosen(calls: list, cases: str) -> list:
    """Of one test's calls the first on each device, or with each backend those that have each pair."""
    groups = {}
    for call in calls:
        where = call.params.get("device"), call.params.get("backend") if cases == "pairs" else None
        groups.setdefault(where, []).append(call)
    kept = set()
    for group in groups.values():
        numbers = [0] if cases == "one" else fewest([call.params for call in group])
        kept.update(id(group[i]) for i in numbers)
    return [call for call in calls if id(call) in kept]


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
