"""Attention means the same on every backend: masks, lower-right causality, windows, grouped heads."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from check import few

from moe_aiter.layers.attention import agree, attention

from ..check import assert_as_good_as_torch, with_gradients

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def by_definition(q, k, v, mask=None, *, is_causal=False, scale=None, window=(-1, -1)):
    """A loop over heads and queries, each over the keys that it sees."""
    B, H, Sq, D = q.shape
    Sk, group = k.shape[2], H // k.shape[1]
    left, right = window[0], 0 if is_causal else window[1]
    out = []
    for b, h, i in ((b, h, i) for b in range(B) for h in range(H) for i in range(Sq)):
        place = i + Sk - Sq
        keys = [j for j in range(Sk) if (left < 0 or j >= place - left) and (right < 0 or j <= place + right)]
        scores = (k[b, h // group, keys] @ q[b, h, i]) * (1 / math.sqrt(D) if scale is None else scale)
        if mask is not None:
            row = mask.expand(B, H, Sq, Sk)[b, h, i, keys]
            scores = scores + row if mask.is_floating_point() else scores.masked_fill(row == 0, -torch.inf)
        if not keys or bool((scores == -torch.inf).all()):
            out.append(v.new_zeros(v.shape[3]) + 0 * (q.sum() + k.sum() + v.sum()))
        else:
            out.append(scores.softmax(0) @ v[b, h // group, keys])
    return torch.stack(out).view(B, H, Sq, -1)


def make(B=2, H=4, Hk=4, Sq=5, Sk=5, D=8, Dv=None, device="cpu"):
    shapes = (B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv or D)
    return [torch.randn(shape, device=device) for shape in shapes]


def assert_near(ours, theirs, *inputs):
    """Results and gradients; not relative to each, for the gradient of a query with one key is 0."""
    exact = with_gradients(theirs)(*(t.double() if t.is_floating_point() else t for t in inputs))
    for got, best in zip(with_gradients(ours)(*inputs), exact, strict=True):
        torch.testing.assert_close(got, best.to(got.dtype), rtol=1e-4, atol=2e-5)


LENGTHS = [(5, 5), (3, 7), (1, 6), (7, 3), (6, 1)]
WINDOWS = [(-1, -1), (2, -1), (-1, 1), (2, 1), (0, 0), (100, 100)]
BACKENDS = ["auto", "sdpa", "math"]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.pairwise
def test_causality_and_windows_end_at_the_last_key(lengths, is_causal, window, backend, device):
    q, k, v = make(Sq=lengths[0], Sk=lengths[1], device=device)

    def ours(q, k, v):
        return attention(q, k, v, is_causal=is_causal, window=window, backend=backend)

    def theirs(q, k, v):
        return by_definition(q, k, v, is_causal=is_causal, window=window)

    assert_near(ours, theirs, q, k, v)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"window": (2, 1)}, {"is_causal": True, "window": (1, -1)}]
)
@pytest.mark.parametrize("lengths", [(3, 7), (1, 6), (5, 5), (7, 3)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.pairwise
def test_heads_that_share_keys(heads, options, lengths, backend, device):
    q, k, v = make(1, *heads, *lengths, device=device)
    assert_near(
        lambda *qkv: attention(*qkv, backend=backend, **options),
        lambda *qkv: by_definition(*qkv, **options),
        *(q, k, v),
    )


def test_decoding_sees_every_key_where_torchs_own_causality_sees_one(device):
    q, k, v = make(Sq=1, Sk=6, device=device)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(theirs, v[:, :, :1])
    torch.testing.assert_close(attention(q, k, v, is_causal=True), attention(q, k, v))


def masks(B, H, Sq, Sk, device):
    keep = torch.rand(B, Sk, device=device) > 0.3
    keep[0] = False  # nothing is left of the first sequence
    rows = torch.rand(B, Sq, Sk, device=device) > 0.5
    rows[:, 0] = False
    scores = torch.randn(B, H, Sq, Sk, device=device)
    scores[0, 1, 2] = -torch.inf
    return {
        "bool, keys": keep,
        "int, keys": keep.int(),
        "uint8, rows": rows.byte(),
        "bool, rows": rows,
        "float": scores,
        "float, rows": torch.randn(B, Sq, Sk, device=device),
        "float, keys": torch.where(keep, 0.0, -torch.inf),
        "one axis": torch.rand(1, 1, Sq, 1, device=device) > 0.5,
        "float, one axis": torch.randn(1, 1, Sq, 1, device=device),
        "heads": torch.rand(1, H, 1, Sk, device=device) > 0.3,
    }


@pytest.mark.parametrize("kind", masks(1, 2, 3, 3, "cpu"))
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (2, 1)}])
@pytest.mark.parametrize("heads, lengths", [((4, 4), (4, 7)), ((4, 2), (5, 5)), ((4, 2), (7, 4))])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.pairwise
def test_masks(kind, options, heads, lengths, backend, device):
    q, k, v = make(2, *heads, *lengths, device=device)
    mask = masks(2, heads[0], *lengths, device)[kind]
    four = mask[:, None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
    assert_near(
        lambda *qkv: attention(*qkv, mask, backend=backend, **options),
        lambda *qkv: by_definition(*qkv, four, **options),
        *(q, k, v),
    )


@pytest.mark.parametrize(
    "size", [(2, 1), (2, 5, 1), (1, 1, 5, 1), (1, 1, 1, 1), (2, 7), (1, 4, 1, 7)], ids=str
)
@pytest.mark.parametrize("Sk", [7, 1])
def test_rows_of_the_mask_that_torch_gets_are_contiguous(size, Sk):
    """Its kernels of a GPU refuse a bias whose last axis has another stride, 0 of an axis of 1 say."""
    q, k, v = make(2, 4, 4, 5, Sk)
    mask = torch.randn(size)[..., :Sk]
    for given in (mask > 0, mask > 9, mask, torch.where(mask > 0, 0.0, -torch.inf)):
        call, *_ = agree(q, k, v, given, False, None, 0.0, None)
        assert call.mask.shape[3] == Sk and call.mask.stride(3) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_of_floats_has_a_gradient(backend):
    q, k, v = make(1, 2, 2, 3, 4)
    mask = torch.randn(1, 2, 3, 4)
    assert_near(lambda *given: attention(*given, backend=backend), by_definition, q, k, v, mask)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (1, 0)}, {}])
def test_gradcheck(backend, options):
    q, k, v = (t.double().requires_grad_() for t in make(1, 2, 1, 4, 3, 4))
    mask = torch.tensor([[True, False, True]])
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, backend=backend, **options), (q, k, v))
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, mask, backend=backend, **options), (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_without_keys_give_zeros_and_zero_gradients(backend, device):
    q, k, v = (t.requires_grad_() for t in make(Sq=7, Sk=3, device=device))
    out = attention(q, k, v, is_causal=True, backend=backend)
    assert not out[:, :, :4].any() and out[:, :, 4:].all()
    out.sum().backward()
    assert not q.grad[:, :, :4].any() and not any(t.grad.isnan().any() for t in (q, k, v))
    for empty in ({"Sq": 0}, {"Sk": 0}, {"B": 0}, {"Sq": 0, "Sk": 0}):
        q, k, v = (t.requires_grad_() for t in make(**empty, device=device))
        out = attention(q, k, v, is_causal=True, backend=backend)
        assert out.shape == q.shape and not out.any()
        out.sum().backward()
        assert not any(t.grad.any() for t in (q, k, v))


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (9, 4)}])
@pytest.mark.parametrize("sizes", [(2, 4, 2, 33, 47, 64), (1, 8, 8, 1, 130, 80), (1, 2, 1, 40, 40, 20)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.pairwise
def test_dtypes(dtype, options, sizes, backend, device):
    q, k, v = (t.to(dtype) for t in make(*sizes, device=device))

    def torchs(q, k, v):
        Sq, Sk = q.shape[2], k.shape[2]
        if not options or (options == {"is_causal": True} and Sq == Sk):
            # fused, as ours: it rounds what each head adds to dk, which torch's steps with a mask do not
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        left, right = options.get("window", (-1, -1))
        right = 0 if options.get("is_causal") else right
        behind = torch.arange(Sk, device=q.device) - torch.arange(Sk - Sq, Sk, device=q.device)[:, None]
        shown = ((left < 0) | (-behind <= left)) & ((right < 0) | (behind <= right))
        return F.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True)

    def ours(q, k, v):
        return attention(q, k, v, backend=backend, **options)

    assert_as_good_as_torch(with_gradients(ours), with_gradients(torchs), q, k, v, floor=2e-6)


def test_a_scale_and_values_of_another_size(device):
    q, k, v = make(Sq=3, Sk=4, Dv=5, device=device)
    for backend in BACKENDS:
        out = attention(q, k, v, scale=0.7, backend=backend)
        torch.testing.assert_close(out, by_definition(q, k, v, scale=0.7))


def test_any_strides(device):
    q, k, v = make(Sq=6, Sk=6, device=device)
    q2 = q.transpose(1, 2).contiguous().transpose(1, 2)
    k2 = k.mT.contiguous().mT
    v2 = v[:, :1].expand(-1, 4, -1, -1)
    out = attention(q2, k2, v2, is_causal=True)
    torch.testing.assert_close(out, attention(q, k, v2.contiguous(), is_causal=True))


def test_dropout_drops_and_scales(device):
    q, k, _ = make(Sq=64, Sk=64, device=device)
    v = torch.ones_like(k)
    for backend in BACKENDS:
        out = attention(q, k, v, dropout_p=0.25, backend=backend)
        assert out.std() > 0 and abs(out.mean().item() - 1) < 0.05
        torch.testing.assert_close(attention(q, k, v, backend=backend), v)


def test_autocast_lowers_as_for_torchs_own(device):
    q, k, v = make(device=device)
    with torch.autocast(device.type, BF16):
        for backend in BACKENDS:
            out = attention(q, k, v, backend=backend)
            assert out.dtype == BF16 and attention(q.double(), k.double(), v.double()).dtype == F64


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"window": (2, 0)},
        {"mask": 2},
        {"mask": 3, "is_causal": True},
        {"backend": "math"},
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", few([(5, 5), (3, 7), (7, 3), (1, 6)], (3, 7)))
def test_compiles_into_one_graph_with_gradients(options, lengths, device):
    options, (Sq, Sk) = dict(options), lengths
    q, k, v = make(2, 4, 2, Sq, Sk, device=device)
    rank = options.pop("mask", 0)
    shape = (2, Sk) if rank == 2 else (2, Sq, Sk)
    mask = torch.rand(shape, device=device) > 0.3 if rank else None

    def ours(q, k, v):
        return attention(q, k, v, mask, **options)

    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for got, best in zip(with_gradients(compiled)(q, k, v), with_gradients(ours)(q, k, v), strict=True):
        torch.testing.assert_close(got, best)


def test_heads_without_numbers_and_tensors_without_memory():
    q, v = torch.randn(1, 2, 3, 0), torch.randn(1, 2, 3, 4)
    torch.testing.assert_close(attention(q, q, v), v.mean(2, keepdim=True).expand_as(v))
    meta = torch.empty(1, 2, 3, 4, device="meta")
    assert attention(meta, meta, meta, is_causal=True).shape == meta.shape
    for window in ((1, 2, 3), 5):
        with pytest.raises(ValueError, match="window is"):
            attention(v, v, v, window=window)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (1, 0)}])
def test_it_compiles_once_for_all_lengths(options):
    def ours(q, k):
        return attention(q, k, k, **options)

    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (5, 7, 9):
        q, k, _ = make(Sq=length, Sk=length, Hk=2)
        torch.testing.assert_close(compiled(q, k), ours(q, k))


@pytest.mark.parametrize("scale", [-0.7, 0.0, 0])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (1, 0)}, {"window": (-1, 2)}])
@pytest.mark.parametrize("lengths, heads", [((5, 5), 4), ((3, 7), 2), ((7, 3), 1)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.pairwise
def test_scales_that_are_not_positive(scale, options, lengths, heads, backend, device):
    """torch's fused kernels give NaN: they multiply the -inf of hidden keys."""
    q, k, v = make(Hk=heads, Sq=lengths[0], Sk=lengths[1], device=device)
    attention(q, k, v, **options)  # what is remembered of this call is not for the next
    ours = functools.partial(attention, scale=scale, backend=backend, **options)
    assert_near(ours, functools.partial(by_definition, scale=scale, **options), q, k, v)


@pytest.mark.parametrize(
    "options, kind, message",
    [
        (dict(is_causal="no"), TypeError, "is_causal must be a bool, not str"),
        (dict(is_causal=1), TypeError, "is_causal must be a bool, not int"),
        (dict(scale="x"), TypeError, "scale must be a number, not str"),
        (dict(scale=float("nan")), ValueError, "scale must be finite, not nan"),
        (dict(dropout_p="a"), TypeError, "dropout_p must be a number, not str"),
        (dict(scale=float("inf")), ValueError, "scale must be finite, not inf"),
        (dict(dropout_p=False), TypeError, "dropout_p must be a number, not bool"),
        (dict(window=(1.5, 0)), TypeError, "window is .1.5, 0.: it takes two ints"),
        (dict(window=(9.0, 0)), TypeError, "window is .9.0, 0.: it takes two ints"),
        (dict(window=(True, 0)), TypeError, "window is .True, 0.: it takes two ints"),
    ],
)
def test_options_of_another_kind(options, kind, message):
    q = torch.randn(1, 2, 3, 4)
    for alike in {}, dict(is_causal=True), dict(window=(9, 0)), dict(window=(1, 0)):
        attention(
            q, q, q, **alike
        )  # a call of the same kind that was checked, but for what equals and differs
        with pytest.raises(kind, match=message):
            attention(q, q, q, **options)
