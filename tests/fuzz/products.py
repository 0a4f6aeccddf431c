"""Cases of products of groups, segments and single matrices that train."""

import torch
import torch.nn.functional as F

import moe_aiter
from moe_aiter.kernels.dense.tuned_gemm import tuned_gemm
from moe_aiter.kernels.experts.adapted import add_low_rank
from moe_aiter.kernels.grouped.tgmm import tgmm_accumulate
from moe_aiter.kernels.rows.sums import group_sum

from . import loops
from .draw import DEVICE, Draw, again, written_beside
from .hold import Case, target


def dead_rows(x, used: int):
    """NaN in the rows behind the groups, which nothing may read; where rows share memory they stay."""
    if x.stride(0) or not used:
        x[used:] = float("nan")
    return x


def wide_or(draw: Draw, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a bias or a weight of rows: that of x, or float32."""
    return draw.pick(dtype, torch.float32)


def written(out, fill) -> torch.Tensor:
    """`fill(out)` in a copy of `out`, beside which it may write nothing."""
    out = again(out.detach())
    before = again(out)
    fill(out)
    assert not written_beside(out, before), "the op wrote beside its output"
    return out


@target
def gmm(draw: Draw) -> Case:
    dtype, K, N = draw.dtype(), draw.size(), draw.size()
    group_sizes, sizes, M = draw.group_sizes(draw.count())
    lhs = dead_rows(draw.dense(draw.numbers(M, K, dtype=dtype)), sum(sizes))
    tensors = {"lhs": lhs, "rhs": draw.weights(len(sizes), K, N, dtype=dtype)}
    if draw.flip():
        tensors["bias"] = draw.numbers(len(sizes), N, dtype=wide_or(draw, dtype))
    out_dtype = draw.option(None, torch.float32)
    how = {"preferred_element_type": out_dtype, "work_stealing": draw.flip(0.2)}

    def ours(lhs, rhs, bias=None):
        trans = False if K == N else None
        return moe_aiter.gmm(lhs, rhs, group_sizes, bias=bias, trans_rhs=trans, **how)

    def plain(lhs, rhs, bias=None):
        return loops.grouped(lhs, rhs, sizes, bias, out_dtype)

    return Case(ours, plain, tensors, coarse=dtype)


@target
def gmm_into(draw: Draw) -> Case:
    """Rows behind the groups keep what they held; `rhs` comes as (G, N, K)."""
    dtype, K, N = draw.dtype(), draw.size(1), draw.size(1)
    group_sizes, sizes, M = draw.group_sizes(draw.count())
    tensors = {
        "lhs": draw.numbers(M, K, dtype=dtype),
        "rhs": draw.weights(len(sizes), K, N, dtype=dtype),
        "out": draw.dense(draw.numbers(M, N, dtype=wide_or(draw, dtype))),
    }

    def ours(lhs, rhs, out):
        def fill(out):
            given = {"existing_out": out, "preferred_element_type": out.dtype}
            assert moe_aiter.gmm(lhs, rhs.mT, group_sizes, trans_rhs=True, **given) is out

        return written(out, fill)

    def plain(lhs, rhs, out):
        product = loops.grouped(lhs, rhs, sizes, dtype=out.dtype)
        return torch.cat([product[: sum(sizes)], out[sum(sizes) :]])

    return Case(ours, plain, tensors, gradients=False)


@target
def tgmm(draw: Draw) -> Case:
    """Alone; with rows that are gathered by `order`; and added to a float32 sum."""
    dtype, K, N, k = draw.dtype(), draw.size(), draw.size(), draw.count(high=4)
    group_sizes, sizes, M = draw.group_sizes(draw.count())
    M = -(-M // k) * k
    order = torch.randperm(M, generator=draw.gen)
    tensors = {
        "x": draw.numbers(M, K, dtype=dtype),
        "y": dead_rows(draw.dense(draw.numbers(M, N, dtype=dtype)), sum(sizes)),
        "tokens": draw.numbers(M // k, K, dtype=dtype),
        "sums": draw.dense(draw.numbers(len(sizes), K, N, dtype=torch.float32)),
    }
    gathered = draw.index(order)

    def ours(x, y, tokens, sums):
        added = written(sums, lambda out: tgmm_accumulate(out, x, y, group_sizes))
        by_order = moe_aiter.tgmm(tokens, y, group_sizes, gathered, k)
        return moe_aiter.tgmm(x, y, group_sizes), by_order, added, group_sum(y, group_sizes)

    def plain(x, y, tokens, sums):
        rows = tokens[(order // k).to(tokens.device)]
        added = sums + loops.transposed(x, y, sizes, torch.float32)
        by_order = loops.transposed(rows, y, sizes)
        return loops.transposed(x, y, sizes), by_order, added, loops.group_sums(y, sizes)

    return Case(ours, plain, tensors, gradients=False)


@target
def ptgmm(draw: Draw) -> Case:
    """ptgmm and nptgmm, with the gradient of a bias."""
    dtype, K, N = draw.dtype(), draw.size(), draw.size()
    group_sizes, sizes, M = draw.group_sizes(draw.count())
    source, accumulate = draw.pick("lhs", "rhs"), draw.flip(0.3)
    persistent, sums = draw.flip(), draw.flip()
    tensors = {
        "x": draw.numbers(M, K, dtype=dtype),
        "y": draw.numbers(M, N, dtype=dtype),
        "out": draw.dense(draw.numbers(len(sizes), K, N, dtype=wide_or(draw, dtype))),
        "bias": draw.dense(draw.numbers(len(sizes), K if source == "lhs" else N, dtype=torch.float32)),
    }
    into = accumulate or draw.flip()

    def ours(x, y, out, bias):
        out, bias = again(out.detach()), again(bias.detach())
        how = {"accumulate": accumulate, "trans_lhs": False, "preferred_element_type": out.dtype}
        if into:
            how["existing_out"] = out
        if sums:
            how |= {"bias_grad": bias, "bias_grad_from": source}
        product = moe_aiter.ptgmm if persistent else moe_aiter.nptgmm
        return product(x.mT, y, group_sizes, **how), bias

    def plain(x, y, out, bias):
        product = loops.transposed(x, y, sizes, out.dtype)
        if accumulate:
            product = (product + out).to(out.dtype)
        return product, loops.group_sums(x if source == "lhs" else y, sizes) if sums else bias

    return Case(ours, plain, tensors, gradients=False)


@target
def grouped_gemm(draw: Draw) -> Case:
    dtype, K, N, E = draw.dtype(), draw.size(), draw.size(), draw.count()
    T, k = draw.size(high=40), draw.count(high=4)
    ids = draw.experts(T, k, E)
    each, weigh, reduce = draw.flip(0.3), draw.flip(), draw.pick("sum", "none")
    out_dtype = draw.option(None, torch.float32)
    tensors = {
        "input": draw.numbers(*((T, k, K) if each else (T, K)), dtype=dtype),
        "weights": draw.weights(E, K, N, dtype=dtype),
    }
    if weigh:
        tensors["routing_weights"] = draw.numbers(T, k, dtype=wide_or(draw, dtype))
    if draw.flip():
        tensors["bias"] = draw.numbers(E, N, dtype=wide_or(draw, dtype))

    def ours(input, weights, **rest):
        return moe_aiter.grouped_gemm(input, weights, ids, reduce=reduce, out_dtype=out_dtype, **rest)

    def plain(input, weights, routing_weights=None, bias=None):
        rows = []
        for t, experts in enumerate(ids.tolist()):
            for j, e in enumerate(experts):
                token = input[t, j] if each else input[t]
                row = None if e < 0 else token[None] @ weights[e]
                row = row if row is None or bias is None else row + bias[e]
                row = row if row is None or not weigh else row * routing_weights[t, j]
                rows.append(None if row is None else row[0])
        zero = loops.nothing(input, weights, routing_weights, bias)
        dtype = loops.wider(out_dtype, input)
        out = loops.stack(rows, input, N, loops.sum_dtype(dtype), zero).view(T, k, N)
        return (out.sum(1) if reduce == "sum" else out).to(dtype)

    return Case(ours, plain, tensors, coarse=dtype)


@target
def gemm(draw: Draw) -> Case:
    dtype, M, K, N = draw.dtype(), draw.size(), draw.size(), draw.size()
    lead = draw.pick((), (), (draw.size(high=3),), (2, 3))
    activation = draw.option(None, "relu", "gelu", "gelu_tanh", "silu", chance=0.6)
    batched = draw.flip(0.3)
    tensors = {
        "x": draw.numbers(*lead, M, K, dtype=dtype),
        "w": draw.weights(*(lead if batched else ()), K, N, dtype=dtype),
    }
    if draw.flip():
        tensors["bias"] = draw.numbers(N, dtype=wide_or(draw, dtype))
    how = {"alpha": draw.pick(1.0, 0.5), "beta": draw.pick(1.0, -2.0, 0.0), "activation": activation}
    how["out_dtype"] = draw.option(None, torch.float32)
    if draw.flip():
        shape = draw.pick((*lead, M, N), (N,), (M, 1))
        tensors["c"] = draw.numbers(*shape, dtype=wide_or(draw, dtype))
    else:
        how["beta"] = 0.0

    def ours(x, w, bias=None, c=None):
        return moe_aiter.gemm(x, w, bias, c=c, **how)

    def plain(x, w, bias=None, c=None):
        out = loops.wider(how["out_dtype"], x)
        wide = torch.promote_types(x.dtype, out)
        z = how["alpha"] * (x.to(wide) @ w.to(wide))
        z = z if bias is None else z + bias
        z = z + how["beta"] * c if how["beta"] else z
        z = z.to(out)
        acts = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu, None: lambda z: z}
        acts["gelu_tanh"] = lambda z: F.gelu(z, approximate="tanh")
        return acts[activation](z) + loops.nothing(c).to(out) if c is not None else acts[activation](z)

    return Case(ours, plain, tensors, coarse=dtype)


@target
def linear(draw: Draw) -> Case:
    """tuned_gemm, also scaled, and linear_with_split_bias, which are F.linear."""
    dtype, K, N = draw.dtype(), draw.size(), draw.size()
    lead = draw.pick((), (draw.size(),), (draw.size(high=9), draw.size(high=9)))
    kind = draw.pick("tuned", "tuned", "scaled", "split")
    out_dtype = draw.option(None, torch.float32) if kind != "split" else None
    tensors = {"x": draw.numbers(*lead, K, dtype=dtype), "weight": draw.weights(K, N, dtype=dtype).mT}
    if draw.flip():
        tensors["bias"] = draw.numbers(N, dtype=dtype)
    if kind == "scaled":
        tensors["x_scale"] = draw.numbers(*draw.pick((), (*lead, 1)), dtype=torch.float32)
        tensors["w_scale"] = draw.numbers(*draw.pick((), (N,), (N, 1)), dtype=torch.float32)

    def ours(x, weight, bias=None, **scales):
        if kind == "split":
            return moe_aiter.linear_with_split_bias(x, weight, bias)
        return tuned_gemm(x, weight, bias, out_dtype=out_dtype, **scales)

    def plain(x, weight, bias=None, x_scale=None, w_scale=None):
        out = loops.wider(out_dtype, x)
        wide = torch.promote_types(x.dtype, out)
        z = x.to(wide) @ weight.to(wide).mT
        if kind == "scaled":
            z = z * x_scale * (w_scale.flatten() if w_scale.dim() else w_scale)
        return (z if bias is None else z + bias).to(out)

    return Case(ours, plain, tensors, coarse=dtype)


@target
def low_rank(draw: Draw) -> Case:
    """add_low_rank, which adds to what is there."""
    dtype, rank, N = draw.dtype(), draw.size(1, 16), draw.size()
    group_sizes, sizes, M = draw.group_sizes(draw.count())
    tensors = {
        "out": draw.dense(draw.numbers(M, N, dtype=dtype)).to(DEVICE).contiguous(),
        "x": dead_rows(draw.dense(draw.numbers(M, rank, dtype=dtype)), sum(sizes)),
        "w": draw.weights(len(sizes), rank, N, dtype=dtype),
    }

    def ours(out, x, w):
        return written(out, lambda out: add_low_rank(out, x, w, group_sizes))

    def plain(out, x, w):
        return out + loops.grouped(x, w, sizes)

    return Case(ours, plain, tensors, gradients=False)
