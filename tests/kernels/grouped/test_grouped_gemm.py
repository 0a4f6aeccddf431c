"""grouped_gemm against a loop over tokens and slots."""

import pytest
import torch
import torch.nn.functional as F
from check import assert_as_good_as_torch, with_gradients

from moe_aiter.config import interpret
from moe_aiter.kernels.grouped.grouped_gemm import PermuteSlotsInputs, grouped_gemm
from moe_aiter.kernels.rows.sort import sort_by_expert

T, TOP_K, E, K, N = 13, 3, 5, 12, 20
DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]


def reference(x, w, ids, rw=None, bias=None, reduce=None):
    """(T, N), or (T, k, N) where slots are kept."""
    slots = x if x.dim() == 3 else x[:, None].expand(-1, ids.shape[1], -1)
    s = torch.einsum("tkh,tkhn->tkn", slots, w[ids.clamp(min=0)])
    s = s if bias is None else s + bias[ids.clamp(min=0)]
    s = s if rw is None else s * rw[..., None]
    s = s.masked_fill((ids < 0)[..., None], 0)
    return s.sum(1) if (reduce or ("sum" if x.dim() == 2 else "none")) == "sum" else s


def make(device, dtype=torch.float32):
    """x (T, K), w, ids with duplicates, dropped slots and an expert without tokens, routing weights, bias."""
    ids = torch.randint(-1, E - 1, (T, TOP_K))
    ids[0] = ids[0, 0].clamp(min=0)
    tensors = torch.randn(T, K), torch.randn(E, K, N) / K**0.5, torch.rand(T, TOP_K), torch.randn(E, N)
    x, w, rw, bias = (t.to(device, dtype) for t in tensors)
    return x, w, ids.to(device), rw, bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", [None, "sum", "none"])
@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.pairwise
def test_grouped_gemm(device, axes, reduce, dtype):
    x, w, ids, rw, bias = make(device, dtype)
    x = x if axes == 2 else torch.randn(T, TOP_K, K).to(x)

    def ours(x, w, rw, bias):
        return grouped_gemm(x, w, ids, routing_weights=rw, bias=bias, reduce=reduce)

    def theirs(x, w, rw, bias):
        return reference(x, w, ids, rw, bias, reduce)

    for given in ((rw, bias), (None, None)):
        assert_as_good_as_torch(with_gradients(ours), with_gradients(theirs), x, w, *given, floor=5e-7)


def test_an_expanded_input_is_gathered(device):
    """Each slot has a gradient of its own, in a leaf that is expanded as well; nobody copies slots."""
    x, w, ids, _, _ = make(device)
    leaf = x.unsqueeze(1).expand(-1, TOP_K, -1).detach().requires_grad_()
    out = grouped_gemm(leaf, w, ids)
    assert out.shape == (T, TOP_K, N)
    dout = torch.randn_like(out)
    whole = leaf.detach().contiguous().requires_grad_()
    expected = torch.autograd.grad(reference(whole, w, ids), whole, dout)
    torch.testing.assert_close(torch.autograd.grad(out, leaf, dout), expected, rtol=1e-4, atol=1e-5)
    _, rank, _ = sort_by_expert(ids, E)
    tokens, _, slots, _ = PermuteSlotsInputs(leaf, rank.flatten(), rank).as_tokens()
    assert tokens.data_ptr() == leaf.data_ptr() and tokens.shape == (T, K) and slots is rank


def test_the_layer_of_the_documentation_line_for_line(device):
    x, w1, ids, rw, _ = make(device)
    w2, ids = torch.randn(E, N, K, device=device) / N**0.5, ids.clamp(min=0)
    gelu = F.gelu
    slots = x.unsqueeze(1).expand(-1, TOP_K, -1)
    hidden = grouped_gemm(slots, w1, ids)
    hidden = gelu(hidden)
    output = grouped_gemm(hidden, w2, ids)
    output = output * rw.unsqueeze(-1)
    output = output.sum(dim=1)
    tokens = [
        sum(rw[t, j] * (gelu(x[t] @ w1[e]) @ w2[e]) for j, e in enumerate(ids[t].tolist())) for t in range(T)
    ]
    torch.testing.assert_close(output, torch.stack(tokens), rtol=1e-4, atol=1e-5)
    hidden = gelu(grouped_gemm(x, w1, ids, reduce="none"))
    short = grouped_gemm(hidden, w2, ids, routing_weights=rw, reduce="sum")
    torch.testing.assert_close(short, output, rtol=1e-4, atol=1e-5)


def test_an_expert_without_tokens_and_a_dropped_slot(device):
    x, w, ids, _, _ = make(device)
    x, w = x.requires_grad_(), w.requires_grad_()
    ids[3] = -1
    out = grouped_gemm(x, w, ids)
    out.sum().backward()
    assert not out[3].any() and not x.grad[3].any() and not w.grad[E - 1].any()
    assert w.grad.isfinite().all()


@pytest.mark.parametrize("reduce", ["sum", "none"])
def test_no_tokens(device, reduce):
    x, w, ids, rw, _ = make(device)
    out = grouped_gemm(x[:0], w, ids[:0], routing_weights=rw[:0], reduce=reduce)
    assert out.shape == ((0, N) if reduce == "sum" else (0, TOP_K, N))
    empty = torch.empty(0, TOP_K, K, device=device, requires_grad=True)
    grouped_gemm(empty, w, ids[:0]).sum().backward()
    assert empty.grad.shape == empty.shape


def test_ids_of_one_axis(device):
    x, w, ids, _, _ = make(device)
    both = grouped_gemm(x, w, ids)
    assert torch.equal(grouped_gemm(x, w, ids.flatten(), topk=TOP_K), both)
    assert torch.equal(grouped_gemm(x, w, ids.int(), TOP_K), both)
    assert torch.equal(grouped_gemm(x, w, ids[:, 0]), grouped_gemm(x, w, ids[:, :1]))
    assert grouped_gemm(x, w, ids, out_dtype=torch.float16).dtype == torch.float16


def test_gradcheck():
    x, w, ids, rw, bias = make("cpu", torch.float64)
    slots = torch.randn(T, TOP_K, K, dtype=torch.float64)

    def fn(x, w, rw, bias):
        return grouped_gemm(x, w, ids, routing_weights=rw, bias=bias)

    for given in (x, slots):
        assert torch.autograd.gradcheck(
            fn, [t.requires_grad_() for t in (given, w, rw, bias)], fast_mode=True
        )


def test_compiles(device):
    x, w, ids, rw, _ = make(device)
    compiled = torch.compile(grouped_gemm, fullgraph=True, backend="aot_eager")
    for given in (x, x.unsqueeze(1).expand(-1, TOP_K, -1)):
        expected = grouped_gemm(given, w, ids, routing_weights=rw)
        torch.testing.assert_close(compiled(given, w, ids, routing_weights=rw), expected)


BAD = {
    "topk": (dict(topk=2), ValueError, r"topk is 2 but expert_ids is \(T, k=3\)"),
    "topk of one axis": (dict(topk=4, expert_ids=torch.zeros(39).int()), ValueError, r"must be \(T, k\)"),
    "tokens": (dict(input=torch.zeros(9, K)), ValueError, r"input is \(T=9, K\) but expert_ids is \(T=13"),
    "slots": (dict(input=torch.zeros(T, 2, K)), ValueError, r"input is \(T, k=2, K\) but expert_ids"),
    "inner": (dict(input=torch.zeros(T, 7)), ValueError, r"input is \(T, K=7\) but weights is \(E, K=12"),
    "axes": (dict(input=torch.zeros(T)), ValueError, r"input must be \(T, K\) or \(T, k, K\)"),
    "no experts": (dict(weights=torch.zeros(0, K, N)), ValueError, "weights must be of at least 1 expert"),
    "reduce": (dict(reduce="mean"), ValueError, "reduce must be 'sum', 'none' or None, not 'mean'"),
    "ids": (dict(expert_ids=torch.zeros(T, 3)), TypeError, "expert_ids must be int32 or int64"),
    "weights": (dict(routing_weights=torch.zeros(T, 2)), ValueError, r"must be \(T, k\) = \(13, 3\)"),
    "whole weights": (dict(routing_weights=torch.ones(T, 3).int()), TypeError, "must be floating"),
    "list of weights": (dict(routing_weights=[1.0]), TypeError, "routing_weights must be a tensor, not list"),
    "bias of 8 bits": (
        dict(bias=torch.zeros(E, N).to(torch.float8_e5m2)),
        TypeError,
        "bias must be floating",
    ),
    "bias": (dict(bias=torch.zeros(N)), ValueError, r"bias must be \(E, N\) = \(5, 20\)"),
    "dtypes": (dict(input=torch.zeros(T, K).half()), TypeError, "input is torch.float16 but weights is"),
    "an id": (dict(expert_ids=torch.full((T, 3), E)), ValueError, "expert_ids holds 5 but num_experts is 5"),
    "8 bits": (dict(out_dtype=torch.float8_e5m2), TypeError, "out_dtype must be a floating dtype"),
    "out_dtype": (dict(out_dtype=torch.int32), TypeError, "out_dtype must be a floating dtype"),
}


@pytest.mark.parametrize("change, kind, message", BAD.values(), ids=BAD)
@pytest.mark.no_interpreter
def test_bad_input_is_named(change, kind, message):
    x, w, ids, _, _ = make("cpu")
    with pytest.raises(kind, match=message):
        grouped_gemm(**{"input": x, "weights": w, "expert_ids": ids} | change)
