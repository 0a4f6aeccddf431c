"""AITER's `deepgemm`: see `moe_aiter/kernels/grouped/masked_gmm.py`."""

from torch import Tensor

from ....kernels.base.check import check_flags, check_tensor, renamed
from ....kernels.base.shuffle import LAYOUT
from ....kernels.grouped.masked_gmm import masked_gmm
from ....layers.linear import ShuffledWeight

__all__ = ["deepgemm"]


@renamed(x="XQ", w="WQ", out="Y", group_sizes="group_layout")
def deepgemm(
    XQ: Tensor, WQ: Tensor | ShuffledWeight, Y: Tensor, group_layout: Tensor | None = None,
    x_scale: Tensor | float | None = None, w_scale: Tensor | float | None = None, *,
    masked_m: Tensor | None = None, weight_shuffled: bool | None = None,
) -> Tensor:  # fmt: skip
    """`Y[g, :m] = (XQ[g, :m] @ WQ[g].T) * x_scale * w_scale` with m = group_layout[g], in place; returns `Y`.

    `XQ` (G, max_m, K) and `WQ` (G, N, K) have one dtype: an 8-bit float, and `Y` (G, max_m, N) has 16 or 32
    bits, or that of `Y`.  `group_layout` (G,), also called `masked_m`, counts rows that are there, clamped to
    [0, max_m]; the others of `Y` keep what they held.  Scales are float32, and 1 where they are missing: a
    number, (G,), (G, 1, 1), or for each row `x_scale` (G, max_m[, 1]) and `w_scale` (G, N[, 1]).

    `WQ` is shuffled, as `shuffle_weight(weight)` makes it, unless `weight_shuffled` is False, or None and
    `WQ` says so itself by `is_shuffled = False`.  A `ShuffledWeight` always is, in the layout (16, 16).

    Raises ValueError for shapes and devices, and where `Y` shares memory with another argument, TypeError for
    dtypes that do not fit; nothing is written then.
    """
    if (group_layout is None) == (masked_m is None):
        raise ValueError("give either group_layout or masked_m, which are the same")
    if isinstance(WQ, ShuffledWeight):
        if WQ.layout != LAYOUT or WQ.use_int4:
            raise ValueError(f"WQ must be shuffled by {LAYOUT}, not {WQ.layout} with use_int4={WQ.use_int4}")
        if weight_shuffled is False:
            raise ValueError("weight_shuffled is False but WQ is a ShuffledWeight")
        WQ, weight_shuffled = WQ.shuffled, True
    check_tensor("XQ", XQ)
    check_tensor("WQ", WQ)
    if XQ.dtype != WQ.dtype:
        raise TypeError(f"XQ is {XQ.dtype} but WQ is {WQ.dtype}")
    if weight_shuffled is not None:
        check_flags(weight_shuffled=weight_shuffled)
    else:
        weight_shuffled = getattr(WQ, "is_shuffled", True)
    sizes = masked_m if group_layout is None else group_layout
    return masked_gmm(Y, XQ, WQ, sizes, x_scale, w_scale, shuffled=weight_shuffled)
