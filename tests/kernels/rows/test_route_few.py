"""Routing and sorting in one launch: what `route`, `topk` and `sort_by_expert` give, but for rounding."""

import pytest
import torch

from moe_aiter.config import interpret
from moe_aiter.invariance import invariant
from moe_aiter.kernels.base.fixed_rows import each_number
from moe_aiter.kernels.rows.route import choose_experts
from moe_aiter.kernels.rows.route_few import (
    AT_ONCE,
    MOST_TOKENS,
    RouteFewInputs,
    bind_few_logits,
    fits_program,
    route_few_op,
    takes_few,
)
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.kernels.rows.topk import topk
from moe_aiter.op import register_kernel, use
from moe_aiter.routing.router import LogitsInputs

pytestmark = pytest.mark.no_host
SHAPES = {  # T, E, k
    "one token": (1, 128, 8),
    "odd": (3, 60, 5),
    "most tokens": (MOST_TOKENS, 40, 4),
    "one expert": (2, 1, 1),
    "all experts": (5, 7, 7),
    "many experts": (2, 520, 16),
}
MODES = [(False, False), (False, True), (True, False), (True, True)]  # sigmoid, renormalize


def draw(*shape, device="cpu"):
    """Numbers of which many are equal."""
    return torch.randn(*shape).mul(3).round().div(2).to(device)


def composed(i):
    """What the ops give that one launch takes the place of."""
    ids = None
    if i.selection_bias is not None:
        ids = topk(each_number(torch.sigmoid, i.logits) + i.selection_bias, i.top_k)[1]
    how = {"sigmoid": i.sigmoid, "renormalize": i.renormalize, "scale": i.scale}
    _, weights, ids = choose_experts(i.logits, i.top_k, **how, fixed_ids=ids)
    return weights, ids, *sort_by_expert(ids, i.logits.shape[1])


def assert_equal(i):
    for n, (got, want) in enumerate(zip(route_few_op(*i), composed(i), strict=True)):
        assert got.shape == want.shape and got.dtype == want.dtype
        # a sum of weights has another order on a GPU; what is equal stays equal, so the numbers are exact
        torch.testing.assert_close(got, want, rtol=0 if n else 2e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values(backend, device, shape, mode):
    T, E, k = shape
    i = RouteFewInputs(draw(T, E, device=device), None, k, *mode, 1.5)
    assert backend == "torch" or fits_program(i)
    assert_equal(i)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "E, k", [(8, 8), (16, 6), (64, 8), (128, 8), (60, 5), (256, 16), (512, 10), (1024, 32)]
)
def test_the_bits_of_many_tokens(E, k, mode):
    """With batch invariance, weights are those of `route`, however many tokens there are."""
    logits = torch.randn(1000, E, device="cuda")
    how = {"sigmoid": mode[0], "renormalize": mode[1], "scale": 1.5}
    with invariant():
        _, want, ids = choose_experts(logits, k, **how)
        for tokens in ([7], [3, 999], [5, 1, 900], list(range(40, 40 + MOST_TOKENS))):
            i = RouteFewInputs(logits[tokens], None, k, *mode, 1.5)
            if fits_program(i):
                got = route_few_op(*i)
                assert torch.equal(got[1], ids[tokens]) and torch.equal(got[0], want[tokens]), tokens
            assert torch.equal(choose_experts(logits[tokens], k, **how)[1], want[tokens])


def test_pairs_are_added_up_in_one_order(backend, device):
    """With batch invariance: the same values."""
    with invariant():
        for mode in MODES:
            assert_equal(RouteFewInputs(draw(3, 60, device=device), None, 5, *mode, 1.5))


@pytest.mark.parametrize("renormalize", [False, True])
def test_selection_bias(backend, device, renormalize):
    """The bias chooses, and is in no weight."""
    logits, bias = draw(4, 24, device=device), draw(24, device=device) / 8
    assert_equal(RouteFewInputs(logits, bias, 3, True, renormalize, 2.5))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_no_finite_logits(backend, device, mode):
    logits = draw(5, 12, device=device)
    logits[0, 3], logits[1], logits[2, :11], logits[3, 5] = torch.nan, torch.nan, -torch.inf, torch.inf
    i = RouteFewInputs(logits, None, 4, *mode, 1.0)
    ids = route_few_op(*i)[1]
    assert all(len(set(row)) == 4 and set(row) <= set(range(12)) for row in ids.tolist())
    assert_equal(i)


def test_strides(backend, device):
    wide = draw(6, 32, device=device)
    assert_equal(RouteFewInputs(wide[::2, 1::2], None, 4, False, True, 1.0))
    assert_equal(RouteFewInputs(wide.T[:, :6].contiguous().T, wide[0, ::1], 4, True, True, 1.0))


def test_a_bias_is_for_sigmoids():
    with pytest.raises(ValueError, match="selection_bias is for sigmoids"):
        route_few_op(torch.zeros(2, 4), torch.zeros(4), 1, False, False, 1.0)
    with pytest.raises(ValueError, match="selection_bias"):
        route_few_op(torch.zeros(2, 4), torch.zeros(5), 1, True, False, 1.0)


def test_another_kernel_is_left_its_work(device, monkeypatch):
    """The layer asks `takes_few`, which sees that someone has registered a kernel of `topk`."""
    from moe_aiter.op import IMPLS

    i = RouteFewInputs(draw(2, 16, device=device), None, 2, False, True, 1.0)
    assert takes_few(i) == (device.type == "cuda" or interpret)
    assert not takes_few(i._replace(logits=draw(MOST_TOKENS + 1, 16, device=device)))
    with use("host"):  # which has no such kernel, and must find its own
        assert not takes_few(i)
    if device.type == "cuda" or interpret:
        with use("triton"):
            assert takes_few(i) and not takes_few(i._replace(logits=draw(8, 2048, device=device)))
    monkeypatch.setitem(IMPLS, "topk", dict(IMPLS["topk"]))
    register_kernel(op="topk", backend="triton")(lambda out, scores, k: None)
    assert not takes_few(i)


LOGITS = {"one token": (1, 6, 40), "odd": (3, 5, 33), "long": (2, 3, AT_ONCE + 24)}  # T, E, H


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LOGITS.values(), ids=LOGITS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_logits(device, shape, dtype, bias):
    if device.type == "cpu" and not interpret:
        pytest.skip("a kernel for GPUs")
    T, E, H = shape
    x, w = torch.randn(T, H, device=device).to(dtype), torch.randn(E, H + 8, device=device).to(dtype)[:, :H]
    i = LogitsInputs(x, w, torch.randn(E, device=device).to(dtype) if bias else None)
    out = torch.full((T, E), torch.nan, device=device)
    bind_few_logits(i)(out, i)
    want = x.double() @ w.double().T + (0 if i.bias is None else i.bias.double())
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5 * H**0.5)
