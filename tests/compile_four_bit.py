"""A launch for test_compile.py: the products with weights of 4 bits."""

import torch
from aot import ints, new

from moe_aiter.kernels.grouped.four_bit import FourBitInputs, bind_four_bit_gmm
from moe_aiter.kernels.quantize.four_bit import FORMATS, NESTED

E, TOP_K = 128, 8


def run_four_bit(s, format="nf4", transpose=True, double=True, bias=False, bind=bind_four_bit_gmm):
    """Forward with gathered rows, or with `transpose=False` the gradient of the rows."""
    u8, f32, block = torch.uint8, torch.float32, FORMATS[format].block
    rows, columns = (s.n, s.k) if transpose else (s.k, s.n)
    columns -= columns % block
    nested = offset = table = None
    scales = new(
        E, rows, columns // block, dtype=torch.float16 if format == "int4" else u8 if double else f32
    )
    if format == "int4":
        offset = new(*scales.shape, dtype=u8)
    elif format == "nf4":
        table = new(16 + 256 * double, dtype=f32)
        if double:
            nested, offset = new(-(-scales.numel() // NESTED), dtype=f32), new(E, dtype=f32)
    N, K = (rows, columns) if transpose else (columns, rows)
    order, x = (ints(s.rows), s.new(s.rows // TOP_K, K)) if transpose else (None, s.new(s.rows, K))
    parts = new(E, rows, columns // 2, dtype=u8), scales, nested, offset, table, format
    b = s.new(E, N) if bias else None
    i = FourBitInputs(x, *parts, transpose, ints(E), b, order, TOP_K if transpose else 1)
    bind(i)(s.new(s.rows, N), i)


def rounds_scales_twice(target, launches):
    """A product and an addition in one instruction would not round as bitsandbytes does."""
    (text,) = (launch.assembly for launch in launches if launch.kernel == "expand_scales_kernel")
    fused = "fma." if target.startswith("sm") else "fma"
    assert fused not in text
