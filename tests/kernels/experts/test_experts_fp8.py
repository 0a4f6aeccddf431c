"""8-bit experts against their definition, row by row in float64; the Hopper kernels against the same."""

import functools
import re

import pytest
import torch
from torch import Tensor

from moe_aiter import MoE
from moe_aiter.kernels.base.activations import get_activation
from moe_aiter.kernels.experts.fp8 import (
    ALL,
    BLOCK,
    RECIPES,
    QuantizedTokens,
    UpFp8Inputs,
    gmm_unpermute_fp8_op,
    quantize_tokens,
    quantized_dout,
)
from moe_aiter.kernels.experts.mlp import expert_mlp, mix_experts
from moe_aiter.kernels.experts.options import ExpertOptions, ExpertWeights
from moe_aiter.kernels.grouped.gmm import gmm_fp8_op
from moe_aiter.kernels.hopper import is_hopper
from moe_aiter.kernels.quantize.layouts import quantize_folded, quantize_transposed
from moe_aiter.kernels.quantize.rows import dequantize_rows, quantize_rows
from moe_aiter.kernels.quantize.scale_blocks import dequantize, quantize_blocks
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import IMPLS, pick, use

from ...check import error
from ...shapes import CAPPED, expert_ids, transposed
from .test_experts import make

every_recipe = pytest.mark.parametrize("fp8", RECIPES)
NAMES = ("out", "x", "gate_up", "down", "routing_weights", "gate_up_bias", "down_bias")
CUDA = torch.device("cuda", 0)


def rounded(x: Tensor, format: str = "e4m3") -> Tensor:
    return dequantize_rows(*quantize_rows(x, format), torch.float64)


def in_blocks(x: Tensor, square: bool = False) -> Tensor:
    return dequantize(*quantize_blocks(x, square), torch.float64)


def outer(x: Tensor, y: Tensor, fp8: str, x_format: str, y_format: str) -> Tensor:
    """The sum of the rows' outer products, an expert's (n, K) and (n, N); what has to be summed over is not
    scaled by rows, so y takes the scales of x over, and 128 rows have a scale for each column."""
    if not fp8.endswith(ALL):
        return x.T @ y
    x8, scale = quantize_rows(x, x_format)
    y = y * scale[:, None]
    parts = zip(x8.double().split(128), y.split(128), strict=True)
    return sum((a.T @ rounded(b.T, y_format).T for a, b in parts), x.new_zeros(x.shape[1], y.shape[1]))


def definition(ids, activation, interleaved, fp8, dout, x, gate_up, down, weights, *biases) -> list[Tensor]:
    """The output, and the gradients of all seven inputs, one row at a time."""
    act = get_activation(activation)
    inputs = x, gate_up, down, weights, *biases
    up_bias, down_bias = biases or (gate_up.new_zeros(gate_up.shape[:2]), down.new_zeros(down.shape[:2]))
    out, grads = (
        torch.zeros_like(x),
        [torch.zeros_like(t) for t in (x, gate_up, down, weights, up_bias, down_bias)],
    )
    dx, dgate_up, ddown, ds, dup_bias, ddown_bias = grads
    format, rows = fp8.removesuffix(ALL), [[] for _ in down]  # of each expert, in order
    if fp8 == BLOCK:
        tokens, gradients = in_blocks, in_blocks
        up, down8 = in_blocks(gate_up, True), in_blocks(down, True)
        down_by_columns, up8, up_scale = down8.mT, up, up.new_ones(up.shape[:2])
    else:
        tokens, gradients = rounded, functools.partial(rounded, format=format)
        up, down8, down_by_columns = rounded(gate_up), rounded(down), rounded(down.mT)  # (E, I, H)
        up8, up_scale = (t.double() for t in quantize_rows(gate_up))  # dz takes the scales over
    for t, j in [(t, j) for t in range(len(x)) for j in range(ids.shape[1]) if ids[t, j] >= 0]:
        e, s = ids[t, j], weights[t, j]
        z = (up[e] @ tokens(x[t : t + 1])[0] + up_bias[e]).requires_grad_()
        with torch.enable_grad():
            a = act(z, interleaved)
        out[t] += s * (down8[e] @ tokens(a[None].detach())[0] + down_bias[e])
        u = down_by_columns[e] @ gradients(dout[t : t + 1])[0]
        ds[t, j] = u @ a.detach() + dout[t] @ down_bias[e]
        (dz,) = torch.autograd.grad(a, z, s * u)
        dx[t] += up8[e].T @ gradients((dz * up_scale[e])[None])[0]
        rows[e].append((x[t], dz, dout[t], s * a.detach()))
        dup_bias[e] += dz
        ddown_bias[e] += s * dout[t]
    for e, of_expert in enumerate(rows):
        if of_expert:
            x_rows, dz_rows, dout_rows, a_rows = map(torch.stack, zip(*of_expert, strict=True))
            dgate_up[e] = outer(x_rows, dz_rows, fp8, "e4m3", format).T
            ddown[e] = outer(dout_rows, a_rows, fp8, format, "e4m3")
    return [out, *grads][: 1 + len(inputs)]


def run(ids, activation, interleaved, fp8, dout, *inputs, **how) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    x, gate_up, down, weights, *biases = leaves
    how |= dict(zip(("gate_up_bias", "down_bias"), biases, strict=False))
    plan = sort_by_expert(ids, len(down))
    out = expert_mlp(
        x, gate_up, down, weights, plan, activation=activation, interleaved=interleaved, fp8=fp8, **how
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def compare(got, exact, most):
    for name, a, b in zip(NAMES, got, exact, strict=False):
        assert a.isfinite().all() and error(a, b) <= most, f"{name}: {error(a, b):.2e}"


CASES = {
    "swiglu": {},
    "interleaved": {"activation": "swiglu_oai", "interleaved": True},
    "soft caps": {"activation": CAPPED},
    "plain": {"activation": "relu2"},
    "no bias": {"bias": False},
    "one expert": {"E": 1, "k": 1},
    "one token": {"T": 1},
    "two chunks of an expert": {"T": 150, "E": 1, "k": 1},
    "empty experts": {"T": 3, "E": 9},
    "dropped choices": {"drop": True},
    "blocks and a part": {"H": 200, "I": 136},
}


def case(name, dtype, device="cpu", **sizes):
    how = {"T": 13, "E": 5, "k": 2, **CASES[name], **sizes}
    act, interleaved, drop = (
        how.get("activation", "swiglu"),
        how.pop("interleaved", False),
        how.pop("drop", 0),
    )
    ids = expert_ids(how["T"], how["E"], how["k"])
    if drop:
        ids[::3, 0] = -1
    inputs = make(device, dtype=dtype, **how)
    dout = torch.randn(inputs[0].shape).to(device, dtype)
    return ids.to(device), act, interleaved, dout, inputs


@pytest.mark.no_interpreter
@every_recipe
@pytest.mark.parametrize("name", CASES)
def test_definition(name, fp8):
    """In float64 nothing else is rounded; the scales are float32."""
    ids, act, interleaved, dout, inputs = case(name, torch.float64)
    got = run(ids, act, interleaved, fp8, dout, *inputs)
    compare(got, definition(ids, act, interleaved, fp8, dout, *inputs), 1e-9)


@pytest.mark.no_interpreter
@every_recipe
def test_not_far_from_no_quantisation(fp8):
    ids, act, interleaved, dout, inputs = case("swiglu", torch.float32, T=64, H=64, I=48)
    got = run(ids, act, interleaved, fp8, dout, *inputs)
    exact = run(ids, act, interleaved, None, dout, *inputs)
    assert error(got[0], exact[0]) > 1e-3  # it did quantise
    compare(got, exact, 0.15)


@pytest.mark.no_interpreter
@pytest.mark.parametrize("powers", [0, 8, 16], ids="rows within 2**{}".format)
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_rows_of_gate_up_of_many_sizes(fp8, powers):
    """The gradient of x, where dz takes the scales of gate_up's rows over, is as near to the truth as where
    gate_up is quantised once more, by columns."""
    torch.manual_seed(0)
    R, width, H = 256, 512, 64
    sizes = 2.0 ** -(torch.rand(width, 1) * powers)
    gate_up = (torch.randn(1, width, H) * sizes).double()
    w8, scale = quantize_rows(gate_up)
    for name, dz in {
        "alike": torch.randn(R, width),
        "larger where rows are smaller": torch.randn(R, width) / sizes.T,
        "smaller where rows are smaller": torch.randn(R, width) * sizes.T,
    }.items():
        dz = dz.double()
        exact = dz @ gate_up[0]
        folded = rounded(dz * scale[0], fp8) @ w8[0].double()
        by_columns = rounded(dz, fp8) @ rounded(gate_up[0].T).T
        assert error(folded, exact) <= 1.1 * error(by_columns, exact), name
        plan = torch.arange(R), torch.arange(R)[:, None], torch.tensor([R])
        dz8 = quantize_folded(dz, scale, plan[2], fp8)
        columns8, routing = quantize_transposed(gate_up, scale), (None, *plan[:2], None)
        got = gmm_unpermute_fp8_op(*dz8, columns8, scale, plan[2], *routing, 2**30, True, dz.dtype)
        assert error(got, folded) < 1e-9, name


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2_all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_of_zeros(device, dtype, fp8):
    """Of gate_up: their scale is next to 0, and of that nothing is seen."""
    ids, act, interleaved, dout, (x, gate_up, *rest) = case("no bias", dtype, device)
    inputs = [x, gate_up * 0.1, *rest]
    inputs[1][:, ::3] = 0
    inputs[1][2] = 0
    got = run(ids, act, interleaved, fp8, dout, *inputs)
    compare(got, run(ids, act, interleaved, None, dout.float(), *(t.float() for t in inputs)), 0.15)


@every_recipe
@pytest.mark.parametrize("how", [{"recompute": "z"}, {"row_chunks": 3}], ids=str)
def test_memory_changes_nothing(device, how, fp8):
    ids, act, interleaved, dout, inputs = case("swiglu", torch.float32, device)
    plain = run(ids, act, interleaved, fp8, dout, *inputs)
    for name, a, b in zip(NAMES, plain, run(ids, act, interleaved, fp8, dout, *inputs, **how), strict=True):
        assert torch.equal(a, b), name


def test_any_strides(device):
    ids, act, interleaved, dout, inputs = case("swiglu", torch.float32, device)
    plain = run(ids, act, interleaved, "e4m3", dout, *inputs)
    other = run(ids, act, interleaved, "e4m3", dout, *map(transposed, inputs[:4]), *inputs[4:])
    compare(other, plain, 1e-6)


@pytest.mark.parametrize("fp8", ["e4m3", "e4m3_all"])
def test_main_grads_and_frozen_weights(device, fp8):
    ids, _, _, dout, (x, gate_up, down, weights, *_) = case("no bias", torch.float32, device)
    plan = sort_by_expert(ids, len(down))
    _, dx, dgate_up, _ddown, _ = run(ids, "swiglu", False, fp8, dout, x, gate_up, down, weights)
    x, gate_up = x.requires_grad_(), gate_up.requires_grad_()
    main_grad = torch.ones_like(gate_up)
    out = expert_mlp(x, gate_up, down, weights, plan, fp8=fp8, gate_up_main_grad=main_grad)
    out.backward(dout)
    assert gate_up.grad is None and torch.allclose(x.grad, dx, atol=1e-5)
    assert torch.allclose(main_grad - 1, dgate_up, atol=1e-4)


def test_frozen_tokens(device):
    """Without a gradient of x nobody asks for gate_up once more."""
    ids, act, interleaved, dout, (x, *rest) = case("swiglu", torch.float32, device)
    _, _, *expected = run(ids, act, interleaved, "e4m3", dout, x, *rest)
    leaves = [t.requires_grad_() for t in rest]
    plan = sort_by_expert(ids, len(rest[1]))
    biases = dict(zip(("gate_up_bias", "down_bias"), leaves[3:], strict=True))
    out = expert_mlp(x, *leaves[:3], plan, activation=act, interleaved=interleaved, fp8="e4m3", **biases)
    for name, a, b in zip(NAMES[2:], torch.autograd.grad(out, leaves, dout), expected, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("recompute", ["none", "z"])
def test_no_tokens(device, recompute):
    _, act, interleaved, _, (x, *rest) = case("swiglu", torch.float32, device)
    ids, rest[2] = torch.empty(0, 2, dtype=torch.int64, device=device), rest[2][:0]
    out, *grads = run(ids, act, interleaved, "e4m3", x[:0], x[:0], *rest, recompute=recompute)
    assert out.shape == x[:0].shape and all(not grad.any() for grad in grads)


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2_all", BLOCK])
def test_saved_memory(fp8, device):
    """What is saved without 8 bits, the inputs and z, and a float32 for each row of gate_up and each column
    of down, but not for blocks; where all products are of 8 bits, not x but its rows in 8 bits and their
    scales."""
    ids, _, _, _, inputs = case("no bias", torch.float32, device)
    plan = sort_by_expert(ids, len(inputs[2]))

    def saved(recompute):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            leaves = [t.detach().requires_grad_() for t in inputs]
            expert_mlp(*leaves, plan, fp8=fp8, recompute=recompute)
        return {t.data_ptr(): t.nbytes for t in kept if t.numel()}

    inside = {t.data_ptr() for t in (*inputs, *plan)}
    z = ids.numel() * inputs[1].shape[1] * inputs[0].itemsize
    x8 = inputs[0].numel() + 4 * len(inputs[0]) if fp8.endswith(ALL) else 0
    (E, width, _), I = inputs[1].shape, inputs[2].shape[2]  # noqa: E741
    scales = 0 if fp8 == BLOCK else E * (width + I) * 4
    for recompute, expected in ("none", z + scales + x8), ("z", x8):
        kept = saved(recompute)
        assert sum(n for p, n in kept.items() if p not in inside) == expected
        assert (inputs[0].data_ptr() in kept) == (x8 == 0)


@pytest.mark.no_interpreter
@pytest.mark.parametrize("recompute", ["none", "z"])
@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1)], ids=["none", "x", "gate_up", "both"])
def test_tokens_are_quantised_once(frozen, recompute, monkeypatch):
    """Where all products are of 8 bits; with the gradients that the whole step has, to the bit."""
    ids, _, _, dout, inputs = case("no bias", torch.float32)
    plan, seen = sort_by_expert(ids, len(inputs[2])), []
    _, *expected = run(ids, "swiglu", False, "e4m3_all", dout, *inputs)

    def watched(out, i):
        seen.append(i.x.data_ptr())
        return plainly(out, i)

    plainly = IMPLS["quantize_rows"]["torch"]
    monkeypatch.setitem(IMPLS["quantize_rows"], "torch", watched)
    leaves = [t.detach().requires_grad_(n not in frozen) for n, t in enumerate(inputs)]
    out = expert_mlp(*leaves, plan, fp8="e4m3_all", recompute=recompute)
    wanted = [n for n in range(4) if n not in frozen]
    got = torch.autograd.grad(out, [leaves[n] for n in wanted], dout)
    assert seen.count(leaves[0].data_ptr()) == 1
    for n, grad in zip(wanted, got, strict=True):
        assert torch.equal(grad, expected[n]), NAMES[1 + n]


@pytest.mark.no_interpreter
@every_recipe
@pytest.mark.parametrize("recompute", ["none", "z"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"T": 0}, {"T": 64, "H": 512, "I": 128}], ids=str)
def test_tokens_quantised_elsewhere(device, sizes, dtype, recompute, fp8):
    """In parts, which changes no bit: neither of x, of which hooks return the numbers where backward asks for
    them, nor of dout, where backward needs nothing else of it."""
    how = {"T": 13, "E": 5, "k": 2, "H": 136} | sizes
    x, *inputs = make(device, dtype=dtype, bias=False, **how)
    dout, plan = torch.randn_like(x), sort_by_expert(expert_ids(how["T"], 5, 2).to(device), 5)
    results = []
    for elsewhere in (False, True):
        leaves = [t.detach().requires_grad_() for t in (x, *inputs)]
        given, gradient, dout8 = leaves[0], dout, None
        if elsewhere:
            leaves[0] = x.new_zeros(()).expand(x.shape).requires_grad_()
            given = QuantizedTokens(leaves[0], *in_parts(x, "e4m3", fp8 == BLOCK))
            if fp8.endswith(ALL):
                gradient = x.new_zeros(()).expand(x.shape)
                dout8 = QuantizedTokens(gradient, *in_parts(dout, fp8.removesuffix(ALL), False))
        options = ExpertOptions(fp8=fp8, recompute=recompute)
        unpack = lambda t: x if t.shape == x.shape and t.stride() == (0, 0) else t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out = mix_experts(given, ExpertWeights(*leaves[1:3]), leaves[3], plan, options)
        with quantized_dout.set(dout8):
            results.append([out.detach(), *torch.autograd.grad(out, leaves, gradient)])
        assert out.dtype == dtype
    for name, a, b in zip(NAMES, *results, strict=False):
        assert torch.equal(a, b), name


def in_parts(x: Tensor, format: str, blocks: bool) -> tuple[Tensor, ...]:
    """Quantise the rows of several ranks, each for itself."""
    parts = [quantize_tokens(part.contiguous(), format, blocks) for part in x.tensor_split(3)]
    x8, scale = zip(*parts, strict=True)
    codes = torch.cat([part.view(torch.uint8) for part in x8])
    return codes.view(x8[0].dtype), torch.cat(scale)


def test_a_row_that_is_not_finite(device):
    """It spoils its own token, and no other."""
    ids, _act, _interleaved, _, (x, gate_up, down, weights, *_) = case("no bias", torch.float32, device)
    plan = sort_by_expert(ids, len(down))
    clean = expert_mlp(x, gate_up, down, weights, plan, fp8="e4m3")
    x[3, 2] = float("inf")
    out = expert_mlp(x, gate_up, down, weights, plan, fp8="e4m3")
    assert out[3].isnan().all()
    others = torch.arange(len(x), device=device) != 3
    assert torch.equal(out[others], clean[others])


def test_compiles():
    ids, _, _, dout, (x, gate_up, down, weights, *_) = case("no bias", torch.float32)
    plan = sort_by_expert(ids, len(down))

    def step(x, gate_up):
        return expert_mlp(x, gate_up, down, weights, plan, fp8="e5m2_all")

    leaves = x.requires_grad_(), gate_up.requires_grad_()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for a, b in zip(
        torch.autograd.grad(compiled(*leaves), leaves, dout),
        torch.autograd.grad(step(*leaves), leaves, dout),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_refuses():
    _, _, _, _, (x, gate_up, down, weights, *_) = case("no bias", torch.float32)
    plan = sort_by_expert(expert_ids(13, 5, 2), 5)
    for fp8 in ("e8m0", "_all", ["e4m3"]):
        with pytest.raises(
            ValueError, match=re.escape(f"unknown fp8 {fp8!r}; known: None, {', '.join(RECIPES)}")
        ):
            expert_mlp(x, gate_up, down, weights, plan, fp8=fp8)


# on Hopper

FITS = {  # H, I, and rows of many sizes
    "even": dict(T=512, H=512, I=256, E=8, k=2),
    "tails": dict(T=777, H=256, I=448, E=40, k=4),
    "odd": dict(T=300, H=208, I=192, E=5, k=2),  # of H, a part of a stage
}


@pytest.mark.gpu
@every_recipe
@pytest.mark.parametrize("sizes", FITS.values(), ids=FITS)
@pytest.mark.parametrize("name", [name for name in CASES if "H" not in CASES[name]])  # but sizes that fit
def test_hopper(name, sizes, fp8):
    """No further from the definition than twice its emulation in bfloat16."""
    if not is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    sizes = sizes | {n: v for n, v in CASES[name].items() if n in sizes}
    ids, act, interleaved, dout, inputs = case(name, torch.bfloat16, CUDA, **sizes)
    plan, how = sort_by_expert(ids, sizes["E"]), (act, interleaved, True, torch.bfloat16)
    up = UpFp8Inputs(*quantize_rows(inputs[0]), *quantize_rows(inputs[1]), None, *plan, *how)
    assert pick("expert_up_fp8", up) is IMPLS["expert_up_fp8"]["hopper"]
    got = run(ids, act, interleaved, fp8, dout, *inputs)
    exact = run(ids, act, interleaved, fp8, dout.double(), *(t.double() for t in inputs))
    with use("torch"):
        emulated = run(ids, act, interleaved, fp8, dout, *inputs)
    for label, a, b, truth in zip(NAMES, got, emulated, exact, strict=False):
        floor = 1e-3 if a.numel() > 8 else 1e-2  # the error of one token's two weights is chance
        assert error(a, truth) <= 2 * error(b, truth) + floor, (label, error(a, truth), error(b, truth))


@pytest.mark.parametrize("K, N", [(256, 128), (176, 200), (16, 8), (136, 90), (130, 64)])
@pytest.mark.parametrize("top_k", [0, 3], ids=["rows in place", "gathered rows"])
def test_products_of_frozen_weights(device, top_k, K, N):
    """Of widths that Hopper's kernel takes, and of others."""
    plan = sort_by_expert(expert_ids(41, 5, max(top_k, 1)).to(device), 7)  # two experts have no rows
    x, w, bias = (torch.randn(s).to(device, torch.bfloat16) for s in ((41, K), (7, N, K), (7, N)))
    (x8, x_scale), (w8, w_scale) = quantize_blocks(x, False), quantize_blocks(w, True)
    gathered = (plan[0], top_k) if top_k else (None, 1)
    got = gmm_fp8_op(x8, w8.mT, plan[2], x_scale, w_scale, bias, *gathered, x.dtype)
    exact_x, exact_w = dequantize(x8, x_scale, torch.float64), dequantize(w8, w_scale, torch.float64)
    rows = exact_x[plan[0].long() // top_k] if top_k else exact_x
    expert = torch.arange(7, device=device).repeat_interleave(plan[2].long())
    exact = (exact_w[expert] @ rows[:, :, None])[..., 0] + bias[expert].double()
    assert got.dtype == x.dtype and error(got, exact) < 0.01


LARGE = {"A": (32768, 4096, 1024, 128, 8), "C": (32768, 2048, 768, 128, 8), "D": (16384, 4096, 14336, 8, 2)}


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", LARGE.values(), ids=LARGE)
def test_peak(sizes):
    """Where all products are of 8 bits, a step of these sizes takes no more memory than in bfloat16."""
    if not is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    T, peaks = sizes[0], {}
    for fp8 in (None, "e4m3_all"):
        layer = MoE(*sizes[1:], fp8=fp8, device="cuda", dtype=torch.bfloat16)
        x, dout = torch.randn(2, T, sizes[1], device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            layer.zero_grad()
            x = x.detach().requires_grad_()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            layer(x).backward(dout)
        peaks[fp8] = torch.cuda.max_memory_allocated() - before
    assert peaks["e4m3_all"] <= peaks[None], peaks
