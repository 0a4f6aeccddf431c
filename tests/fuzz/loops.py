"""What products and permutations mean: plain loops over groups, rows and slots, in the dtype of the input."""

import torch
from torch import Tensor


def spans(sizes: list[int]):
    """(group, first row, row behind the last) of each group."""
    first = 0
    for g, size in enumerate(sizes):
        yield g, first, first + size
        first += size


def nothing(*tensors: Tensor | None) -> Tensor:
    """0, with a gradient of zeros for every tensor, also one that no row uses and one that holds NaN."""
    return sum(t.flatten()[:0].sum() for t in tensors if t is not None)


def stack(rows: list[Tensor | None], like: Tensor, width: int, dtype: torch.dtype, zero: Tensor) -> Tensor:
    """Rows as one tensor, zeros for None."""
    zeros = like.new_zeros(width, dtype=dtype)
    filled = [zeros if row is None else row.to(dtype) for row in rows]
    return (torch.stack(filled) if filled else like.new_zeros(0, width, dtype=dtype)) + zero.to(dtype)


def grouped(lhs, rhs, sizes, bias=None, dtype=None):
    """Row after row times the matrix of its group."""
    dtype = wider(dtype, lhs)
    wide = torch.promote_types(lhs.dtype, dtype)
    rows, w = [None] * len(lhs), rhs.to(wide).unbind(0)
    b = None if bias is None else bias.to(sum_dtype(wide)).unbind(0)
    for g, s, e in spans(sizes):
        for r in range(s, min(e, len(lhs))):
            rows[r] = (lhs[r : r + 1].to(wide) @ w[g])[0]
            if b is not None:
                rows[r] = rows[r].to(b[g].dtype) + b[g]
    return stack(rows, lhs, rhs.shape[2], dtype, nothing(lhs, rhs, bias))


def transposed(x, y, sizes, dtype=None):
    """(G, K, N): of each group the sum over its rows of the outer product of a row of x and one of y."""
    dtype = wider(dtype, x)
    wide = torch.promote_types(x.dtype, dtype)
    out = [torch.zeros(x.shape[1], y.shape[1], dtype=wide, device=x.device) for _ in sizes]
    for g, s, e in spans(sizes):
        if e > s:
            out[g] = (x[s:e].to(wide)).mT @ y[s:e].to(wide)
    return torch.stack(out).to(dtype)


def wider(dtype: torch.dtype | None, x: Tensor) -> torch.dtype:
    """The dtype that is asked for, but float64 in the run that is the truth."""
    return torch.float64 if x.dtype == torch.float64 else dtype or x.dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def group_sums(y, sizes):
    out = [y[s:e].to(sum_dtype(y.dtype)).sum(0) for _, s, e in spans(sizes)]
    return torch.stack(out)


def sort(expert_ids: Tensor, experts: int):
    """order, rank and group sizes, by looking at every choice for every expert."""
    flat = expert_ids.flatten().tolist()
    chosen = [[i for i, e in enumerate(flat) if e == expert] for expert in range(experts)]
    order = [i for rows in chosen for i in rows]
    rank = {i: r for r, i in enumerate(order)}
    order += [-1] * (len(flat) - len(order))
    ranks = [rank.get(i, -1) for i in range(len(flat))]
    as_int = {"dtype": torch.int32, "device": expert_ids.device}
    return (
        torch.tensor(order, **as_int),
        torch.tensor(ranks, **as_int).view(expert_ids.shape),
        torch.tensor([len(rows) for rows in chosen], **as_int),
    )


def permuted(x, rank, weights=None, rows=None):
    """(T, H) -> (R, H): slot after slot puts its token into the row of its rank."""
    out = [None] * rank.numel()
    for t, ranks in enumerate(rank.tolist()):
        for j, r in enumerate(ranks):
            if r >= 0:
                out[r] = x[t] if weights is None else scaled(x[t], weights[t, j])
    return stack(out, x, x.shape[1], x.dtype, nothing(x, weights))


def unpermuted(rows, rank, weights=None, width=None):
    """(R, H) -> (T, H): the weighted sum of a token's rows."""
    out = []
    for t, ranks in enumerate(rank.tolist()):
        total = None
        for j, r in enumerate(ranks):
            if r >= 0:
                row = rows[r].to(sum_dtype(rows.dtype))
                row = row if weights is None else row * weights[t, j]
                total = row if total is None else total + row
        out.append(total)
    return stack(out, rows, rows.shape[1], rows.dtype, nothing(rows, weights))


def scaled(row: Tensor, weight: Tensor) -> Tensor:
    return (row.to(sum_dtype(row.dtype)) * weight).to(row.dtype)


def rounded8(x: Tensor, format: str = "e4m3") -> Tensor:
    """The rows of x as 8 bits with a scale of each row, and back: what is left of the numbers.

    In float64, the truth, all of them.
    """
    most = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}[format]
    wide = x.to(sum_dtype(x.dtype))
    if not x.numel() or x.dtype == torch.float64:
        return x
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
    narrow = (wide / scale).clamp(-most, most)
    if format == "int8":
        narrow = narrow.round()
    else:
        kind = torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2
        narrow = narrow.to(kind).to(wide.dtype)
    return (narrow * scale).to(x.dtype)


def segments(x, w, lens: list[int], numbers: list[int]):
    """Row after row times the matrix that its segment names; zeros where it names none."""
    rows, matrices = [None] * len(x), as_wide(w).unbind(0)
    for i, s, e in spans(lens):
        for r in range(s, min(e, len(x))):
            if 0 <= numbers[i] < len(w):
                rows[r] = (as_wide(x[r : r + 1]) @ matrices[numbers[i]])[0]
    dtype = x.dtype if x.dtype.itemsize > 1 else torch.bfloat16
    return stack(rows, as_wide(x), w.shape[2], dtype, nothing(as_wide(x), as_wide(w)))


def as_wide(x: Tensor) -> Tensor:
    """Numbers of 8 bits, which torch does not multiply, as float32, which has all of them."""
    return x.float() if x.dtype.itemsize == 1 else x
