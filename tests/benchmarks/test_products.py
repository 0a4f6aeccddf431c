"""How kernels are timed: what is captured, and what is launched one by one."""

import inspect

import pytest
import torch

from benchmarks import products
from benchmarks.products import KernelTimer, Product, copier, kernels
from moe_aiter.bench.measure import time_calls


@pytest.mark.gpu
def test_a_call_that_waits_is_not_captured():
    x = torch.randn(9, device="cuda")
    _, how = kernels(lambda: x.nonzero(), True, False)
    assert how == "eager" and torch.randn(3, device="cuda").isfinite().all()
    launched, how = kernels(lambda: x.mul_(2), True, False)
    before = x.clone()
    launched()
    assert how == "graph" and torch.equal(x, 2 * before)


def test_ours_is_captured_or_refused(monkeypatch):
    def refuse(call):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(products, "never_waits", lambda call: False)
    monkeypatch.setattr(products, "captured", refuse)
    assert kernels(print, True, False) == (print, "eager")
    with pytest.raises(RuntimeError, match="capturing"):
        kernels(print, True, True)


@pytest.mark.parametrize("half", [1, 4095, 4096, 4097, 2**20 + 512])
def test_a_copy_is_of_whole_pages(half):
    """One of 16 MiB and half a page took an H200 16.8 us, of 17 MiB 13.2."""
    copy = copier(2 * half, torch.device("cpu"))
    source, target = (inspect.getclosurevars(copy).nonlocals[name] for name in ("source", "target"))
    assert len(source) == len(target) == (half + 4095) // 4096 * 4096
    source.fill_(7)
    target.zero_()
    copy()
    assert (target == 7).all()


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_cells_are_numbers(on_gpu, host, monkeypatch):
    """On a GPU, calls and kernels are timed apart."""
    monkeypatch.setattr(products, "kernel_times", lambda runs, reps, lead: time_calls(runs, reps))
    monkeypatch.setattr(torch.cuda, "synchronize", int)
    timer = KernelTimer(torch.device("cpu"), host)
    timer.add(Product("moe_aiter", lambda: torch.ones(3), flops=6, bytes=12))
    timer.on_gpu = on_gpu
    (cells,) = timer.cells(reps=2)
    assert set(cells) == {"us", "ms", "p20", "p80", "host_us", "gb_per_s", "tflops"}
    assert all(type(cell) is float and cell > 0 for cell in cells.values())
