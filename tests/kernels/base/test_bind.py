"""What an op binds once must be what every call with the same metadata would decide."""

import contextlib
import functools
import gc
import time
from types import SimpleNamespace

import pytest
import torch
from samples import SAMPLES, Draw
from torch.multiprocessing.reductions import StorageWeakRef

from moe_aiter import op, tuning
from moe_aiter.kernels.base.gemm_row import GemmInputs
from moe_aiter.kernels.base.launch import BoundKernel, bind_kernel, num_programs
from moe_aiter.kernels.dense import tuned_gemm
from moe_aiter.kernels.dense.gemm import gemm
from moe_aiter.kernels.dense.tuned_gemm import tuned_gemm_op
from moe_aiter.kernels.rows.permute import unpermute_kernel
from moe_aiter.op import IMPLS, invalidate_decisions, register_kernel, use
from moe_aiter.switches import float32_products
from moe_aiter.tuning import Config

launches = pytest.importorskip("moe_aiter.kernels.base.launch")
CUDA = torch.device("cuda", 0)


class OnGPU(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True


class Compiled(SimpleNamespace):
    """A compiled kernel, which like Triton's is equal to itself alone."""

    __hash__ = object.__hash__


@pytest.fixture
def tritons(monkeypatch):
    """The launches through Triton, and those past it."""
    through, past = [], []
    compiled = Compiled(run=lambda *args: past.append(args), function=11, packed_metadata=(4, 1, 0))
    monkeypatch.setattr(launches, "CompiledKernel", Compiled)
    monkeypatch.setattr(launches.JITFunction, "run", lambda *_, **__: through.append(1) or compiled)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(launches, "current_device", lambda: 3)
    monkeypatch.setattr(launches, "current_stream", lambda device: 100 + device)
    return through, past


def bound_kernel():
    kernel = launches.JITFunction(unpermute_kernel.fn)  # in the interpreter the kernel itself is none
    return bind_kernel(kernel, (5,), TOP_K=2, UNROLLED=True, ADD=False, UNIT=1, BLOCK_H=16)


def new(count=2, dtype=torch.float32, offset=0):
    return [torch.empty(8 + offset, dtype=dtype)[offset:].as_subclass(OnGPU) for _ in range(count)]


def test_a_bound_kernel_is_given_addresses(tritons):
    """As Triton's launcher takes them, in the order of its own arguments."""
    through, past = tritons
    launch = bound_kernel()
    for _ in range(3):
        x, out = new()
        launch(x, x, None, out, 8, (8, 1), 2.0)
    assert len(through) == 1 and len(past) == 2
    assert past[1][:9] == (5, 1, 1, 103, 11, (4, 1, 0), None, None, None)
    arguments = x.data_ptr(), x.data_ptr(), None, out.data_ptr(), 8, (8, 1), 2.0
    assert past[1][9:] == (*arguments, 2, True, False, 1, 16)


@pytest.mark.parametrize(
    "change", [dict(dtype=torch.float16), dict(offset=1), dict(width=16), dict(scale=2)], ids=str
)
def test_debug_finds_what_triton_could_compile_in_another_way(tritons, change):
    launch, scale, width = bound_kernel(), change.pop("scale", 2.0), change.pop("width", 8)
    for _ in range(2):
        x, out = new()
        launch(x, x, None, out, 8, (8, 1), 3.0)
    x, out = new(**change)
    with pytest.raises(AssertionError, match="is bound to"):
        launch(x, x, None, out, width, (8, 1), scale)


def test_a_profilers_hook_hears_of_each_launch(tritons, monkeypatch):
    launch, (x, out) = bound_kernel(), new()
    for watched in (False, True, True, False):
        monkeypatch.setattr(launches, "is_watched", lambda watched=watched: watched)
        launch(x, x, None, out, 8, (8, 1), 2.0)
    through, past = tritons
    assert len(through) == 3 and len(past) == 1


@pytest.fixture
def binds(monkeypatch):
    """How often a product is bound, by an implementation of this test."""
    calls = []

    def bind(i):
        calls.append(tuple(i.x.shape))
        return lambda outs, i: torch.add(i.x @ i.w, 0.0, out=outs[0])

    monkeypatch.setitem(IMPLS["gemm"], "torch", op.binds(bind))
    return calls


def test_whatever_changes_a_decision_binds_anew(binds):
    x, w = torch.randn(1, 8), torch.randn(8, 5)

    def call():
        torch.testing.assert_close(gemm(x, w), x @ w)
        return len(binds)

    assert [call() for _ in range(3)] == [1, 1, 1]
    with use("torch"):
        assert [call(), call()] == [2, 2]
    for _ in range(2):  # each block, even of the same function
        with tuning.choose(int):
            before = len(binds)
            assert [call(), call()] == [before + 1, before + 1]
    with float32_products("tf32"):
        assert [call(), call()] == [5, 5]
    invalidate_decisions()
    assert [call(), call()] == [6, 6]
    assert call() == 6


def test_a_list_of_ints_from_torch_s_dispatcher_is_bound_once(monkeypatch):
    calls, gmm = [], torch.ops.moe_aiter.gmm
    bind = lambda i: calls.append(i.tile) or (lambda out, i: out.zero_())  # noqa: E731
    monkeypatch.setitem(IMPLS["gmm"], "torch", op.binds(bind))
    x, w, sizes = torch.randn(3, 8), torch.randn(1, 8, 5), torch.tensor([3], dtype=torch.int32)
    with use("torch"):
        for _ in range(3):
            gmm(x, w, sizes, None, None, [16, 32, 16, 1, 4, 1], 0)
    assert calls == [(16, 32, 16, 1, 4, 1)]


@pytest.mark.parametrize("name", ["gemm", "gmm_into"])
def test_binding_and_launching_meet_the_same_device_and_no_autocast(monkeypatch, name):
    """`bind` asks for the tables and the number formats of the current GPU."""
    seen = []
    launch = lambda out, i: seen.append(torch.is_autocast_enabled("cpu"))  # noqa: E731
    bind = lambda i: launch(None, i) or launch  # noqa: E731
    monkeypatch.setitem(IMPLS[name], "torch", op.binds(bind))
    with use("torch"), torch.autocast("cpu", torch.bfloat16):
        getattr(torch.ops.moe_aiter, name)(*SAMPLES[name](Draw(torch.float32)))
    assert seen == [False, False]


def test_on_another_device_it_is_the_current_one(monkeypatch):
    entered = []
    monkeypatch.setattr(op, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: entered.append(x) or contextlib.nullcontext())
    (x,) = new(1)
    assert op.on_device_of(x, lambda *args: args, 1, 2) == (1, 2) and entered[0] is x


def test_a_row_for_so_many_threads_of_a_cpu_is_looked_up_again(monkeypatch):
    asked, choose, threads = [], tuned_gemm.choose_product, torch.get_num_threads()
    monkeypatch.setattr(tuned_gemm, "choose_product", lambda *given: asked.append(1) or choose(*given))
    x, w = torch.randn(3, 7), torch.randn(5, 7)
    try:
        for count in (threads, threads, threads + 1):
            torch.set_num_threads(count)
            tuned_gemm_op(x, w, None, None, None, "")
    finally:
        torch.set_num_threads(threads)
    assert len(asked) == 2


@pytest.mark.parametrize("name", SAMPLES)
def test_a_bound_launch_holds_no_tensor(name):
    def call():
        inputs = [t.clone() if isinstance(t, torch.Tensor) else t for t in SAMPLES[name](Draw(torch.float32))]
        out = getattr(torch.ops.moe_aiter, name)(*inputs)
        outs = out if isinstance(out, tuple) else [out]
        return [StorageWeakRef(t.untyped_storage()) for t in (*inputs, *outs) if isinstance(t, torch.Tensor)]

    for _ in range(2):
        gc.freeze()  # a collection then walks only what the call makes
        memory = call()
        gc.collect()
        gc.unfreeze()
        for _ in range(200):  # gloo's own thread lets go of a collective's tensors after the call
            if all(m.expired() for m in memory):
                break
            time.sleep(0.01)
        assert all(m.expired() for m in memory)


def test_the_interpreter_s_kernels_are_bound_as_they_are():
    kernel = {(7,): lambda *args, **constants: (args, constants)}
    assert bind_kernel(kernel, (7,), BLOCK=16)(1, 2) == ((1, 2), {"BLOCK": 16})
    assert BoundKernel is not type(bind_kernel(kernel, (7,)))


# on a GPU


@pytest.fixture
def asked(monkeypatch):
    """How often a product is bound."""
    calls, bind = [], IMPLS["gemm"]["triton"]

    @functools.wraps(bind)  # and what it takes and fits
    def counted(*args, **options):
        calls.append(1)
        return bind(*args, **options)

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
    for _ in range(8):
        x, w, bias = draw()
        kept += x, w, bias
        right(gemm(x, w, bias, activation="silu"), x, w, bias, "silu")
        right(gemm(x, w), x, w)
        assert len(asked) == 2


@pytest.mark.gpu
def test_other_alignment_scalars_and_tiles(asked):
    for _ in range(3):
        for offset in (0, 1):
            x, w, bias = draw(offset)
            right(gemm(x, w, bias), x, w, bias)
            right(gemm(x, w, bias, alpha=2.0), 2 * x, w, bias)
    before = len(asked)
    assert before == 4
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
    with torch.inference_mode(), torch.autocast("cuda", x.dtype):
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
    assert len(asked) == before + 1  # without the activation; the rest decides nothing anew


@pytest.mark.gpu
def test_a_registered_kernel_that_does_more(asked):
    bind = IMPLS["gemm"]["triton"]

    def doubled(outs, *inputs):
        i = GemmInputs(*inputs)
        bind(i)(outs, i)
        outs[0].mul_(2)

    for wanted, impl in ((1, bind), (2, doubled), (1, bind)):
        register_kernel(op="gemm", backend="triton")(impl)
        for _ in range(5):
            x, w, _ = draw()
            right(gemm(x, w), wanted * x, w)
            right(tuned_gemm_op(x, w.mT, None, None, None, "triton"), wanted * x, w)
