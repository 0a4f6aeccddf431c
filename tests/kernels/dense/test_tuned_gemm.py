"""tuned_gemm: torch's numbers, whoever multiplies; and who does is what the user's files say."""

import logging

import pytest
import torch
import torch.nn.functional as F
from check import assert_as_good_as_torch, with_gradients
from shapes import LAYOUTS, MATRICES, spread, transposed
from tuned import HEAD, rows_for, tuned_files

from moe_aiter.config import interpret
from moe_aiter.kernels.base.shuffle import shuffle_weight
from moe_aiter.kernels.dense.tuned_gemm import (
    LIBRARIES,
    NotSupportedError,
    tuned_gemm,
    tuned_gemm_op,
)
from moe_aiter.op import IMPLS, use
from moe_aiter.tuning.aiter_csv import read_untuned
from moe_aiter.tuning.store import cache_clear

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
SHAPES = {"vector": (), "matrix": (5,), "three axes": (2, 3), "four axes": (2, 1, 3), "no rows": (0,)}
files = pytest.fixture(tuned_files)


@pytest.fixture
def chosen(monkeypatch):
    """The backends of gemm that ran, in order."""
    ran = []

    def watched(name, launch):
        def run(*args, **options):
            ran.append(name)
            return launch(*args, **options)

        run.__dict__ |= vars(launch)
        return run

    for name, launch in IMPLS["gemm"].items():
        monkeypatch.setitem(IMPLS["gemm"], name, watched(name, launch))
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: ran.append("torch") or linear(*args))
    cache_clear()
    return ran


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.no_interpreter
@pytest.mark.pairwise
def test_it_is_torchs_linear(device, dtype, lead, bias):
    x, w = (torch.randn(*size, 24).to(device, dtype) for size in (lead, (16,)))
    b = torch.randn(16).to(device, dtype) if bias else None
    assert_as_good_as_torch(
        with_gradients(tuned_gemm), with_gradients(F.linear), x, w, *([b] if bias else [])
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("K, N", MATRICES.values(), ids=MATRICES)
@pytest.mark.no_interpreter
def test_any_strides_and_sizes(device, layout, K, N):
    x, w = layout(torch.randn(7, K).to(device)), transposed(torch.randn(N, K).to(device))
    assert_as_good_as_torch(with_gradients(tuned_gemm), with_gradients(F.linear), x, w)


def test_an_input_that_no_view_makes_a_matrix(device):
    x, w = torch.randn(4, 3, 8, device=device).transpose(0, 1), torch.randn(6, 8, device=device)
    torch.testing.assert_close(tuned_gemm(x, w, out_dtype=torch.float64), F.linear(x.double(), w.double()))
    torch.testing.assert_close(tuned_gemm(spread(x), spread(w)), F.linear(x, w))


def test_a_scaled_product_of_float64_is_summed_in_float64(device):
    x, w, scale = (torch.randn(*size, device=device) for size in ((5, 64), (16, 64), (5, 1)))
    out = tuned_gemm(x, w, out_dtype=torch.float64, x_scale=scale, w_scale=0.5)
    exact = F.linear(x.double(), w.double()) * scale.double() * 0.5
    torch.testing.assert_close(out, exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_wider_result_is_not_rounded_on_the_way(device, dtype, bias):
    x, w, b = (torch.randn(*size).to(device, dtype) for size in ((5, 64), (16, 64), (16,)))
    b = b if bias else None
    out = tuned_gemm(x, w, b, out_dtype=torch.float32)
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    x.requires_grad_()
    tuned_gemm(x, w, b, out_dtype=torch.float32).sum().backward()
    assert x.grad.dtype == dtype


def test_a_bias_of_another_dtype_is_added_before_the_rounding(device):
    x, w = (torch.randn(*size, device=device).half() for size in ((5, 64), (16, 64)))
    b = torch.randn(16, device=device)
    exact = F.linear(x.double(), w.double(), b.double())
    torch.testing.assert_close(tuned_gemm(x, w, b), exact.half(), rtol=2e-3, atol=1e-3)


def test_nothing_to_sum_over_is_the_bias(device):
    x, w, b = torch.ones(3, 0, device=device), torch.ones(4, 0, device=device), torch.randn(4, device=device)
    assert torch.equal(tuned_gemm(x, w, b), b.expand(3, 4))
    assert torch.equal(tuned_gemm(x, w), torch.zeros(3, 4, device=device))


@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck_and_the_second_derivative(bias):
    x, w, b = (torch.randn(*size).double().requires_grad_() for size in ((3, 5), (4, 5), (4,)))
    inputs = (x, w, b) if bias else (x, w)

    def by_op(x, w, b=None):
        return tuned_gemm_op(x, w, b, torch.float64, None, "torch")

    for fn in (tuned_gemm, by_op):
        assert torch.autograd.gradcheck(fn, inputs)
        assert torch.autograd.gradgradcheck(fn, inputs)


# who multiplies


def test_a_row_decides_and_the_log_says_so(device, files, chosen, caplog):
    files(rows_for(device, "torch", M=5) + rows_for(device, "triton", M=6))
    files.set_to("log_tuned_config", True)
    w = torch.randn(16, 32, device=device)
    has_triton = device.type == "cuda" or interpret
    with caplog.at_level(logging.INFO, "moe_aiter"):
        for M in (5, 6, 40):
            tuned_gemm(torch.randn(M, 32, device=device), w)
    assert chosen[:2] == ["torch", "triton" if has_triton else "torch"]
    messages = [m for m in caplog.messages if m.startswith("M=")]
    assert (
        f"M=5, N=16, K=32, torch.float32 -> torch.float32 on {device}: the row of M=5 says torch"
        in messages[0]
    )
    assert "the row of M=6 says triton" in messages[1] and "M=40" in messages[2] and "no row" in messages[2]


def test_without_being_asked_it_logs_nothing(device, files, caplog):
    files("")
    with caplog.at_level(logging.DEBUG, "moe_aiter"):
        tuned_gemm(torch.randn(5, 32, device=device), torch.randn(16, 32, device=device))
    assert not caplog.messages


@pytest.mark.parametrize("libtype", ["asm", "hipblaslt", "skinny", "flydsl", "opus", "of another planet"])
@pytest.mark.no_interpreter
def test_libraries_that_are_not_here_are_torch_and_one_line_says_so(device, files, chosen, caplog, libtype):
    files(rows_for(device, libtype, M=5) + rows_for(device, libtype, M=6))
    x, w = torch.randn(6, 32, device=device), torch.randn(16, 32, device=device)
    with caplog.at_level(logging.WARNING, "moe_aiter"):
        torch.testing.assert_close(tuned_gemm(x[:5], w), F.linear(x[:5], w))
        tuned_gemm(x, w)
    assert set(chosen) == {"torch"}
    assert caplog.messages == [f"tuned products of {libtype} are computed by torch here"]


def test_every_library_of_aiter_has_an_answer():
    libraries = {"torch", "hipblaslt", "skinny", "asm", "triton", "flydsl", "opus"}
    assert libraries < set(LIBRARIES)
    assert set(LIBRARIES.values()) == {"torch", "triton", "hopper"}


def test_a_choice_is_made_once_for_the_same_sizes(files, monkeypatch):
    files("")
    asked = []
    choose = "moe_aiter.kernels.dense.tuned_gemm.choose_product"
    monkeypatch.setattr(choose, lambda *_: asked.append(1) or "torch")
    w = torch.randn(16, 32)
    for _ in range(3):
        tuned_gemm(torch.randn(5, 32), w)
    tuned_gemm(torch.randn(6, 32), w)
    assert len(asked) == 2


def test_a_forced_backend_passes_over_the_rows(device, files, chosen):
    files(rows_for(device, "triton", M=5))
    x, w = torch.randn(5, 32, device=device), torch.randn(16, 32, device=device)
    with use("torch"):
        tuned_gemm(x, w)
    assert chosen == ["torch"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton", "hopper"])
@pytest.mark.parametrize("bias", [False, True])
def test_every_implementation_on_a_gpu(files, chosen, backend, bias):
    device = torch.device("cuda", 0)
    x, w, b = (torch.randn(*s, device=device).bfloat16() for s in ((300, 512), (256, 512), (256,)))
    files(rows_for(device, backend, 300, 256, 512, dtype="bf16", bias=int(bias)))
    inputs = (x, w, b) if bias else (x, w)

    def ours(*inputs):
        chosen.clear()  # of torch's, which computes what is true
        return tuned_gemm(*inputs)

    assert_as_good_as_torch(with_gradients(ours), with_gradients(F.linear), *inputs)
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9
    assert chosen[0] == (backend if backend != "hopper" or is_hopper else "torch")


def test_a_mistake_in_a_file_reaches_the_caller(files):
    files(HEAD.replace("bias,", "") + "1,2\n")
    with pytest.raises(ValueError, match="there are no columns bias"):
        tuned_gemm(torch.randn(5, 32), torch.randn(16, 32))


def test_sizes_are_recorded_where_that_is_asked_for(files, tmp_path):
    path = tmp_path / "untuned.csv"
    files("")
    files.set_to("tune_gemm", str(path))
    x, w, b = torch.randn(2, 3, 32), torch.randn(16, 32), torch.randn(16)
    for _ in range(2):
        tuned_gemm(x, w, b)
    tuned_gemm(x[0], w, out_dtype=torch.float64, x_scale=2.0)
    found = [tuple(p) for p in read_untuned(path)]
    f32, f64 = torch.float32, torch.float64
    assert found == [(6, 16, 32, True, f32, f32, False, False), (3, 16, 32, False, f32, f64, True, False)]


# compiled


@pytest.mark.parametrize("with_file", [False, True])
def test_compiled_whole_for_any_number_of_rows(device, files, with_file):
    files(rows_for(device, "torch", M=5) if with_file else "")
    w, b = torch.randn(16, 32, device=device, requires_grad=True), torch.randn(16, device=device)
    compiled = torch.compile(tuned_gemm, fullgraph=True, dynamic=True, backend="aot_eager")
    for M in (5, 6, 7):
        x = torch.randn(M, 2, 32, device=device)
        out = compiled(x, w, b)
        torch.testing.assert_close(out, F.linear(x, w, b))
        (dw,) = torch.autograd.grad(out.sum(), w)
        torch.testing.assert_close(dw, torch.autograd.grad(F.linear(x, w, b).sum(), w)[0])


def test_a_compiled_graph_asks_the_files_when_it_runs(device, files, chosen):
    files(rows_for(device, "torch", M=5) + rows_for(device, "triton", M=6))
    compiled = torch.compile(tuned_gemm, fullgraph=True, dynamic=True, backend="aot_eager")
    w = torch.randn(16, 32, device=device)
    for M in (5, 6):
        compiled(torch.randn(M, 32, device=device), w)
    has_triton = device.type == "cuda" or interpret
    assert chosen == ["torch", "triton" if has_triton else "torch"]


def test_a_compiled_graph_notes_and_logs_each_size_once(files, tmp_path, caplog):
    path = tmp_path / "untuned.csv"
    files("")
    files.set_to("tune_gemm", str(path))
    files.set_to("log_tuned_config", True)
    compiled = torch.compile(tuned_gemm, fullgraph=True, dynamic=True, backend="aot_eager")
    w = torch.randn(16, 32)
    with caplog.at_level(logging.INFO, "moe_aiter"):
        for M in (5, 6, 5):
            torch.testing.assert_close(compiled(x := torch.randn(M, 32), w), F.linear(x, w))
    assert [problem.M for problem in read_untuned(path)] == [5, 6]
    assert len([m for m in caplog.messages if m.startswith("M=")]) == 2


def test_autocast_is_that_of_linear(device, files):
    files("")
    x, w = torch.randn(5, 32, device=device), torch.randn(16, 32, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        torch.testing.assert_close(tuned_gemm(x, w), F.linear(x, w))
        shuffled = shuffle_weight(w)
        assert torch.equal(tuned_gemm(x, shuffled, is_shuffled=True), tuned_gemm(x, w))


# mistakes


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x, w: tuned_gemm(x[:, :5], w), ValueError, r"x is \(..., K=5\) but weight is \(N, K=32\)"),
        (lambda x, w: tuned_gemm(x, w[0]), ValueError, r"weight must be \(N, K\)"),
        (lambda x, w: tuned_gemm(x[0, 0], w), ValueError, "x must be"),
        (lambda x, w: tuned_gemm(x, w.half()), TypeError, "x is torch.float32 but weight is torch.float16"),
        (lambda x, w: tuned_gemm(x, w, w[0]), ValueError, r"bias must be floating \(N=16,\)"),
        (lambda x, w: tuned_gemm(x, [1]), TypeError, "weight must be a tensor, not list"),
        (
            lambda x, w: tuned_gemm(x, w, out_dtype=torch.int8),
            TypeError,
            "out_dtype must be a floating dtype",
        ),
        (
            lambda x, w: tuned_gemm(x, w, x_scale=w[0]),
            ValueError,
            r"x_scale must be one number or \(5, 1\).*\(32,\)",
        ),
        (lambda x, w: tuned_gemm(x, w.to("meta")), ValueError, "x is on cpu but weight is on meta"),
        (lambda x, w: tuned_gemm(x, w[:3], is_shuffled=True), ValueError, "N=3 must be a multiple of 16"),
    ],
)
@pytest.mark.no_interpreter
def test_bad_inputs(files, call, error, message):
    files("")
    with pytest.raises(error, match=message):
        call(torch.randn(5, 32), torch.randn(16, 32))


def test_tensors_of_a_class_of_their_own_are_left_to_torch(files):
    files("")

    class Mine(torch.Tensor):
        pass

    x, w = torch.randn(5, 32), torch.randn(16, 32).as_subclass(Mine)
    assert type(tuned_gemm(x, w)) is Mine
    with pytest.raises(NotSupportedError, match="Tensor and Mine is torch's own"):
        tuned_gemm(x, w, x_scale=2.0)


def test_torch_func_runs_torchs_own_product(files):
    files("")
    x, w = torch.randn(5, 8), torch.randn(4, 8)
    dw = torch.func.grad(lambda w: tuned_gemm(x, w).square().sum())(w)
    torch.testing.assert_close(dw, 2 * (x @ w.mT).mT @ x)
    out = torch.func.vmap(lambda x: tuned_gemm(x, w))(torch.randn(3, 5, 8))
    assert out.shape == (3, 5, 4)
    with pytest.raises(NotSupportedError, match=r"not by torch.func"):
        torch.func.grad(lambda w: tuned_gemm(x, w, out_dtype=torch.float64).sum())(w)
