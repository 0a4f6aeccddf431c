"""FlashInfer's grouped_mm_bf16 against products in float64."""

import itertools

import pytest
import torch

from moe_aiter.compat import flashinfer
from moe_aiter.compat.flashinfer.grouped_mm import grouped_mm_bf16

from ..check import error

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SIZES = {"ragged": (3, 0, 5, 1), "one row": (0, 1, 0, 0), "no rows": (0, 0, 0, 0), "one expert": (0, 9, 0, 0)}


def inputs(sizes, device="cpu", dtype=BF16, k=32, n=48):
    indptr = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32, device=device)
    a = torch.randn(sum(sizes), k, device=device).to(dtype)
    return a, torch.randn(len(sizes), n, k, device=device).to(dtype), indptr


def reference(a, b, indptr):
    ends = indptr.tolist()
    return torch.cat([a[i:j].double() @ b[e].double().T for e, (i, j) in enumerate(itertools.pairwise(ends))])


@pytest.mark.parametrize("out_dtype", [F16, BF16, F32])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.pairwise
def test_against_float64(device, sizes, dtype, out_dtype):
    a, b, indptr = inputs(SIZES[sizes], device, dtype)
    exact = reference(a, b, indptr)
    got = grouped_mm_bf16(a, b, indptr, out_dtype=out_dtype)
    assert got.dtype == out_dtype and got.shape == exact.shape
    assert error(got, exact) <= 2 * error(exact.to(out_dtype), exact) + 1e-6
    out = torch.full(exact.shape, float("nan"), dtype=out_dtype, device=device)
    assert grouped_mm_bf16(a, b, indptr, out, F16) is out  # whose dtype counts
    assert torch.equal(out, got)


def test_strides_index_dtypes_and_hints(device):
    a, b, indptr = inputs((3, 0, 5, 1), device, k=48)  # a square b
    expected = grouped_mm_bf16(a, b, indptr)
    assert expected.dtype == BF16
    others = a.T.contiguous().T, b.mT.contiguous().mT, indptr.long()
    assert error(grouped_mm_bf16(*others, backend="cake", tactic=3), expected) < 1e-2
    assert torch.equal(grouped_mm_bf16(a, b, indptr, tactic=3), expected)


def test_rows_past_the_last_expert(device):
    a, b, indptr = inputs((3, 0, 5, 1), device)
    indptr[-1] -= 1
    out = torch.full((9, 48), 7.0, dtype=BF16, device=device)
    assert (grouped_mm_bf16(a, b, indptr, out)[-1] == 7).all() and (
        grouped_mm_bf16(a, b, indptr)[-1] == 0
    ).all()


def test_the_doors():
    assert flashinfer.grouped_mm.grouped_mm_bf16 is flashinfer.grouped_mm_bf16 is grouped_mm_bf16


A, B, INDPTR = inputs((3, 0, 5, 1))


@pytest.mark.parametrize(
    "change, kind, message",
    [
        (dict(a=A.float()), TypeError, "a must be bfloat16 or float16, not torch.float32"),
        (dict(b=B.half()), TypeError, "a is torch.bfloat16 but b is torch.float16"),
        (dict(a=A[0]), ValueError, r"a must be \(cum_m, k\)"),
        (dict(b=B[..., :8]), ValueError, r"a is \(cum_m, k=32\) but b is \(batch_size, n, k=8\)"),
        (dict(m_indptr=INDPTR[1:]), ValueError, r"b is \(batch_size=4, n, k\) but m_indptr is for 3"),
        (dict(m_indptr=INDPTR.float()), TypeError, "m_indptr must be int32 or int64"),
        (dict(out_dtype=torch.float64), ValueError, "out_dtype must be float16, bfloat16 or float32"),
        (dict(out=torch.zeros(9, 8, dtype=BF16)), ValueError, "out must be"),
        (dict(backend="triton"), ValueError, "unknown backend 'triton'; known: cudnn, cake"),
    ],
)
def test_bad_input_is_named(change, kind, message):
    with pytest.raises(kind, match=message):
        grouped_mm_bf16(**{**dict(a=A, b=B, m_indptr=INDPTR), **change})
