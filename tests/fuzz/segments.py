"""Cases of products of segments, of sparse matrices, and of what goes with attention."""

import torch
import torch.nn.functional as F

import moe_aiter
from moe_aiter.kernels.dense.attention_mask import mask_bias, zero_rows

from . import loops
from .draw import DEVICE, Draw, again
from .hold import Case, target
from .products import dead_rows, wide_or, written

FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def draw_segments(draw: Draw):
    """Lengths or an indptr on the device, a number for each segment, the rows, and all of it as lists.

    Rows before the first segment, which an indptr may have, are a segment of no weight.
    """
    B, W = draw.count(), draw.count()
    lens, sizes, M = draw.group_sizes(B)
    numbers = [draw.name(W) for _ in range(B)]
    by_indptr, named = draw.flip(), draw.flip(0.7)
    if not named:
        W, numbers = B, list(range(B))
    first = draw.pick(0, 0, 3) if by_indptr else 0
    ends = [first + sum(sizes[:i]) for i in range(B + 1)]
    given = {"indptr": draw.index(ends)} if by_indptr else {"lens": lens}
    if named:
        given["weight_indices"] = draw.index(numbers)
    return given, [first, *sizes], [-1, *numbers], first + M, W


@target
def segment_gmm(draw: Draw) -> Case:
    dtype, K, N = draw.dtype(), draw.size(), draw.size()
    given, sizes, numbers, M, W = draw_segments(draw)
    tensors = {
        "x": dead_rows(draw.dense(draw.numbers(M, K, dtype=dtype)), sum(sizes)),
        "w": draw.weights(W, K, N, dtype=dtype),
    }

    def ours(x, w):
        return moe_aiter.segment_gmm(x, w, **given)

    def plain(x, w):
        return loops.segments(x, w, sizes, numbers)

    return Case(ours, plain, tensors)


@target
def segment_wrapper(draw: Draw) -> Case:
    """FlashInfer's call: column-major weights, an `out`, 8-bit floats."""
    dtype, K, N = draw.option(draw.dtype(), *FLOATS8, chance=0.2), draw.size(1), draw.size(1)
    given, sizes, numbers, M, W = draw_segments(draw)
    column_major, into = draw.flip(), draw.flip()
    held = torch.bfloat16 if dtype.itemsize == 1 else dtype
    tensors = {
        "x": draw.numbers(M, K, dtype=dtype),
        "weights": draw.weights(W, K, N, dtype=dtype),
        "out": draw.numbers(M, N, dtype=held).contiguous(),
    }
    names = {"lens": "seg_lens", "indptr": "seg_indptr"}
    given = {names.get(name, name): t for name, t in given.items()}
    wrapper = moe_aiter.SegmentGEMMWrapper(torch.empty(0, dtype=torch.int8, device=DEVICE))

    def ours(x, weights, out):
        weights = weights.mT if column_major else weights

        def run(out):
            return wrapper.run(x, weights, len(sizes) - 1, column_major, **given, out=out)

        return written(out, run) if into else run(None)

    def plain(x, weights, out):
        product = loops.segments(x, weights, sizes, numbers)
        first, end = sizes[0], sum(sizes)
        return torch.cat([out[:first], product[first:end], out[end:]]) if into else product

    return Case(ours, plain, tensors, gradients=False, frozen=("out",), coarse=held)


@target
def sparse_gemm(draw: Draw) -> Case:
    """Every layout of a weight (N, K), also the values of a SparsePattern."""
    dtype = draw.dtype()
    block = draw.pick(16, 32, (16, 32)) if draw.flip() else draw.pick(1, 2, 4, (2, 3))
    down, across = (block, block) if isinstance(block, int) else block
    R, C = draw.size(1, 4 if down > 8 else 9), draw.size(1, 4 if across > 8 else 9)
    N, K = R * down, C * across
    lead = draw.pick((draw.size(),), (draw.size(high=4), draw.size(high=9)))
    there = torch.rand(R, C, generator=draw.gen) < draw.pick(0.0, 0.3, 0.3, 1.0)
    there = there.to(DEVICE)
    whole = there.repeat_interleave(down, 0).repeat_interleave(across, 1)  # (N, K)
    layout = draw.pick("pattern", "dense", "csr", "csc", "coo", "bsr", "bsc")
    bias = draw.flip()
    if isinstance(block, int) and block == 1 and layout in ("bsr", "bsc"):
        layout = "csr"
    kind = draw.pick("csr", "coo", "block") if down >= 16 else draw.pick("csr", "coo")
    pattern = moe_aiter.SparsePattern.from_mask(there, block)
    tensors = {
        "input": draw.numbers(*lead, K, dtype=dtype),
        "weight": draw.numbers(N, K, dtype=dtype, scale=K**-0.5) * whole,
    }
    if bias:
        tensors["bias"] = draw.numbers(N, dtype=dtype)

    def ours(input, weight, bias=None):
        if layout == "pattern":
            return moe_aiter.sparse_gemm(input, pattern.take(weight), pattern, bias=bias)
        if layout == "dense":
            how = {"sparsity_pattern": kind, "blocksize": block if kind == "block" else None}
            return moe_aiter.sparse_gemm(input, weight, bias=bias, **how)
        return moe_aiter.sparse_gemm(input, as_layout(weight), bias=bias)

    def as_layout(weight):
        size = {"blocksize": (down, across)} if layout in ("bsr", "bsc") else {}
        return getattr(weight, "to_sparse" if layout == "coo" else f"to_sparse_{layout}")(**size)

    def plain(input, weight, bias=None):
        rows = input.reshape(-1, K)
        columns = [rows @ (weight[n] * whole[n]) for n in range(N)]
        out = torch.stack(columns, -1).view(*lead, N)
        return out if bias is None else out + bias

    frozen = () if layout == "pattern" else ("weight",)
    return Case(ours, plain, tensors, frozen=frozen)


@target
def attention_mask(draw: Draw) -> Case:
    """The bias of a mask, and zeros for rows that see no key."""
    B, H, Q, K = draw.size(high=3), draw.size(high=3), draw.size(high=33), draw.size()
    mask = torch.rand(B, H, Q, K, generator=draw.gen) < draw.pick(0.02, 0.5, 0.0, 1.0)
    out = draw.numbers(B, H, Q, 8, dtype=draw.dtype())
    tensors = {"mask": draw.lay(mask), "out": again(draw.dense(out))}
    dtype = draw.dtype()

    def ours(mask, out):
        bias, alive = mask_bias(mask, dtype)
        return bias, alive, written(out, lambda out: zero_rows(out, alive))

    def plain(mask, out):
        bias = torch.zeros(B, H, Q, K, dtype=dtype, device=mask.device)
        alive = torch.zeros(B, H, Q, 1, dtype=torch.bool, device=mask.device)
        out = out.clone()
        for row in torch.cartesian_prod(*(torch.arange(n) for n in (B, H, Q))).tolist():
            b, h, q = row
            alive[b, h, q] = bool(mask[b, h, q].any())
            if alive[b, h, q]:
                bias[b, h, q, ~mask[b, h, q]] = -65504.0 if dtype.itemsize == 2 else -torch.inf
            else:
                out[b, h, q] = 0
        return bias, alive, out

    return Case(ours, plain, tensors, gradients=False, exact=True)


@target
def fused_linears(draw: Draw) -> Case:
    """Projections of one input as one product, and nn.Linear that is patched."""
    dtype, K = draw.dtype(), draw.size(1)
    widths = [draw.size(1, 33) for _ in range(3)]
    kind, bias, frozen = draw.pick("qkv", "gate_up", "patched", "model"), draw.flip(), draw.flip()
    widths = widths[:2] if kind == "gate_up" else widths
    tensors = {"x": draw.numbers(draw.size(), K, dtype=dtype)}
    layers = []
    for i, N in enumerate(widths):
        tensors[f"w{i}"] = draw.weights(K, N, dtype=dtype).mT
        tensors[f"b{i}"] = draw.numbers(N, dtype=wide_or(draw, dtype)).to(dtype)
        layers.append(torch.nn.Linear(K, N, bias=bias, device=DEVICE, dtype=dtype))

    def ours(x, **weights):
        with torch.no_grad():
            for i, layer in enumerate(layers):
                layer.weight.copy_(weights[f"w{i}"])
                layer.requires_grad_(not frozen)
                if bias:
                    layer.bias.copy_(weights[f"b{i}"])
        if kind == "patched":
            with moe_aiter.patch_linear():
                return [layer(x) for layer in layers]
        if kind == "model":
            names = ("q_proj", "k_proj", "v_proj")
            model = torch.nn.ModuleDict(dict(zip(names, layers, strict=True)))
            assert moe_aiter.fuse_projections(model) == 1
            results = [model[name](x) for name in names]
            assert moe_aiter.unfuse(model) == 3
            assert all(
                torch.equal(model[n].weight, layer.weight) for n, layer in zip(names, layers, strict=True)
            )
            return results
        fuse = moe_aiter.fuse_qkv if kind == "qkv" else moe_aiter.fuse_gate_up
        parts = fuse(*layers)
        return [part(x) for part in parts]

    def plain(x, **weights):
        return [F.linear(x, weights[f"w{i}"], weights[f"b{i}"] if bias else None) for i in range(len(widths))]

    return Case(ours, plain, tensors, frozen=tuple(name for name in tensors if name != "x"))
