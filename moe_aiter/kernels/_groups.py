"""What the grouped ops share besides Triton helpers: checks, and pieces of their references."""

import torch
from torch import Tensor

from ._check import FLOATS, check_device, check_flags, check_index, check_shape, check_size, check_tensor


def split_groups(x: Tensor, group_sizes: Tensor) -> tuple[Tensor, ...]:
    """The rows of each group, and last the rows past them; sizes are clamped to the rows there are."""
    return x.tensor_split(group_ends(group_sizes, len(x)))


def group_ends(group_sizes: Tensor, rows: int) -> list[int]:
    """Where each group ends, of so many rows; this synchronises."""
    ends, end = [], 0
    for size in group_sizes.tolist():
        end = min(end + max(size, 0), rows)
        ends.append(end)
    return ends


def take_rows(x: Tensor, order: Tensor | None, top_k: int) -> Tensor:
    """Row r of the result is x[order[r] // top_k]; x itself without an order."""
    return x if order is None else x[order.clamp(min=0).long() // top_k]


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums over `x` are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    return x.to(sum_dtype(x))


def check_rows(name: str, x: Tensor, axis: str, order: Tensor | None, top_k: int, rows: int) -> None:
    """Raise unless `x`, read at order // top_k where there is an order, has as many rows as asked."""
    check_shape(name, x, "M" if order is None else "T", axis)
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")
    if order is not None:
        check_shape("order", order, "M")
        check_index(order=order)
        check_size("order is ({},)", order.shape[0], "there are {} rows", rows)
        given = f"{name} is (T={x.shape[0]}, {axis}) for top_k={top_k}, {{}} rows,"
        check_size(given, x.shape[0] * top_k, "order is ({},)", rows)
    else:
        check_size(f"{name} is ({{}}, {axis})", x.shape[0], "it takes {} rows", rows)


def check_groups(group_sizes: Tensor, x: Tensor, name: str = "x", **others: Tensor | None) -> None:
    """Raise unless the group sizes are (G,) integers, and everything is on the device of `x`, called so."""
    check_shape("group_sizes", group_sizes, "G")
    check_index(group_sizes=group_sizes)
    check_device(**{name: x}, group_sizes=group_sizes, **others)


def oriented(name: str, x: Tensor, axis: int, size: int, swapped: bool | None) -> Tensor:
    """`x` with its last two axes as documented, `axis`, -1 or -2, being of that size.

    They are swapped if the caller says so by the argument `name`, or does not say and only the
    other one is of that size.
    """
    if swapped is None:
        swapped = x.shape[axis] != size and x.shape[-3 - axis] == size
    else:
        check_flags(**{name: swapped})
    return x.mT if swapped else x


def result_dtype(preferred: torch.dtype | None, x: Tensor) -> torch.dtype:
    """The dtype of a fresh result: as preferred, or that of `x`."""
    if preferred is None:
        return x.dtype
    if preferred not in FLOATS:
        raise TypeError(f"preferred_element_type must be a floating dtype, not {preferred}")
    return preferred


def check_existing(out: Tensor, preferred: torch.dtype | None) -> None:
    """Raise unless `out` is a tensor of the dtype that is preferred, if any is."""
    check_tensor("existing_out", out)
    if preferred not in (None, out.dtype):
        raise TypeError(f"existing_out is {out.dtype} but preferred_element_type is {preferred}")


def check_plan_values(
    rows: int, group_sizes: Tensor | None = None, order: Tensor | None = None, rank: Tensor | None = None
) -> None:
    """Raise unless what is given of a plan for so many rows fits together; this synchronises.

    Group sizes are not negative, sum to `rows` at most and count no dropped row; order and rank stay below
    `rows` and are inverse.
    """
    for name, t in (("order", order), ("rank", rank)):
        if t is not None and t.numel() and t.max() >= rows:
            raise ValueError(f"{name} holds {int(t.max())} but there are {rows} rows")
    if group_sizes is not None:
        sizes = group_sizes.tolist()
        if min(sizes, default=0) < 0 or sum(sizes) > rows:
            raise ValueError(f"group_sizes {sizes} must not be negative nor sum to more than {rows} rows")
        if order is not None and (order[: sum(sizes)] < 0).any():
            raise ValueError(f"order drops a row that group_sizes {sizes} count")
    if order is not None and rank is not None:
        choices = (rank.flatten() >= 0).nonzero().flatten()
        held = order[rank.flatten()[choices].long()]
        if len(choices) != (order >= 0).sum() or not torch.equal(held.long(), choices):
            raise ValueError(
                "rank is not the inverse of order: rank[t, j] is the row r where order[r] is t*k + j"
            )
