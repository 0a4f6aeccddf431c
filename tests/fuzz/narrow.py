"""Cases of products of 8-bit numbers, of their quantisation, and of masked products."""

import torch

from moe_aiter import gmm, nptgmm, ptgmm
from moe_aiter import scaled_gemm as public_scaled_gemm
from moe_aiter.kernels.base.shuffle import shuffle_weight
from moe_aiter.kernels.grouped.masked_gmm import masked_gmm as public_masked_gmm
from moe_aiter.kernels.grouped.masked_gmm import scaled_bmm
from moe_aiter.kernels.grouped.scaled_gemm import scaled_gmm as public_scaled_gmm
from moe_aiter.kernels.hopper import is_hopper
from moe_aiter.kernels.quantize.layouts import quantize_folded, quantize_transposed, transpose_rows8
from moe_aiter.kernels.quantize.rows import (
    dequantize_rows,
    quantize_by_amax,
    quantize_rows,
    quantize_rows_and_amax,
)
from moe_aiter.kernels.quantize.scale_blocks import dequantize, quantize_blocks

from . import loops
from .draw import DEVICE, Draw
from .hold import Case, target
from .products import wide_or, written
from .segments import FLOATS8

WIDE = (torch.float32, torch.bfloat16, torch.float16)


def eight_bits(draw: Draw):
    """The dtypes of both operands."""
    return draw.pick((torch.int8, torch.int8), (draw.pick(*FLOATS8), draw.pick(*FLOATS8)))


def of_8_bits(draw: Draw, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return draw.lay(torch.randint(-128, 128, shape, generator=draw.gen).to(dtype))
    return draw.numbers(*shape, dtype=dtype)


def scale(draw: Draw, *shapes: tuple, chance: float = 0.8):
    """Nothing, or positive factors."""
    return draw.numbers(*draw.pick(*shapes), dtype=torch.float32).abs() if draw.flip(chance) else None


def given(**tensors):
    return {name: t for name, t in tensors.items() if t is not None}


def exact(x: torch.Tensor) -> torch.Tensor:
    """Numbers whose products of 8 bits torch adds up: float64 has all of these sums."""
    return x.double()


def times(out: torch.Tensor, row, column, bias, dtype: torch.dtype) -> torch.Tensor:
    for factor in (row, column):
        out = out if factor is None else out * factor
    return (out if bias is None else out + bias).to(dtype)


def sums_of(dtype: torch.dtype) -> float | None:
    """How much a sum of products is rounded on the way: Hopper keeps some 14 bits for 8-bit floats."""
    return 2**-13 if dtype in FLOATS8 and is_hopper(DEVICE) else None


@target
def scaled_gemm(draw: Draw) -> Case:
    (xt, wt), M, K, N = eight_bits(draw), draw.size(), draw.size(), draw.size()
    out_dtype = draw.dtype(*WIDE) if xt != torch.int8 else draw.pick(torch.float32, torch.bfloat16)
    tensors = given(
        x=of_8_bits(draw, M, K, dtype=xt),
        w=of_8_bits(draw, K, N, dtype=wt),
        x_scale=scale(draw, (), (M,), (M, 1)),
        w_scale=scale(draw, (), (N,), (N, 1), (1, N)),
        bias=draw.numbers(N, dtype=wide_or(draw, out_dtype)) if draw.flip() else None,
    )

    def ours(x, w, x_scale=None, w_scale=None, bias=None):
        return public_scaled_gemm(x, w, x_scale, w_scale, bias, out_dtype=out_dtype)

    def plain(x, w, x_scale=None, w_scale=None, bias=None):
        row = x_scale if x_scale is None or not x_scale.dim() else x_scale.reshape(M, 1)
        column = w_scale if w_scale is None or not w_scale.dim() else w_scale.reshape(N)
        return times(exact(x) @ exact(w), row, column, bias, out_dtype)

    return Case(ours, plain, tensors, gradients=False, coarse=sums_of(xt))


@target
def scaled_gmm(draw: Draw) -> Case:
    (xt, wt), K, N, k = eight_bits(draw), draw.size(), draw.size(), draw.count(high=4)
    group_sizes, sizes, M = draw.group_sizes(draw.count())
    M, G = -(-M // k) * k, len(sizes)
    gathered, out_dtype = draw.flip(), draw.pick(torch.float32, torch.bfloat16)
    order = torch.randperm(M, generator=draw.gen)
    rows = M // k if gathered else M
    tensors = given(
        x=of_8_bits(draw, rows, K, dtype=xt),
        w=of_8_bits(draw, G, K, N, dtype=wt),
        x_scale=scale(draw, (rows,)),
        w_scale=scale(draw, (G, N)),
        bias=draw.numbers(G, N, dtype=wide_or(draw, out_dtype)) if draw.flip() else None,
    )
    how = {"order": draw.index(order), "top_k": k} if gathered else {}

    def ours(x, w, x_scale=None, w_scale=None, bias=None):
        return public_scaled_gmm(x, w, group_sizes, x_scale, w_scale, bias, **how, out_dtype=out_dtype)

    def plain(x, w, x_scale=None, w_scale=None, bias=None):
        out = exact(x).new_zeros(M, N)
        for g, s, e in loops.spans(sizes):
            for r in range(s, e):
                t = int(order[r]) // k if gathered else r
                factors = (None if f is None else f[i] for f, i in ((x_scale, t), (w_scale, g), (bias, g)))
                out[r] = times(exact(x[t]) @ exact(w[g]), *factors, torch.float64)
        return out.to(out_dtype)

    return Case(ours, plain, tensors, gradients=False, coarse=sums_of(xt))


@target
def gmm_8_bits(draw: Draw) -> Case:
    """`gmm` with scales of rows or of blocks, fresh and into a tensor that keeps its last rows."""
    xt, wt, K, N = draw.pick(*FLOATS8), draw.pick(*FLOATS8), draw.size(1), draw.size(1)
    group_sizes, sizes, M = draw.group_sizes(draw.count())
    G, out_dtype, blocks = len(sizes), draw.pick(*WIDE), draw.flip()
    tensors = {
        "lhs": of_8_bits(draw, M, K, dtype=xt),
        "rhs": of_8_bits(draw, G, K, N, dtype=wt),
        "lhs_scale": scale(draw, (M, 1) if blocks else (M,), chance=1),  # no size reaches a second block
        "rhs_scale": scale(draw, (G, 1, 1) if blocks else (G, N), chance=1),
        "out": draw.dense(draw.numbers(M, N, dtype=out_dtype)),
    }
    if draw.flip():
        tensors["bias"] = draw.numbers(G, N, dtype=wide_or(draw, out_dtype))

    def ours(lhs, rhs, out, **named):
        named |= {"preferred_element_type": out_dtype, "trans_rhs": False}
        into = written(out, lambda out: gmm(lhs, rhs, group_sizes, existing_out=out, **named))
        return gmm(lhs, rhs, group_sizes, **named), into

    def plain(lhs, rhs, lhs_scale, rhs_scale, out, bias=None):
        exact_lhs, column = exact(lhs) * lhs_scale.view(M, 1), rhs_scale if not blocks else rhs_scale[:, 0]
        product = loops.grouped(exact_lhs, exact(rhs) * column[:, None], sizes, bias).to(out.dtype)
        return product, torch.cat([product[: sum(sizes)], out[sum(sizes) :]])

    coarse = out_dtype if blocks else sums_of(xt)
    return Case(ours, plain, tensors, gradients=False, coarse=coarse)


@target
def ptgmm_8_bits(draw: Draw) -> Case:
    """ptgmm and nptgmm with a scale for each column of each group."""
    xt, yt, K, N = draw.pick(*FLOATS8), draw.pick(*FLOATS8), draw.size(), draw.size()
    group_sizes, sizes, M = draw.group_sizes(draw.count())
    G, product, accumulate = len(sizes), draw.pick(ptgmm, nptgmm), draw.flip()
    tensors = {
        "x": of_8_bits(draw, M, K, dtype=xt),
        "y": of_8_bits(draw, M, N, dtype=yt),
        "lhs_scale": scale(draw, (G, K), chance=1),
        "rhs_scale": scale(draw, (G, N), chance=1),
        "out": draw.dense(draw.numbers(G, K, N, dtype=draw.pick(*WIDE))),
    }

    def ours(x, y, out, **scales):
        def fill(out):
            product(x.mT, y, group_sizes, existing_out=out, accumulate=accumulate, trans_lhs=False, **scales)

        return written(out, fill)

    def plain(x, y, lhs_scale, rhs_scale, out):
        sums = loops.transposed(exact(x), exact(y), sizes) * lhs_scale[:, :, None] * rhs_scale[:, None]
        return (sums + out if accumulate else sums).to(out.dtype)

    return Case(ours, plain, tensors, gradients=False, coarse=sums_of(xt))


@target
def masked_gmm(draw: Draw) -> Case:
    """The first rows of each group, into a tensor that keeps the others; also scaled_bmm, of all rows."""
    G, M, K, N = draw.count(high=5), draw.size(high=33), draw.size(), draw.size()
    batched = draw.flip(0.3)
    shuffled = not batched and draw.flip(0.3)
    if shuffled:
        K, N = 32 * draw.count(high=2), 16 * draw.count(high=2)
    if draw.flip():
        xt, wt = draw.pick(*FLOATS8), draw.pick(*FLOATS8)
        out_dtype = draw.dtype(*WIDE)
    else:
        xt = wt = out_dtype = draw.dtype()
    sizes = [draw.form.randint(0, M) for _ in range(G)]
    group_sizes = draw.index(sizes) if draw.flip(0.7) and not batched else None
    sizes = [M] * G if group_sizes is None else sizes
    x_shapes, w_shapes = (((G,), (G, n)) for n in (M, N))
    tensors = given(
        out=draw.dense(draw.numbers(G, M, N, dtype=out_dtype)),
        x=of_8_bits(draw, G, M, K, dtype=xt),
        w=of_8_bits(draw, G, N, K, dtype=wt),
        x_scale=scale(draw, *x_shapes, *(() if batched else ((G, 1, 1), (G, M, 1)))),
        w_scale=scale(draw, *w_shapes, *(() if batched else ((G, 1, 1), (G, N, 1)))),
    )

    def ours(out, x, w, x_scale=None, w_scale=None):
        def fill(out):
            if batched:
                return scaled_bmm(x, w.mT, x_scale, w_scale, out=out)
            order = shuffle_weight(w) if shuffled else w
            return public_masked_gmm(out, x, order, group_sizes, x_scale, w_scale, shuffled=shuffled)

        return written(out, fill)

    def plain(out, x, w, x_scale=None, w_scale=None):
        kept = []
        for g in range(G):
            product = loops.as_wide(x[g]) @ loops.as_wide(w[g]).mT
            row = None if x_scale is None else x_scale[g].reshape(-1, 1)
            column = None if w_scale is None else w_scale[g].flatten()
            rows = times(product, row, column, None, out.dtype)
            kept.append(torch.cat([rows[: sizes[g]], out[g, sizes[g] :]]))
        return torch.stack(kept)

    return Case(ours, plain, tensors, gradients=False, coarse=xt if xt.itemsize > 1 else sums_of(xt))


@target
def quantize(draw: Draw) -> Case:
    """Rows and columns as 8 bits: as near as a plain rounding; the same bits from each function."""
    dtype, format = draw.dtype(), draw.pick("e4m3", "e5m2", "int8")
    lead = draw.pick((), (draw.size(high=4),))
    M, K = draw.size(), draw.size()
    tensors = {"x": draw.numbers(*lead, M, K, dtype=dtype)}
    group_sizes, sizes, rows = draw.group_sizes(draw.count())
    tensors["y"] = draw.numbers(rows, K, dtype=dtype)
    tensors["factor"] = draw.numbers(len(sizes), K, dtype=torch.float32)
    floats, square = format if format != "int8" else "e4m3", draw.flip()

    def ours(x, y, factor):
        x8, scales = quantize_rows(x, format)
        back = dequantize_rows(x8, scales, dtype)
        folded = dequantize_rows(*quantize_folded(y, factor, group_sizes, floats), torch.float32)
        x8, scales, amax = quantize_rows_and_amax(x, floats)
        columns = quantize_by_amax(x.mT, amax, floats)
        for a, b in zip(columns, quantize_rows(x.mT, floats), strict=True):
            assert torch.equal(a.float(), b.float()), "quantize_by_amax differs from quantize_rows"
        if lead:
            turned = quantize_transposed(x, scales, floats)
            assert torch.equal(turned.float(), x8.float().mT), "quantize_transposed differs"
            assert torch.equal(transpose_rows8(x8).float(), x8.float().mT), "transpose_rows8 differs"
        blocks = dequantize(*quantize_blocks(x, square, floats), dtype)
        return back, dequantize_rows(*columns, dtype), folded, blocks

    def plain(x, y, factor):
        wide = loops.sum_dtype(y.dtype)
        folded = torch.zeros(rows, K, dtype=wide, device=y.device)
        for g, s, e in loops.spans(sizes):
            folded[s:e] = y[s:e].to(wide) * factor[g]
        of_rows = [loops.rounded8(t, to) for t, to in ((x, format), (x.mT, floats), (folded, floats))]
        blocks = x.flatten(-2) if square else x  # no size reaches a second block
        return *of_rows, loops.rounded8(blocks, floats).view(x.shape)

    return Case(ours, plain, tensors, gradients=False)
