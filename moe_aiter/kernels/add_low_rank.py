"""An adapter's second product, added to that of the weight where it lies: `out[s:e] += x[s:e] @ w[g]`.

M rows, G groups, r in, N out.  r is a rank: so short that what counts is to read and write `out` once.
"""

from torch import Tensor

from ..op import define_inplace_op, takes
from ._by_group import chosen
from ._check import check_device, check_float, check_own_memory, check_shape, check_size
from ._groups import check_groups, check_plan_values, split_groups
from ._tile import TILE_DTYPES
from .segment_gmm import SHORT_K, launch_segment_gmm, segment_gmm_op

# reference


def add_low_rank_reference(out, x, w, group_sizes):
    add = chosen(out, x, out)
    pairs = zip(split_groups(out, group_sizes), split_groups(x, group_sizes), w.unbind(), strict=False)
    for o, rows, weight in pairs:
        if len(rows):
            add(o, rows, weight, o)


# launcher


def check_add_low_rank(out, x, w, group_sizes):
    check_shape("out", out, "M", "N")
    check_shape("x", x, "M", "r")
    check_shape("w", w, "G", "r", "N")
    check_size("x is (M, r={})", x.shape[1], "w is (G, r={}, N)", w.shape[1])
    check_float(out=out, x=x, w=w)
    check_groups(group_sizes, x, w=w)
    check_size("group_sizes is ({},)", group_sizes.shape[0], "w is (G={}, r, N)", w.shape[0])
    check_device(x=x, out=out)
    if out.shape != (x.shape[0], w.shape[2]):
        raise ValueError(f"out must be (M, N) = {(x.shape[0], w.shape[2])}, but it is {tuple(out.shape)}")
    check_own_memory("out", out)


@takes(*TILE_DTYPES)
def launch_add_low_rank(out, x, w, group_sizes):
    if w.shape[1] <= SHORT_K and out.is_contiguous():
        launch_segment_gmm(out, x, w, group_sizes, None, None, zero_rest=False, add=True)
    else:
        out.add_(segment_gmm_op(x, w, group_sizes, None, None))


# op

add_low_rank_op = define_inplace_op(
    "add_low_rank(Tensor(a!) out, Tensor x, Tensor w, Tensor group_sizes) -> ()",
    check=check_add_low_rank,
    check_values=lambda out, x, w, group_sizes: check_plan_values(len(x), group_sizes),
    reference=add_low_rank_reference,
    triton=launch_add_low_rank,
)


# public


def add_low_rank(out: Tensor, x: Tensor, w: Tensor, group_sizes: Tensor) -> None:
    """Add to each group of rows of `out` (M, N) its rows of `x` (M, r) times its matrix of `w` (G, r, N).

    `group_sizes` (G,) as in `gmm`; rows past the groups stay as they are.  All of one dtype; sums are kept in
    float32 and rounded once, with what `out` held in them.  Not differentiable.  Raises ValueError for shapes
    and devices that do not fit, and for an `out` that shares memory, TypeError for dtypes.
    """
    add_low_rank_op(out, x, w, group_sizes)
