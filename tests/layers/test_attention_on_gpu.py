"""Attention on a GPU is right where torch's kernels there are not, or are not the same."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from moe_aiter.layers.attention import Call, attention, attention_backend, fitted, has_aligned_rows

from ..check import with_gradients

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
gpu = pytest.mark.gpu
dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)


def make(B=2, Hq=4, Hk=4, Sq=5, Sk=5, D=8, Dv=None, dtype=F32, device="cuda"):
    shapes = (B, Hq, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv or D)
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def steps(q, k, v, keep=None, causal=False):
    """In single steps; zeros for a query without keys."""
    Sq, Sk = q.shape[2], k.shape[2]
    shown = torch.ones(Sq, Sk, dtype=torch.bool, device=q.device).tril(Sk - Sq if causal else Sk)
    shown = shown if keep is None else shown & keep
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True)
    return out.masked_fill(~shown.any(-1, keepdim=True), 0)


def check(ours, theirs, *inputs):
    """Results and gradients, within twice what single steps are off: not relative, some gradients are 0."""
    ours, theirs = with_gradients(ours), with_gradients(theirs)
    floor = max(torch.finfo(inputs[0].dtype).eps, 3e-6)
    exact = theirs(*(t.double() for t in inputs))
    for got, best, truth in zip(ours(*inputs), theirs(*inputs), exact, strict=True):
        assert got.dtype == best.dtype and got.shape == best.shape
        near, far = ((t.double() - truth).norm().item() for t in (best, got))
        assert far <= 2 * near + floor * truth.numel() ** 0.5


def mha(q, k, v, causal):
    op = torch.ops.moe_aiter.mha_fwd.default
    heads_last = [t.transpose(1, 2) for t in (q, k, v)]
    return op(*heads_last, 0.0, q.shape[3] ** -0.5, causal, -1, -1, False, False)[0].transpose(1, 2)


@gpu
@dtypes
@pytest.mark.parametrize("D", [4, 8, 12, 16, 24, 40])
@pytest.mark.parametrize("S", [1, 8, 33])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.pairwise
def test_narrow_heads(dtype, D, S, causal, heads):
    for Sk in {S, S + 8}:
        q, k, v = make(2, *heads, S, Sk, D, dtype=dtype)
        check(lambda *t: attention(*t, is_causal=causal), lambda *t: steps(*t, causal=causal), q, k, v)
        check(lambda *t: mha(*t, causal), lambda *t: steps(*t, causal=causal), q, k, v)


@gpu
@dtypes
@pytest.mark.parametrize("D, Dv", [(8, 8), (16, 16), (24, 16), (16, 8), (64, 64), (192, 128)])
@pytest.mark.parametrize("before", [1, 4, 8, 64])
@pytest.mark.parametrize("S", [8, 33])
@pytest.mark.pairwise
def test_parts_of_wider_tensors(dtype, D, Dv, before, S):
    """Keys that were put together from two parts, and values that were split off, wherever they begin."""
    kv = torch.randn(2, S, 2, before + Dv, device="cuda").to(dtype)
    q = torch.randn(2, S, 2, D + before, device="cuda").to(dtype)
    k = torch.randn(2, S, 2, D, device="cuda").to(dtype)

    def parts(fn, **how):
        def run(q, k, kv):
            qkv = q[..., before:], torch.cat((k[..., 4:], k[..., :4]), -1), kv.split((before, Dv), -1)[1]
            return fn(*(t.transpose(1, 2) for t in qkv), **how)

        return run

    for causal in (False, True):
        theirs = parts(steps, causal=causal)
        check(parts(attention, is_causal=causal), theirs, q, k, kv)
        check(parts(lambda q, k, v, causal=causal: mha(q, k, v, causal)), theirs, q, k, kv)


def call(*qkv):
    return Call(*qkv, None, -1, -1, 0.0, 1.0)


@gpu
def test_only_what_torchs_kernels_cannot_be_given_is_copied():
    wide = torch.randn(2, 4, 33, 80, device="cuda", dtype=BF16)
    shared = wide[:, :1].expand(2, 4, 33, 80)
    for plain in (wide[..., :64], wide[..., 8:72], wide.transpose(1, 2)[..., :16], shared):
        same = call(plain, plain, plain)
        assert fitted(same) is same and has_aligned_rows(plain)
    uneven = torch.randn(2, 4, 64, 33, device="cuda", dtype=BF16).mT
    for odd in (wide[..., 4:68], uneven, torch.randn(2, 4, 33, 68, device="cuda", dtype=BF16)[..., :64]):
        assert not has_aligned_rows(odd) and has_aligned_rows(fitted(call(odd, odd, odd)).v)
    narrow = fitted(call(wide[..., :8], wide[..., :8], wide[..., 3:7]))
    assert [t.shape[3] for t in narrow[:3]] == [16, 16, 16] and not narrow.v[..., 4:].any()


@gpu
def test_a_call_of_other_strides_is_not_taken_for_a_known_one():
    q, k, wide = make(Sq=64, Sk=64, D=72, dtype=BF16)
    q, k = q[..., :64].contiguous(), k[..., :64].contiguous()
    with torch.no_grad():
        for v in (
            wide[..., :64].contiguous(),
            wide[..., :64],
            wide[..., 4:68],
            wide[..., 1:65],
            wide[..., 8:],
        ):
            best = attention(q.double(), k.double(), v.double(), backend="math")
            for _ in range(2):
                torch.testing.assert_close(attention(q, k, v).double(), best, rtol=2e-2, atol=1e-2)


@gpu
@dtypes
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("lengths", [(1, 520), (64, 320), (33, 65)])
@pytest.mark.parametrize("D", [8, 64])
@pytest.mark.parametrize("kind", ["left", "right", "rows"])
@pytest.mark.pairwise
def test_padding(dtype, heads, lengths, D, kind):
    """On either side, with sequences of which nothing is left, with and without gradients."""
    Sq, Sk = lengths
    q, k, v = make(4, *heads, Sq, Sk, D, dtype=dtype)
    count = torch.tensor([0, 1, Sk // 5, Sk], device="cuda")[:, None]
    place = torch.arange(Sk, device="cuda")
    keep = place < count if kind == "right" else place >= Sk - count
    keep = (torch.rand(4, Sq, Sk, device="cuda") < count[..., None] / Sk) if kind == "rows" else keep
    four = keep[:, None] if kind == "rows" else keep[:, None, None]
    added = torch.where(keep, 0.0, -torch.inf).to(dtype)
    for mask, causal in itertools.product((keep, added), (False, True)):
        theirs = lambda *t, causal=causal: steps(*t, four, causal)  # noqa: E731
        ours = lambda *t, mask=mask, causal=causal: attention(*t, mask, is_causal=causal)  # noqa: E731
        check(ours, theirs, q, k, v)
        torch.testing.assert_close(ours(q, k, v), ours(*(t.clone().requires_grad_() for t in (q, k, v))))


@gpu
def test_a_mask_of_keys_takes_no_memory_of_pairs():
    q, k, v = make(4, 8, 8, 2048, 2048, 64, dtype=BF16)
    keep = torch.arange(2048, device="cuda") < torch.tensor([0, 1, 1000, 2048], device="cuda")[:, None]
    with torch.no_grad():
        attention(q, k, v, keep)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(q, k, v, keep)
        assert torch.cuda.max_memory_allocated() - before < 2 * q.nbytes


@gpu
def test_mha_fwd_of_16_bits_is_an_op_as_torch_wants_it():
    op = torch.ops.moe_aiter.mha_fwd.default
    q, k, v = (t.transpose(1, 2).requires_grad_() for t in make(2, 8, 2, 64, 64, 64, dtype=BF16))
    assert attention_backend(*(t.transpose(1, 2) for t in (q, k, v)), window=(9, 0)) == "flash"
    given = 0.125, True, 9, 0, True, False
    torch.library.opcheck(op, (q, k, v, 0.0, *given))
    for _ in range(3):
        torch.empty(2, dtype=torch.int64, device="cuda").fill_(7)  # memory that is used again
        assert not op(q, k, v, 0.0, *given)[3].any()
    assert op(q, k, v, 0.5, *given)[3].dtype == torch.int64
