"""What every test gets: poisoned outputs, a seed, a device, and markers that choose where a test runs."""

import os
import pathlib

os.environ.setdefault("MOE_AITER_DEBUG", "1")  # before moe_aiter is imported, which reads it once
# before the first product: cuBLAS is not deterministic without, and torch then refuses to call it so
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from moe_aiter.config import interpret, settings

TESTS = pathlib.Path(__file__).parent
GPU = torch.cuda.is_available() and not interpret
MUCH = 2 * 2**30  # bytes
DEVICES = [torch.device("cpu")]
if GPU:
    DEVICES.append(pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu))


def pytest_collection_modifyitems(items):
    for item in items:
        if TESTS / "kernels" in item.path.parents:
            item.add_marker(pytest.mark.interpret)
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="no GPU that Triton can use"))


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
