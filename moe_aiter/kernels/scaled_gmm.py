"""Products of 8 bits with scales of each group of rows and its own weight: see `scaled_gemm`.

    out[r] = (x[t] @ w[g]) * x_scale[t] * w_scale[g] + bias[g]        t = order[r] // top_k, or r

for each row r of each group g; rows past the last group are zeros.
"""

import torch
from torch import Tensor

from ..op import define_op, takes
from . import hopper
from ._check import check_shape, check_size, refuse_gradient
from ._fp8 import FP8
from ._groups import check_groups, check_plan_values, check_rows, group_ends, take_rows
from ._scales import check_scales
from .scaled_gemm import check_operands, launch, scaled_gemm_reference

# reference


def scaled_gmm_reference(x, w, group_sizes, x_scale, w_scale, bias, order, top_k, dtype):
    rows = take_rows(x.view(torch.uint8), order, top_k).view(x.dtype)  # torch gathers few kinds of 8 bits
    scales = None if x_scale is None else take_rows(x_scale, order, top_k)
    out, start = rows.new_zeros(len(rows), w.shape[2], dtype=dtype), 0
    for g, end in enumerate(group_ends(group_sizes, len(rows))):
        of_rows = None if scales is None else scales[start:end]
        of_g = (None if t is None else t[g] for t in (w_scale, bias))
        out[start:end] = scaled_gemm_reference(rows[start:end], w[g], of_rows, *of_g, dtype)
        start = end
    return out


# launcher


@takes(torch.int8, *FP8)
def launch_scaled_gmm(out, x, w, group_sizes, x_scale, w_scale, bias, order, top_k, dtype):
    order = order if order is None else order.contiguous()
    launch(out, x, w, group_sizes.contiguous(), x_scale, w_scale, bias, order, top_k)


# op


def new_scaled_gmm(x, w, group_sizes, x_scale, w_scale, bias, order, top_k, dtype):
    check_shape("w", w, "G", "K", "N")
    rows = x.shape[0] if order is None else order.shape[0]
    check_rows("x", x, "K", order, top_k, rows)
    (T, K), (G, w_K, N) = x.shape, w.shape
    check_size("x is (M, K={})", K, "w is (G, K={}, N)", w_K)
    check_operands(x, w, dtype)
    check_groups(group_sizes, x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias, order=order)
    check_size("group_sizes is ({},)", group_sizes.shape[0], "w is (G={}, K, N)", G)
    check_scales((T,), (G, N), x_scale, w_scale, bias)
    return x.new_empty(rows, N, dtype=dtype)


scaled_gmm_op = define_op(
    "scaled_gmm(Tensor x, Tensor w, Tensor group_sizes, Tensor? x_scale, Tensor? w_scale, Tensor? bias, "
    "Tensor? order, int top_k, ScalarType? dtype) -> Tensor",
    new=new_scaled_gmm,
    check_values=lambda x, w, sizes, _, __, ___, order, *rest: check_plan_values(
        len(x if order is None else order), sizes, order
    ),
    reference=scaled_gmm_reference,
    triton=launch_scaled_gmm,
    hopper=hopper.launch_scaled_gmm,
)

# public


def scaled_gmm(
    x: Tensor,
    w: Tensor,
    group_sizes: Tensor,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    order: Tensor | None = None,
    top_k: int = 1,
    out_dtype: torch.dtype,
) -> Tensor:
    """`scaled_gemm` of each group of rows with its own `w` (G, K, N): (M, N) in `out_dtype`.

    `x` (M, K) has the rows sorted by group, `group_sizes` (G,) int32 or int64 counts them and stays on the
    device.  With an `order` (M,), row r is row order[r] // top_k of `x` (T, K).  `x_scale`, for each row of
    `x`, and `w_scale` (G, N) are float32, `bias` (G, N) of any floating dtype.  Rows past the last group are
    zeros.  Operands, sums and errors as for `scaled_gemm`; not differentiable.
    """
    refuse_gradient("a scaled product", x, w, x_scale, w_scale, bias)
    return scaled_gmm_op(x, w, group_sizes, x_scale, w_scale, bias, order, top_k, out_dtype)
