"""What one thread sets for a block of its own stays out of all others, in whatever order they leave."""

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from moe_aiter import op, switches, tuning
from moe_aiter.layers import convolution, segment
from moe_aiter.layers.segment import SegmentGEMMWrapper
from moe_aiter.op import Scoped, use


def take_turns(first, second):
    """Run both on threads: the second begins inside of the first, which ends inside of the second.

    Each is called with a function to call once inside.
    """
    inside, ended = (threading.Event(), threading.Event()), threading.Event()

    def run_first():
        try:
            first(lambda: (inside[0].set(), wait(inside[1])))
        finally:
            ended.set()

    def run_second():
        wait(inside[0])
        second(lambda: (inside[1].set(), wait(ended)))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run_first), pool.submit(run_second)]:
            done.result()


def wait(event):
    assert event.wait(30), "the other thread does not come"


def within(context, meet):
    with context():
        meet()


def state():
    """All that the blocks could leave behind."""
    precisions = [switch.fp32_precision for switch in switches.FLOAT32_SWITCHES]
    tile = tuning.lookup("gmm", torch.float32, 8, 8, 8, 1) if tuning.interpret else None
    return op.forced(), tile, precisions, switches.switches.matmul, torch.backends.cudnn.benchmark


@pytest.fixture
def searching(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(switches.switches, "dynamic_shapes", True)


@pytest.mark.parametrize(
    "context",
    [
        partial(use, "torch"),
        partial(tuning.choose, lambda key: tuning.TOY),
        partial(switches.float32_products, "tf32"),
    ],
    ids=["use", "choose", "float32_products"],
)
def test_nothing_stays_set(context):
    before = state()
    take_turns(partial(within, context), partial(within, context))
    assert state() == before


@pytest.mark.parametrize("outer", [False, True])
def test_what_a_block_sets_lives_as_long_as_it_is_used(outer):
    """torch 2.11 frees a stashed object once too often."""
    value = object()
    references = sys.getrefcount(value)
    scoped = Scoped("test", None)
    with scoped.set(value) if outer else contextlib.nullcontext():
        for _ in range(10):
            with scoped.set(value):
                assert scoped.get() is value
        assert scoped.get() is (value if outer else None)
    assert scoped.get() is None and sys.getrefcount(value) == references


def test_a_convolution_leaves_torchs_search_as_it_was(searching, monkeypatch):
    meet, torchs = threading.local(), F.conv2d
    seen = []

    def conv2d(*given):
        meet.now()
        seen.append(torch.backends.cudnn.benchmark)
        return torchs(*given)

    monkeypatch.setattr(convolution.F, "conv2d", conv2d)

    def run(now):
        meet.now = now
        convolution.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3))

    take_turns(run, run)
    assert seen == [False, False] and torch.backends.cudnn.benchmark is True


def test_a_segment_product_by_torch_forces_no_other_thread(monkeypatch):
    meet, product, seen = threading.local(), segment.segment_gmm, []

    def segment_gmm(*given, **named):
        meet.now()
        seen.append(op.forced())
        return product(*given, **named)

    monkeypatch.setattr(segment, "segment_gmm", segment_gmm)

    def run(name, now):
        meet.now = now
        wrapper = SegmentGEMMWrapper(torch.empty(0, dtype=torch.int8), backend=name)
        wrapper.run(torch.ones(4, 3), torch.ones(2, 3, 5), 2, False, seg_lens=torch.tensor([1, 3]))

    before = op.forced()
    take_turns(partial(run, "torch"), partial(run, "torch"))
    assert seen == ["torch", "torch"] and op.forced() == before
    seen.clear()
    take_turns(partial(run, "torch"), partial(run, "auto"))
    assert seen == ["torch", before]


def test_the_gradient_of_a_segment_product_by_torch_is_torchs(monkeypatch):
    ran = []
    weight_gradient = op.IMPLS["segment_tgmm"]["torch"]
    watched = lambda *inputs: ran.append(op.forced()) or weight_gradient(*inputs)  # noqa: E731
    monkeypatch.setitem(op.IMPLS["segment_tgmm"], "torch", watched)
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3, 5, requires_grad=True)
    wrapper = SegmentGEMMWrapper(torch.empty(0, dtype=torch.int8), backend="torch")
    out = wrapper.run(x, w, 2, False, seg_lens=torch.tensor([1, 3]))
    dout = torch.randn_like(out)
    out.backward(dout)
    assert ran == ["torch"]
    torch.testing.assert_close(out, torch.cat([x[:1] @ w[0], x[1:] @ w[1]]))
    torch.testing.assert_close(x.grad, torch.cat([dout[:1] @ w[0].T, dout[1:] @ w[1].T]))
    torch.testing.assert_close(w.grad, torch.stack([x[:1].T @ dout[:1], x[1:].T @ dout[1:]]))


def test_another_precision_waits():
    """torch has one precision for all threads: a block never computes with that of another."""
    seen, entered = [], threading.Event()

    def other():
        entered.set()
        with switches.float32_products("ieee"):
            seen.append((switches.float32_precision(), torch.backends.cuda.matmul.fp32_precision))

    thread = threading.Thread(target=other)
    with switches.float32_products("tf32"):
        thread.start()
        wait(entered)
        thread.join(0.05)
        assert not seen and torch.backends.cuda.matmul.fp32_precision == "tf32"
        with switches.float32_products("tf32"):
            pass
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    thread.join()
    assert seen == [("ieee", "ieee")]
