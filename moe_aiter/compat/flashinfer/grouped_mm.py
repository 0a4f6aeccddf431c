"""The functions of `flashinfer.grouped_mm`."""

import torch
from torch import Tensor

from ...kernels.base.check import check_axes, check_known, check_size, check_tensor, renamed
from ...kernels.grouped.gmm import gmm

__all__ = ["grouped_mm_bf16"]

BACKENDS = ("cudnn", "cake")
NARROW = (torch.bfloat16, torch.float16)


@renamed(lhs="a", rhs="b", group_sizes="m_indptr", existing_out="out", preferred_element_type="out_dtype")
def grouped_mm_bf16(
    a: Tensor, b: Tensor, m_indptr: Tensor, out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, *, backend: str = "cudnn", tactic: int = -1,
) -> Tensor:  # fmt: skip
    """`out[m_indptr[e]:m_indptr[e + 1]] = a[m_indptr[e]:m_indptr[e + 1]] @ b[e].T` of each expert e.

    a: (cum_m, k), bfloat16, or float16 like `b`.  b: (batch_size, n, k).  Any strides.
    m_indptr: (batch_size + 1,), int32 or int64, from 0 on.  Rows from `m_indptr[-1]` on are zeros, or stay as
        they are in `out`.
    out: (cum_m, n), whose dtype then counts.  out_dtype: float16, bfloat16 or float32.

    Sums are float32, rounded once.  Differentiable without `out`.  `backend`, "cudnn" or "cake", and `tactic`
    choose among FlashInfer's kernels and have no effect here.  Raises ValueError for shapes, devices and
    `out_dtype`, TypeError for other operands.
    """
    check_known("backend", backend, BACKENDS)
    operands = {"a": (a, "cum_m, k"), "b": (b, "batch_size, n, k"), "m_indptr": (m_indptr, "batch_size + 1")}
    sizes = check_axes(**operands)
    check_size("b is (batch_size={}, n, k)", sizes["batch_size"], "m_indptr is for {}", len(m_indptr) - 1)
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in NARROW:
            raise TypeError(f"{name} must be bfloat16 or float16, not {x.dtype}")
    if out is not None:
        check_tensor("out", out)
        out_dtype = out.dtype
    if out_dtype not in (*NARROW, torch.float32):
        raise ValueError(f"out_dtype must be float16, bfloat16 or float32, not {out_dtype}")
    group_sizes = m_indptr.diff()
    return gmm(a, b, group_sizes, preferred_element_type=out_dtype, existing_out=out, trans_rhs=True)
