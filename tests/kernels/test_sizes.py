"""Every op where H, I, N or K is 0 or 1, forward and backward, on every backend that can run here.

Where there is nothing to sum over, results and gradients are exact zeros; the tests' outputs begin as NaN.
"""

import functools

import pytest
import torch
from torch.nn.functional import linear

from conftest import GPU
from moe_aiter.config import interpret
from moe_aiter.kernels.dense.gemm import gemm
from moe_aiter.kernels.dense.tuned_gemm import tuned_gemm
from moe_aiter.kernels.experts.adapted import adapted_down, adapted_up, add_low_rank
from moe_aiter.kernels.experts.glu import glu
from moe_aiter.kernels.experts.mlp import expert_mlp
from moe_aiter.kernels.grouped.gmm import gmm_op, gmm_unpermute_op
from moe_aiter.kernels.grouped.grouped_gemm import grouped_gemm
from moe_aiter.kernels.grouped.masked_gmm import masked_gmm
from moe_aiter.kernels.grouped.scaled_gemm import scaled_gemm, scaled_gmm
from moe_aiter.kernels.grouped.segment_gmm import segment_gmm_op
from moe_aiter.kernels.grouped.tgmm import tgmm, tgmm_into_op, tgmm_sums_op
from moe_aiter.kernels.quantize.rows import quantize_by_amax_op, quantize_rows, quantize_rows_and_amax_op
from moe_aiter.kernels.rows.permute import permute, row_dots, unpermute
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.kernels.rows.sums import group_sum, weigh_rows_op
from moe_aiter.kernels.sparse.gemm import sparse_matmul_op
from moe_aiter.kernels.sparse.pattern import SparsePattern
from moe_aiter.op import use

from ..check import assert_as_good_as_torch, with_gradients
from ..references import (
    adapted_down_reference,
    adapted_up_reference,
    glu_reference,
    gmm_reference,
    gmm_unpermute_reference,
    group_sum_reference,
    permute_reference,
    row_dots_reference,
    segment_gmm_reference,
    sparse_matmul_reference,
    tgmm_reference,
    tgmm_sums_reference,
    unpermute_reference,
    weigh_rows_reference,
)
from ..shapes import TINY, in_turn
from .experts.test_experts import fused, layered, loop, make

SIZES = [3, 0, 6]  # rows of a group; two rows more are in none
T, K_CHOICES, E = 6, 2, 3
IDS = torch.tensor([[0, 2], [2, 0], [-1, 2], [0, -1], [2, 0], [2, 0]])  # expert 1 has no rows
FEW = ("0 x 0", "0 x 5", "5 x 0", "1 x 1")
NAMES = FEW if interpret else [*TINY]  # the interpreter is slow
tiny = pytest.mark.parametrize("a, b", [TINY[name] for name in NAMES], ids=NAMES)
FLOOR = 5e-6  # of so few numbers roundings may all go one way, where a sum nearly cancels too
EXPERTS = {"test_experts", "test_experts_in_turn", "test_frozen_experts"}
HOST = {"test_permute", "test_glu", *EXPERTS}  # whose ops have C++


def pytest_generate_tests(metafunc):
    """On what is chosen, C++ on the CPU for the ops that have it, else torch; and on the others, forced."""
    others = ["torch", "triton"] if GPU or metafunc.function.__name__ in HOST else []
    metafunc.parametrize("backend", ["triton"] if interpret else ["auto", *others], indirect=True)


@pytest.fixture(autouse=True)
def backend(request, device):
    with use(request.param):
        yield


def new(device, *shape):
    return torch.randn(shape).to(device)


def grouped(device, K, N):
    M = sum(SIZES) + 2
    return (
        new(device, M, K),
        new(device, len(SIZES), K, N),
        new(device, M, N),
        torch.tensor(SIZES, device=device),
    )


def plan(device):
    return sort_by_expert(IDS.to(device), E)


def check(fn, reference, *inputs):
    assert_as_good_as_torch(with_gradients(fn), with_gradients(reference), *inputs, floor=FLOOR)


@tiny
def test_gmm(device, a, b):
    x, w, _, sizes = grouped(device, a, b)
    check(gmm_op, gmm_reference, x, w, sizes, new(device, len(SIZES), b))
    check(gmm_op, gmm_reference, x, w.mT.contiguous().mT, sizes, None)


@tiny
def test_tgmm_and_its_sums(device, a, b):
    x, w, y, sizes = grouped(device, a, b)
    exact = lambda t: assert_as_good_as_torch(*t, floor=FLOOR)  # noqa: E731
    exact((lambda x, y: tgmm(x, y, sizes), lambda x, y: tgmm_reference(x, y, sizes, None, 1, False), x, y))
    for columns_first in (False, True):
        inputs = x, y, sizes, columns_first
        exact((tgmm_sums_op, tgmm_sums_reference, *inputs))
    for of_y in (False, True):
        for accumulate in (False, True):
            out, sums = w.clone(), new(device, len(SIZES), b if of_y else a).fill_(float("nan"))
            tgmm_into_op(out, x, y, sizes, None, 1, accumulate, sums, of_y)
            want = tgmm_reference(x, y, sizes, None, 1, False) + (w if accumulate else 0)
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
            summed = group_sum_reference(y if of_y else x, sizes, None, 1, None)
            torch.testing.assert_close(sums, summed, rtol=1e-5, atol=1e-5)
    exact((group_sum, group_sum_reference, y, sizes, None, 1, None))


@tiny
def test_segment_gmm(device, a, b):
    x, w, _, sizes = grouped(device, a, b)
    check(segment_gmm_op, segment_gmm_reference, x, w, sizes, None, None)
    bounds = torch.tensor([1, 4, 4, 9], device=device)
    numbers = torch.tensor([2, -1, 2], device=device)
    check(segment_gmm_op, segment_gmm_reference, x, w, None, bounds, numbers)


@tiny
def test_add_low_rank(device, a, b):
    x, w, y, sizes = grouped(device, a, b)
    want = y + gmm_reference(x, w, sizes, None)
    add_low_rank(y, x, w, sizes)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("H", [0, 1, 5])
def test_permute(device, H):
    order, rank, _ = plan(device)
    x, rows, s = new(device, T, H), new(device, T * K_CHOICES, H), new(device, T, K_CHOICES)
    rows = rows.masked_fill((order < 0)[:, None], 0)
    for weights in (None, s):
        check(permute, permute_reference, x, order, rank, weights)
        check(unpermute, unpermute_reference, rows, order, rank, weights)
    check(row_dots, row_dots_reference, rows, x, order, rank)


@pytest.mark.parametrize("H", [0, 1, 5])
def test_weigh_rows(device, H):
    order, rank, _ = plan(device)
    rows = (new(device, T * K_CHOICES, H).masked_fill((order < 0)[:, None], 0) for _ in range(2))
    inputs = *rows, new(device, T, K_CHOICES), order, rank
    assert_as_good_as_torch(weigh_rows_op, weigh_rows_reference, *inputs, floor=FLOOR)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows, width", [(0, 5), (1, 0), (1, 1), (7, 0), (7, 1)])
@pytest.mark.pairwise
def test_glu(device, rows, width, interleaved):
    check(glu, glu_reference, new(device, rows, 2 * width), "swiglu", interleaved)


@pytest.mark.parametrize("M", [0, 1])
@tiny
@pytest.mark.pairwise
def test_gemm(device, M, a, b):
    def plain(x, w, bias, c):
        return torch.nn.functional.silu(x @ w + bias + 0.5 * c)

    def ours(x, w, bias, c):
        return gemm(x, w, bias, activation="silu", beta=0.5, c=c)

    x, w, bias, c = new(device, M, a), new(device, a, b), new(device, b), new(device, M, b)
    check(ours, plain, x, w, bias, c)
    check(gemm, torch.matmul, x, w)
    check(gemm, torch.matmul, new(device, 2, M, a), new(device, 2, b, a).mT)


@pytest.mark.parametrize("activation, parts", [("swiglu", 2), ("relu2", 1)])
@tiny
@pytest.mark.pairwise
def test_experts(device, a, b, activation, parts):
    """H and I, with the biases, through both autograd nodes."""
    x, s = new(device, T, a), torch.rand(T, K_CHOICES, device=device)
    weights = new(device, E, parts * b, a), new(device, E, a, b)
    biases = new(device, E, parts * b), new(device, E, a)
    for way in (layered,) if interpret else (fused, layered):  # the interpreter is slow, and runs these alike
        for given in (biases,) if interpret else ((), biases):
            options = IDS.to(device), activation, False
            check(
                lambda *inputs, way=way, options=options: way(*options, *inputs),
                lambda *inputs, options=options: loop(*options, *inputs),
                x, *weights, s, *given,
            )  # fmt: skip


@pytest.mark.parametrize("a, b", [(0, 5), (5, 0), (1, 1), (0, 0)], ids=str)
def test_frozen_experts(device, a, b):
    """Gradients of the tokens and of the routing weights alone."""
    x, s = new(device, T, a).requires_grad_(), torch.rand(T, K_CHOICES, device=device).requires_grad_()
    gate_up, down = new(device, E, 2 * b, a), new(device, E, a, b)
    out = expert_mlp(x, gate_up, down, s, plan(device))
    out.sum().backward()
    if not a or not b:
        assert not out.any() and not x.grad.any() and not s.grad.any()
    assert x.grad.isfinite().all() and s.grad.isfinite().all()


@pytest.mark.parametrize("recompute", ["none", "z"])
@pytest.mark.parametrize("size", [*in_turn(T=T, H=5, I=4), dict(E=1), dict(k=1)], ids=str)
def test_experts_in_turn(device, size, recompute):
    """Without z they are `expert_both`, or on a CPU the loop that makes z again."""
    inputs = make(device, **dict(T=T, H=5, I=4, E=E, k=K_CHOICES) | size)
    ids = IDS[: len(inputs[0]), : inputs[3].shape[1]].clamp(max=len(inputs[1]) - 1).to(device)
    for way in (layered,) if interpret else (fused, layered):
        ours = functools.partial(way, ids, "swiglu", False, recompute=recompute)
        check(ours, functools.partial(loop, ids, "swiglu", False), *inputs)


@pytest.mark.parametrize("rank", [0, 1])
@tiny
@pytest.mark.pairwise
def test_adapted(device, a, b, rank):
    order, rank_of, sizes = plan(device)
    w, bias = new(device, E, b, a), new(device, E, b)
    rows, tokens = T * K_CHOICES, new(device, T, a)
    low, up = new(device, rows, rank), new(device, E, b, rank)
    inputs = tokens, w, bias, low, up, order, rank_of, sizes
    n = int(sizes.sum())  # rows of no expert are not written
    ops = (lambda *i, fn=fn: fn(*i)[:n] for fn in (adapted_up, adapted_up_reference))
    assert_as_good_as_torch(*ops, *inputs, floor=FLOOR)
    s = torch.rand(T, K_CHOICES, device=device)
    inputs = new(device, rows, a), w, bias, low, up, s, order, rank_of, sizes
    assert_as_good_as_torch(adapted_down, adapted_down_reference, *inputs, floor=FLOOR)


@tiny
def test_products_that_are_summed_by_token(device, a, b):
    order, rank, sizes = plan(device)
    x, w, bias = new(device, T * K_CHOICES, a), new(device, E, a, b), new(device, E, b)
    s = torch.rand(T, K_CHOICES, device=device)
    for inputs in ((x, w, sizes, None, order, rank, None, 2**20), (x, w, sizes, bias, order, rank, s, 2**20)):
        assert_as_good_as_torch(gmm_unpermute_op, gmm_unpermute_reference, *inputs, floor=FLOOR)

    def by_choice(x, w, s):
        rows = [[x[t] @ w[e] * s[t, j] if e >= 0 else 0 * x[t] @ w[0] for j, e in enumerate(ids)]
                for t, ids in enumerate(IDS.tolist())]  # fmt: skip
        return torch.stack([torch.stack(choices).sum(0) for choices in rows])

    def ours(x, w, s):
        return grouped_gemm(x, w, IDS.to(device), routing_weights=s, reduce="sum")

    check(ours, by_choice, new(device, T, a), w, s)


@tiny
def test_masked_gmm(device, a, b):
    x, w, sizes = (
        new(device, 3, 7, a).half(),
        new(device, 3, b, a).half(),
        torch.tensor([7, 0, 3], device=device),
    )
    scales = torch.rand(3, 7, device=device) + 0.5, torch.rand(3, b, device=device) + 0.5
    for given in ((), scales):
        out = torch.full((3, 7, b), 7.0, device=device).half()
        masked_gmm(out, x, w, sizes, *given)
        want = x.double() @ w.double().mT
        want = want * scales[0].double()[:, :, None] * scales[1].double()[:, None] if given else want
        for g, n in enumerate(sizes.tolist()):
            torch.testing.assert_close(out[g, :n].double(), want[g, :n], rtol=2e-3, atol=2e-3)
            assert (out[g, n:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@tiny
@pytest.mark.pairwise
def test_scaled_products(device, a, b, dtype):
    x, w = (torch.randint(-4, 5, (n, a)).float().to(device).to(dtype) for n in (9, b))
    scales, bias = (torch.rand(9, device=device), torch.rand(b, device=device)), new(device, b)
    want = (x.double() @ w.double().T) * scales[0].double()[:, None] * scales[1].double() + bias.double()
    got = scaled_gemm(x, w.T, *scales, bias, out_dtype=torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    sizes, w = torch.tensor([5, 0, 2], device=device), torch.stack([w, w, w])
    got = scaled_gmm(
        x, w.mT, sizes, scales[0], scales[1].expand(3, b), bias.expand(3, b), out_dtype=torch.float32
    )
    torch.testing.assert_close(got[:7].double(), want[:7], rtol=1e-5, atol=1e-5)
    assert not got[7:].any()


@pytest.mark.parametrize("format", ["e4m3", "int8"])
@pytest.mark.parametrize("M, K", [(0, 5), (5, 0), (1, 1), (1, 5), (5, 1)])
def test_quantize(device, M, K, format):
    x = new(device, M, K)
    for t in (x, x.T):
        x8, scale = quantize_rows(t, format)
        back = x8.float() * scale[:, None]
        torch.testing.assert_close(back, t, rtol=0.07, atol=0.04)
        assert scale.isfinite().all()
    if format == "e4m3":
        x8, scale, amax = quantize_rows_and_amax_op(x[None], format)
        torch.testing.assert_close(x8[0].float() * scale[0][:, None], x, rtol=0.07, atol=0.04)
        torch.testing.assert_close(amax[0], x.abs().amax(0) if M else torch.zeros_like(amax[0]))
        x8, scale = quantize_by_amax_op(x.T[None], amax, format)
        torch.testing.assert_close(x8[0].float() * scale[0][:, None], x.T, rtol=0.07, atol=0.04)


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 0)], ids=str)
@tiny
@pytest.mark.pairwise
def test_tuned_gemm(device, lead, a, b):
    def scaled(x, w, bias, x_scale, w_scale):
        return tuned_gemm(x, w, bias, x_scale=x_scale, w_scale=w_scale)

    x, w, bias = new(device, *lead, a), new(device, b, a), new(device, b)
    check(tuned_gemm, linear, x, w)
    check(tuned_gemm, linear, x, w, bias)
    scales = torch.rand(*lead, 1, device=device), torch.rand(b, device=device)
    check(scaled, lambda x, w, bias, s, t: linear(x, w) * s * t + bias, x, w, bias, *scales)


@pytest.mark.parametrize("block", [(1, 1), (16, 16)], ids=str)
@pytest.mark.parametrize("M", [0, 1])
@tiny
@pytest.mark.pairwise
def test_sparse_matmul(device, a, b, block, M):
    mask = torch.ones(-(-a // block[0]), -(-b // block[1]), dtype=torch.bool, device=device)
    pattern = SparsePattern.from_mask(mask, block, (a, b))
    values = new(device, pattern.num_blocks, *(block if block != (1, 1) else ()))
    x, bias = new(device, M, b), new(device, a)
    check(sparse_matmul_op, sparse_matmul_reference, x, values, bias, pattern.lists, a, b, False)
