"""The tile that a row names is that of its product alone."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from check import assert_as_good_as_torch
from tuned import HEAD, rows_for, tuned_files

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels.base.gemm_row import GemmInputs
from moe_aiter.kernels.dense.gemm import bind_gemm
from moe_aiter.kernels.dense.tuned_gemm import tuned_gemm
from moe_aiter.op import IMPLS, ORDER, binds
from moe_aiter.tuning.candidates import candidates
from moe_aiter.tuning.store import cache_clear

files = pytest.fixture(tuned_files)
CPU, USUAL = torch.device("cpu"), candidates("gemm")[2]
TILES = dict(zip((5, 6), candidates("gemm"), strict=False))


@pytest.fixture
def watched(files, monkeypatch):
    """What is done while a product is launched, and the (rows, tile) of each; rows 5 and 6 name a tile."""
    during, seen = [], []

    def launch(outs, i, config=None):
        for act in during:
            act(i.x.shape[1])
        outs[0].zero_()
        seen.append((i.x.shape[1], config or tuning.lookup("gemm", i.x.dtype, i.x.shape[1], 16, 32, 1)))

    bind = binds(lambda i, **tile: functools.partial(launch, **tile))
    bind.tiles = ("gemm",)
    monkeypatch.setitem(IMPLS["gemm"], "triton", bind)
    monkeypatch.setitem(ORDER, "cpu", ("triton", "torch"))
    monkeypatch.setattr(tuning, "interpret", False)
    monkeypatch.setattr(tuning, "tables", lambda device: ("none",))
    monkeypatch.setattr(tuning, "find_tile", lambda names, key: USUAL)
    monkeypatch.setattr("triton.runtime.driver._active", Driver())
    rows = [rows_for(CPU, "triton", M).replace("kernel", f'"{tile}"') for M, tile in TILES.items()]
    files(HEAD + "".join(rows))
    cache_clear()
    return during, seen


class Driver:
    def get_current_device(self):
        return 0


def product(M):
    return tuned_gemm(torch.randn(M, 32), torch.randn(16, 32))


def test_two_threads_have_a_tile_each(watched):
    """Both are inside a launch at the same time, the one with a row and the one without as well."""
    during, seen = watched
    for pair in ((5, 6), (5, 7)):
        barrier = threading.Barrier(2, timeout=30)
        during[:] = [lambda M, barrier=barrier: barrier.wait()]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(product, pair))
    during.clear()
    assert sorted(seen, key=str) == sorted([(5, TILES[5]), (6, TILES[6]), (5, TILES[5]), (7, USUAL)], key=str)


def test_a_product_inside_of_another_does_not_have_its_tile(watched):
    during, seen = watched
    x, w = torch.randn(3, 32), torch.randn(32, 16)

    def nested(M):
        if M == 5:
            product(6)
            product(7)
            launch_like(x, w)

    def launch_like(x, w):
        i = GemmInputs(x[None], w[None], None, None, "", 1.0, 0.0, None, False)
        IMPLS["gemm"]["triton"](i)((x.new_empty(1, 3, 16), x[:0]), i)

    during.append(nested)
    product(5)
    assert seen == [(6, TILES[6]), (7, USUAL), (3, USUAL), (5, TILES[5])]


def test_a_kernel_of_the_user_s_own_is_called_as_any(watched, monkeypatch):
    """It has no tiles of ours, and no such argument."""
    ran = []
    monkeypatch.setitem(IMPLS["gemm"], "triton", lambda outs, i: ran.append(len(i)))
    product(5)
    assert ran == [9]


@pytest.mark.interpret
@pytest.mark.skipif(not interpret, reason="portable kernels need a GPU or the interpreter")
def test_a_launcher_takes_a_tile():
    config, (x, w) = tuning.Config(32, 16, 32), (torch.randn(1, 40, 70), torch.randn(1, 70, 33))
    outs = torch.full((1, 40, 33), float("nan")), x[:0]

    def ours(x, w):
        i = GemmInputs(x, w, None, None, "", 1.0, 0.0, None, False)
        bind_gemm(i, config)(outs, i)
        return outs[0].clone()

    with tuning.choose(lambda key: pytest.fail("no table is asked")):
        assert_as_good_as_torch(ours, lambda x, w: x @ w, x, w)
