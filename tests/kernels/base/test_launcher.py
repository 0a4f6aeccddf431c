"""A launch without its launcher must still be the launch that the launcher would have made."""

import functools

import pytest
import torch

from moe_aiter import op, tuning
from moe_aiter.kernels import dense
from moe_aiter.kernels.base.launch import num_programs
from moe_aiter.kernels.dense.gemm import gemm
from moe_aiter.kernels.dense.tuned_gemm import tuned_gemm_op
from moe_aiter.op import IMPLS, Launcher, noting, register_kernel, steady, undecided, use
from moe_aiter.tuning import Config

launches = pytest.importorskip("moe_aiter.kernels.base.launch")
CUDA = torch.device("cuda", 0)


class Kernel:
    """What was launched, with which addresses; and how often a launcher was asked."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(launches, "current_stream", lambda device: 100 + device)
        self.given, self.asked = [], 0

    def __call__(self, out, x, y, extra=None):
        """A launcher: of one kernel, or of two for an `extra` one, with what it adds up in between."""
        self.asked += 1
        self.launch(out, x, y)
        if extra is not None:
            self.launch(out, extra)

    def launch(self, *tensors):
        values = [5, *(t.data_ptr() for t in tensors)]
        known = lambda *args: self.given.append(args[9:]), (11, (4, 1, 0)), ("rest",), None  # noqa: E731
        if noting.launches is None:
            launches.run_known(known, (7,), values, 3)
        else:
            places = list(range(1, len(values)))
            noting.launches.append(functools.partial(launches.elsewhere, known, (7,), values, places, 3))
            launches.run_known(known, (7,), values, 3)


def new(count=3):
    return [torch.zeros(4) for _ in range(count)]


def addresses(*tensors):
    return (5, *(t.data_ptr() for t in tensors), "rest")


def test_from_the_third_call_on_nobody_asks_the_launcher(monkeypatch):
    kernel = Kernel(monkeypatch)
    launcher, kept = Launcher(kernel), []
    for call in range(5):
        out, x, y = new()
        kept += out, x, y  # or the next ones would lie there
        launcher(out, x, y)
        assert kernel.given[-1] == addresses(out, x, y) and len(kernel.given) == call + 1
    assert kernel.asked == 2


def test_several_launches_and_outputs(monkeypatch):
    kernel = Kernel(monkeypatch)
    launcher = Launcher(lambda outs, x, number, y, _: kernel(outs[0], x, y, outs[1]))
    for _ in range(4):
        out, second, x, y = new(4)
        launcher((out, second), x, 2.0, y, None)
        assert kernel.given[-2:] == [addresses(out, x, y), addresses(out, second)]
    assert kernel.asked == 2


def test_two_tensors_in_one_place_say_nothing(monkeypatch):
    kernel = Kernel(monkeypatch)
    launcher = Launcher(kernel)
    for same in (True, True, False, False, True, False):
        out, x, y = new()
        y = x if same else y
        launcher(out, x, y)
        assert kernel.given[-1] == addresses(out, x, y)
    assert kernel.asked == 3


@pytest.mark.parametrize("kind", ["memory of its own", "no launch", "not steady", "another op"])
def test_what_does_not_follow_is_asked_for(monkeypatch, kind):
    kernel = Kernel(monkeypatch)
    inner = Launcher(kernel)

    def launch(out, x, y):
        if kind == "no launch":
            out.copy_(x)
        elif kind == "not steady":
            if noting.launches is not None:
                noting.launches.append(None)
        elif kind == "another op":
            kernel(out, x, y)
            inner(out, y, x)
        else:
            kernel(out, x, torch.zeros(4))

    asked, launcher = [], Launcher(lambda *tensors: asked.append(1) or launch(*tensors))
    for _ in range(7):
        launcher(*new())
    assert len(asked) == 7 and noting.launches is None


def test_what_is_undecided_is_asked_for(monkeypatch):
    kernel = Kernel(monkeypatch)
    launcher = Launcher(kernel)
    for _ in range(3):
        launcher(*new())
    with undecided.set(True), tuning.choose(lambda key: None):
        for asked in (3, 4):
            launcher(*new())
            assert kernel.asked == asked
    for _ in range(3):
        launcher(*new())
    assert kernel.asked == 4  # what was noted before holds


def test_calls_that_cannot_be_noted_do_not_count(monkeypatch):
    kernel = Kernel(monkeypatch)
    launcher = Launcher(kernel)
    with undecided.set(True):
        for _ in range(9):
            launcher(*new())
    for _ in range(3):
        launcher(*new())
    assert kernel.asked == 10


def test_what_wraps_a_steady_launcher_is_not_steady():
    @functools.wraps(dense.gemm.launch_gemm)
    def mine(*args, **options):
        dense.gemm.launch_gemm(*args, **options)

    assert op.is_steady(dense.gemm.launch_gemm) and not op.is_steady(mine)


def test_a_profilers_hook_hears_of_it(monkeypatch):
    kernel = Kernel(monkeypatch)
    launcher = Launcher(kernel)
    for _ in range(3):
        launcher(*new())
    monkeypatch.setattr(launches, "is_watched", lambda: True)
    launcher(*new())
    assert kernel.asked == 3 and len(kernel.given) == 4


def test_a_launcher_that_raises_is_asked_again(monkeypatch):
    kernel, fail = Kernel(monkeypatch), [False, True, False, False, False]
    mistake = ValueError("no")

    def launch(out, x, y):
        if fail.pop(0):
            raise mistake
        kernel(out, x, y)

    launcher = Launcher(launch)
    launcher(*new())
    with pytest.raises(ValueError, match="no"):
        launcher(*new())
    assert noting.launches is None
    for _ in range(4):
        launcher(*new())
    assert kernel.asked == 2


# on a GPU


@pytest.fixture
def asked(monkeypatch, no_debug):
    """Calls of the launcher, of which nothing is known yet."""
    if launches.ROCM:
        pytest.skip("there each launch looks where its tensors lie")
    calls, launch = [], IMPLS["gemm"]["triton"]

    @steady
    @functools.wraps(launch)
    def counted(*args, **options):
        calls.append(1)
        launch(*args, **options)

    monkeypatch.setitem(IMPLS["gemm"], "triton", counted)
    with use("triton"):
        yield calls


def draw(offset=0, dtype=torch.bfloat16, K=1160):
    """Operands of one row, of enough columns."""
    x = torch.randn(K + offset, device=CUDA).to(dtype)[offset:].view(1, K)
    N = 8 * num_programs(x)
    return x, torch.randn(N, K, device=CUDA).to(dtype).mT, torch.randn(N, device=CUDA).to(dtype)


def right(got, x, w, bias=None, activation=None):
    want = x.double() @ w.double() + (0 if bias is None else bias.double())
    want = torch.nn.functional.silu(want) if activation else want
    assert ((got.double() - want).norm() / want.norm()).item() < 3e-3


@pytest.mark.gpu
def test_products_of_many_tensors(asked):
    kept = []
    for call in range(8):
        x, w, bias = draw()
        kept += x, w, bias
        right(gemm(x, w, bias, activation="silu"), x, w, bias, "silu")
        right(gemm(x, w), x, w)
        assert len(asked) == min(2 * call + 2, 4)


@pytest.mark.gpu
def test_other_alignment_scalars_and_tiles(asked):
    for _ in range(3):
        for offset in (0, 1):
            x, w, bias = draw(offset)
            right(gemm(x, w, bias), x, w, bias)
            right(gemm(x, w, bias, alpha=2.0), 2 * x, w, bias)
    before = len(asked)
    assert before == 8
    with tuning.choose(lambda key: Config(1, 2, 1024, num_warps=4, num_stages=1)):
        right(gemm(x, w, bias), x, w, bias)
    assert len(asked) == before + 1


@pytest.mark.gpu
def test_where_there_are_gradients_streams_and_graphs(asked):
    for _ in range(5):
        x, w, bias = draw()
        x.requires_grad_()
        out = gemm(x, w, bias, activation="silu")
        right(out, x, w, bias, "silu")
        (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        plain = torch.nn.functional.silu(torch.addmm(bias, x, w))
        (want,) = torch.autograd.grad(plain, x, torch.ones_like(plain))
        assert ((grad - want).norm() / want.norm()).item() < 2e-2
    before = len(asked)
    x = x.detach()
    with torch.inference_mode(), torch.autocast("cuda", torch.float16):
        for _ in range(3):
            right(gemm(x, w, bias), x, w, bias)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        right(gemm(x, w, bias), x, w, bias)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemm(x, w, bias)
    x.copy_(draw()[0])
    graph.replay()
    right(out, x, w, bias)
    assert len(asked) == before + 2


@pytest.mark.gpu
def test_a_registered_kernel_that_does_more(asked):
    launch = IMPLS["gemm"]["triton"]

    @functools.wraps(launch)
    def doubled(outs, *inputs, **options):
        launch(outs, *inputs, **options)
        outs[0].mul_(2)

    for wanted, impl in ((1, launch), (2, doubled), (1, launch)):
        register_kernel(op="gemm", backend="triton")(impl)
        for _ in range(5):
            x, w, _ = draw()
            right(gemm(x, w), wanted * x, w)
            right(tuned_gemm_op(x, w.mT, None, None, None, "triton"), wanted * x, w)


def test_only_a_gpus_launches_are_noted(monkeypatch):
    monkeypatch.setattr(op.Launcher, "__call__", lambda *_: pytest.fail("a launcher of the CPU's"))
    x, w = torch.randn(3, 8), torch.randn(8, 5)
    for _ in range(3):
        gemm(x, w)
