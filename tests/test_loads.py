"""Products, and kernels that move rows, read no numbers of 8 or 16 bits one by one, on any target.

Such a load can't be asynchronous, so a product's loop is not pipelined: three to thirty times as slow.  Only
rows of an odd number of 16-bit numbers need it.  Not meant are biases, and what may begin anywhere: the
entries of a sparse matrix without blocks, and in ptgmm the ends of groups whose rows lie side by side.

`--cases all` compiles all combinations; otherwise some in which each of the values occurs.
"""

import dataclasses
import itertools

import pytest

from moe_aiter.config import interpret

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import compile_products as products
import compile_rows as rows
from aot import FEW_TARGETS, PRODUCTS, TARGETS, compiling_for
from compile_four_bit import run_four_bit
from compile_products import BF16, E4M3, E5M2, INT8, MOST_K, Dense, Shape

WIDTHS = {  # multiples of
    **{"64": (2880, 2880), "16": (720, 1008), "8": (360, 1000), "8 and 64": (1400, 2048)},
    **{"4": (724, 1004), "2": (722, 1006)},
}
BLOCKS = {2880: (64, 64), 720: (16, 48), 360: (8, 40), 1400: (64, 24), 724: (4, 20), 722: (2, 38)}
WEIGHTS = ["(E, out, in)", "(E, in, out)"]
STEP = 43  # has no divisor in common with the numbers of values
EXCUSED = {"expand_scales_kernel"}  # scales of blocks have 8 bits


def sized(s: Shape, **sizes) -> Shape:
    return dataclasses.replace(s, **sizes)


def gated(s: Shape) -> Shape:
    """n columns for gate and for up."""
    return sized(s, n=2 * s.n)


def masked(s, x=BF16, rows=1024, **how):
    size = 2 // x.itemsize
    products.run_masked(rows, size * s.n, size * s.k, x=x, columns=s.transposed, **how)


def scaled(s, x, rows=4096, k=0):
    products.run_scaled(rows, 2 * s.n, k or 2 * s.k, x=x, beside=False)


def dense(s, **how):
    Dense(**{"n": s.n, "k": s.k, "rows": not s.transposed, **how}).run()


def sparse(s, run, **how):
    run(BLOCKS[s.n], 4096, s.n, s.k, **how)


RUNS = {
    "up, halves": lambda s: products.run_up(gated(s)),
    "up, interleaved": lambda s: products.run_up(gated(s), interleaved=True),
    "up, not gated": lambda s: products.run_up(s, "relu2"),
    "up, few rows": lambda s: products.run_up(sized(gated(s), rows=1024)),
    "down_grad": products.run_down_grad,
    "down_grad, interleaved": lambda s: products.run_down_grad(s, interleaved=True),
    "gmm": products.run_gmm,
    "gmm, few rows": lambda s: products.run_gmm(sized(s, rows=1024)),
    "gmm into": lambda s: products.run_gmm_into(s, bias=False),
    "tgmm": products.run_tgmm,
    "tgmm, gathered": lambda s: products.run_tgmm_gather(s, s.transposed),
    "masked": masked,
    "masked, few rows": lambda s: masked(s, rows=32),
    "masked, 8 bits": lambda s: masked(s, E4M3),
    "masked, 8 bits, few rows": lambda s: masked(s, E5M2, 32),
    "masked, shuffled": lambda s: products.run_masked(1024, -s.n % 16 + s.n, s.k, x=BF16, shuffled=True),
    "segments": products.run_segment_gmm,
    "segments, 8 bits": lambda s: products.run_segment_gmm(sized(s, n=2 * s.n, k=2 * s.k), E5M2),
    "segments, low rank": lambda s: products.run_segment_gmm(sized(s, k=24)),
    "segments, to a low rank": lambda s: products.run_segment_gmm(sized(s, n=24)),
    "low rank, added": lambda s: products.run_add_low_rank(sized(s, k=24)),
    "segment_tgmm": lambda s: products.run_segment_tgmm(s, s.transposed),
    "four bits, nf4": lambda s: run_four_bit(s, "nf4", not s.transposed),
    "four bits, mxfp4": lambda s: run_four_bit(s, "mxfp4", not s.transposed),
    "four bits, int4": lambda s: run_four_bit(s, "int4", not s.transposed),
    "gemm": dense,
    "gemm, everything": lambda s: dense(s, activation="gelu", beta=0.5, save_z=True),
    "gemm, K split": lambda s: dense(s, m=128, k=8 * s.k),
    "gemm, one row": lambda s: dense(s, m=1, n=8 * s.n),
    "scaled, int8": lambda s: scaled(s, INT8),
    "scaled, int8, few rows": lambda s: scaled(s, INT8, 32),
    "scaled, int8, long": lambda s: scaled(s, INT8, k=MOST_K // 1024 * 1024 + 1024 + 16),
    "scaled, e4m3": lambda s: scaled(s, E4M3),
    "scaled, e5m2, few rows": lambda s: scaled(s, E5M2, 32),
    "scaled groups": lambda s: products.run_scaled_groups(2 * s.n, 2 * s.k, bias=False),
    "blocks": lambda s: sparse(s, products.run_sparse, transposed=s.transposed),
    "blocks, gradient": lambda s: sparse(s, products.run_sparse_grad),
    "permute": lambda s: rows.run_permute(BF16, True, s.k),
    "unpermute": lambda s: rows.run_unpermute(BF16, True, s.k),
    "row_dots": lambda s: rows.run_row_dots(BF16, s.k),
    "weigh_rows": lambda s: rows.run_weigh_rows(BF16, s.k),
    "group_sum": lambda s: rows.run_group_sum(False, s.k),
    "glu": lambda s: rows.run_glu("swiglu", h=s.n),
    "glu_backward": lambda s: rows.run_glu_backward("swiglu", h=s.n),
}


def pytest_generate_tests(metafunc):
    whole = metafunc.config.getoption("--cases") == "all"
    combinations = list(itertools.product(TARGETS if whole else FEW_TARGETS, RUNS, WEIGHTS, WIDTHS))
    metafunc.parametrize("target, run, layout, width", combinations[:: 1 if whole else STEP])


def test_loads_are_whole(target, run, layout, width):
    with compiling_for(TARGETS[target]) as launches:
        n, k = WIDTHS[width]
        RUNS[run](Shape(n=n, k=k, transposed=layout == WEIGHTS[1]))
    assert launches
    for launch in launches:
        if launch.kernel not in EXCUSED:
            assert not launch.narrow_loads, f"{launch.kernel}: {launch.narrow_loads[:3]}, {launch.spilled()}"
        if target.startswith("sm") and launch.kernel in PRODUCTS:
            assert "cp.async.commit_group" in launch.assembly, f"{launch.kernel} waits for each load"
