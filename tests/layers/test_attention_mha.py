"""`torch.ops.moe_aiter.mha_fwd` is attention with the heads last, and the sums of its softmax are real."""

import pytest
import torch
from check import few

from moe_aiter import layers
from moe_aiter.layers.attention import attention

from ..check import with_gradients

mha_fwd = torch.ops.moe_aiter.mha_fwd.default
F32, F64 = torch.float32, torch.float64
PLAIN = {
    "dropout_p": 0.0,
    "softmax_scale": 0.3,
    "is_causal": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "return_softmax_lse": False,
    "return_dropout_randval": False,
}
OPTIONS = [
    {},
    {"is_causal": True},
    {"window_size_left": 2},
    {"window_size_left": 1, "window_size_right": 1},
    {"is_causal": True, "window_size_left": 2},
    {"is_causal": True, "softmax_scale": -0.3},
    {"window_size_left": 2, "softmax_scale": 0.0},
]


def make(B=2, Hq=4, Hk=2, Sq=5, Sk=7, D=8, dtype=F32, device="cpu"):
    shapes = (B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, D)
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def sums(q, k, options):
    """The log of each sum of exponentials in float64, of (B, S, H, D)."""
    Sq, Sk, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k = k.double().repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) * options["softmax_scale"]
    off = torch.arange(Sk, device=q.device) - torch.arange(Sk - Sq, Sk, device=q.device)[:, None]
    left, right = options["window_size_left"], options["window_size_right"]
    right = 0 if options["is_causal"] else right
    shown = ((left < 0) | (-off <= left)) & ((right < 0) | (off <= right))
    return scores.masked_fill(~shown, -torch.inf).logsumexp(3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [(5, 7), (1, 6), (6, 3), (4, 4), (0, 3), (3, 0)])
@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16, torch.float16])
@pytest.mark.pairwise
def test_it_is_attention_with_the_heads_last(options, lengths, dtype, device):
    q, k, v = make(Sq=lengths[0], Sk=lengths[1], dtype=dtype, device=device)
    options = PLAIN | options | {"return_softmax_lse": True}
    window = options["window_size_left"], options["window_size_right"]

    def ours(q, k, v):
        return mha_fwd(q, k, v, **options)[0]

    def theirs(q, k, v):
        q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
        scale = options["softmax_scale"]
        out = attention(q, k, v, is_causal=options["is_causal"], window=window, scale=scale, backend="math")
        return out.transpose(1, 2)

    near = {F32: 2e-5, F64: 1e-10}.get(dtype, 3e-2)
    for got, best in zip(with_gradients(ours)(q, k, v), with_gradients(theirs)(q, k, v), strict=True):
        torch.testing.assert_close(got, best.to(dtype), rtol=near, atol=near)
    lse = mha_fwd(q, k, v, **options)[1]
    assert lse.dtype == F32 and not lse.requires_grad
    torch.testing.assert_close(lse.double(), sums(q, k, options), rtol=1e-4, atol=1e-4)


def test_what_is_not_asked_for_is_empty(device):
    out, lse, kept, state = mha_fwd(*make(device=device), **PLAIN)
    assert out.shape == (2, 5, 4, 8) and lse.shape == kept.shape == (0,) and state.shape == (2,)
    asked = PLAIN | {"return_softmax_lse": True, "return_dropout_randval": True}
    out, lse, kept, state = mha_fwd(*make(device=device), **asked)
    assert lse.shape == (2, 4, 5) and kept.shape == (2, 4, 5, 7) and kept.all()


def test_dropout_keeps_what_it_says(device):
    q, k, _ = make(B=1, Hq=2, Hk=2, Sq=64, Sk=64, device=device)
    v = torch.eye(64, device=device)[None, :, None].expand(1, 64, 2, 64)
    options = PLAIN | {"dropout_p": 0.25, "return_dropout_randval": True}
    out, _, kept, _ = mha_fwd(q, k, v.contiguous(), **options)
    p = mha_fwd(q, k, v.contiguous(), **PLAIN)[0].transpose(1, 2)  # values of the identity show them
    torch.testing.assert_close(out.transpose(1, 2), p * kept / 0.75)
    assert abs(kept.float().mean() - 0.75) < 0.03


WINDOW = {"is_causal": True, "window_size_left": 2}


@pytest.mark.parametrize("options", few([{}, WINDOW], WINDOW), ids=str)
def test_opcheck(options, device):
    q, k, v = (t.requires_grad_() for t in make(device=device))
    given = tuple((PLAIN | options | {"return_softmax_lse": True}).values())
    torch.library.opcheck(mha_fwd, (q, k, v, *given))


def test_it_compiles_into_one_graph(device):
    q, k, v = make(device=device)
    options = PLAIN | {"is_causal": True, "return_softmax_lse": True}
    torch.compiler.reset()
    ours = with_gradients(lambda *qkv: mha_fwd(*qkv, **options)[0])
    compiled = torch.compile(lambda *qkv: mha_fwd(*qkv, **options)[0], backend="aot_eager", fullgraph=True)
    for got, best in zip(with_gradients(compiled)(q, k, v), ours(q, k, v), strict=True):
        torch.testing.assert_close(got, best)


def test_what_does_not_fit_is_refused():
    q, k, v = make()
    with pytest.raises(ValueError, match="sink_size must be 0, not 4"):
        mha_fwd(q, k, v, **PLAIN, sink_size=4)
    with pytest.raises(ValueError, match=r"q is \(B, Hq, Sq, D=8\) but k is \(B, Hk, Sk, D=4\)"):
        mha_fwd(q, k[..., :4], v, **PLAIN)
    with pytest.raises(ValueError, match=r"q must be \(B, Hq, Sq, D\)"):
        mha_fwd(q[0], k, v, **PLAIN)
    with pytest.raises(ValueError, match="4 heads, which 3 of k"):
        mha_fwd(q, k[:, :, :1].expand(-1, -1, 3, -1), v[:, :, :1].expand(-1, -1, 3, -1), **PLAIN)


def test_flags_must_be_flags():
    q, k, v = make()
    with pytest.raises(TypeError, match="is_causal must be a bool, not str"):
        layers.mha_fwd(q, k, v, 0.0, 1.0, "no", -1, -1, True, False)
    with pytest.raises(TypeError, match="return_softmax_lse must be a bool, not str"):
        layers.mha_fwd(q, k, v, 0.0, 1.0, False, -1, -1, "yes", False)
