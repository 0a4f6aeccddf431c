"""Cases for test_compile.py: the portable products."""

import dataclasses
import functools
import re

import torch
from aot import TARGETS, Case, compiling_for, in_passes, ints, new, with_tile
from check import launcher
from compile_four_bit import rounds_scales_twice, run_four_bit
from shapes import CAPPED, LIMITED

from moe_aiter import tuning
from moe_aiter.kernels.base.activations import get_activation
from moe_aiter.kernels.base.fp8 import FP8, native_fp8
from moe_aiter.kernels.base.gemm_row import GemmInputs
from moe_aiter.kernels.base.tile import PERSISTENT
from moe_aiter.kernels.dense.gemm import ACTIVATIONS, bind_gemm
from moe_aiter.kernels.experts.adapted import AddLowRankInputs, bind_add_low_rank
from moe_aiter.kernels.experts.down import DownGradInputs, bind_expert_down_grad
from moe_aiter.kernels.experts.up import UpInputs, bind_expert_up
from moe_aiter.kernels.grouped.gmm import GroupedInputs, GroupedIntoInputs, bind_gmm, bind_gmm_into
from moe_aiter.kernels.grouped.masked_gmm import MaskedInputs, bind_masked_gmm
from moe_aiter.kernels.grouped.scaled_gemm import (
    MOST_K,
    ScaledGroupsInputs,
    ScaledInputs,
    bind_scaled_gemm,
    bind_scaled_gmm,
)
from moe_aiter.kernels.grouped.segment_gmm import SegmentInputs, bind_segments
from moe_aiter.kernels.grouped.segments import SegmentTgmmInputs, bind_segment_tgmm
from moe_aiter.kernels.grouped.tgmm import TgmmInputs, TgmmIntoInputs, bind_tgmm, bind_tgmm_into
from moe_aiter.kernels.quantize.four_bit import FORMATS
from moe_aiter.kernels.sparse.gemm import bind_sparse_matmul, bind_sparse_matmul_grad
from moe_aiter.kernels.sparse.pattern import count
from moe_aiter.private_api import reads_registers_in_time
from moe_aiter.tuning.candidates import PORTABLE
from moe_aiter.tuning.store import load

E, TOP_K = 128, 8
BF16, F16, F32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
E4M3, FNUZ, E5M2 = FP8


@dataclasses.dataclass(frozen=True)
class Shape:
    """R rows, N columns and K to sum over, in E groups; weights have their rows or columns side by side."""

    rows: int = 1024 * E
    n: int = 4096
    k: int = 4096
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = False

    def new(self, *shape):
        return new(*shape, dtype=self.dtype)

    def weight(self, groups, a, b):
        return self.new(groups, b, a).mT if self.transposed else self.new(groups, a, b)

    @property
    def plan(self):
        """order, rank and group_sizes."""
        return ints(self.rows), ints(self.rows // TOP_K, TOP_K), ints(E)


def run_gmm(s, bias=False):
    w, b = s.weight(E, s.n, s.k).mT, s.new(E, s.n) if bias else None
    i = GroupedInputs(s.new(s.rows, s.k), w, ints(E), b)
    bind_gmm(i)(s.new(s.rows, s.n), i)


def run_gmm_into(s, dtype=F32, tile=(), programs=PERSISTENT, starts=None, bias=True):
    out, bias = new(s.rows, s.n, dtype=dtype), s.new(E, s.n) if bias else None
    operands = s.new(s.rows, s.k), s.new(E, s.k, s.n), ints(E, dtype=torch.int64)
    i = GroupedIntoInputs(out, *operands, bias, tile, programs, starts)
    bind_gmm_into(i)(out, i)


def run_tgmm_into(s, dtype=F32, accumulate=False, of_y=False, tile=(), programs=PERSISTENT):
    """As ptgmm runs it on a (K, M) lhs, with the gradient of a bias."""
    out, sums = new(E, s.k, s.n, dtype=dtype), new(E, s.n if of_y else s.k, dtype=F32)
    operands = s.new(s.k, s.rows).mT, s.new(s.rows, s.n), ints(E, dtype=torch.int64), None, 1
    i = TgmmIntoInputs(out, *operands, accumulate, sums, of_y, tile, programs)
    bind_tgmm_into(i)(out, i)


def run_tgmm(s):
    i = TgmmInputs(s.new(s.rows, s.k), s.new(s.rows, s.n), ints(E), None, 1, False)
    bind_tgmm(i)(s.new(E, s.k, s.n), i)


def run_tgmm_gather(s, columns_first=False):
    out = s.new(E, s.n, s.k) if columns_first else s.new(E, s.k, s.n)
    x, y = s.new(s.rows // TOP_K, s.k), s.new(s.rows, s.n)
    i = TgmmInputs(x, y, ints(E), ints(s.rows), TOP_K, columns_first)
    bind_tgmm(i)(out, i)


def run_tgmm_accumulate(s):
    out, x, y = new(E, s.k, s.n, dtype=F32), s.new(s.rows, s.k), s.new(s.rows, s.n)
    i = TgmmIntoInputs(out, x, y, ints(E), None, 1)
    bind_tgmm_into(i)(out, i)


def run_up(s, activation="swiglu", interleaved=False, bias=False, save_z=True, save_a=True):
    width = s.n // get_activation(activation).projections
    z, a = s.new(s.rows, s.n), s.new(s.rows, width) if save_a else None
    x, w, b = s.new(s.rows // TOP_K, s.k), s.weight(E, s.n, s.k), s.new(E, s.n) if bias else None
    i = UpInputs(x, w, b, *s.plan, activation, interleaved, save_z, 0, None)
    bind_expert_up(i, save_a)((z, a), i)


def run_down_grad(s, activation="swiglu", interleaved=False, need_a=True):
    parts = get_activation(activation).projections
    order, rank, group_sizes = s.plan
    z, dz = s.new(s.rows, parts * s.n), s.new(s.rows, parts * s.n)
    ds, weights = new(*rank.shape, dtype=F32), new(*rank.shape, dtype=F32)
    i = DownGradInputs(
        s.new(s.rows // TOP_K, s.k), z, s.weight(E, s.k, s.n),
        weights, order, rank, group_sizes, activation, interleaved, need_a,
    )  # fmt: skip
    bind_expert_down_grad(i)((dz, s.new(s.rows, s.n), ds), i)


def run_segment_gmm(s, dtype=None, indices=True, segments=E):
    """With lengths and indices, or neither."""
    operands = dataclasses.replace(s, dtype=dtype or s.dtype)
    x, w = operands.new(s.rows, s.k), operands.weight(E, s.n, s.k).mT
    plan = (ints(segments), None, ints(segments)) if indices else (None, ints(segments + 1), None)
    i = SegmentInputs(x, w, *plan)
    bind_segments(i, s.dtype)(s.new(s.rows, s.n), i)


def run_segment_expand(s, **kwargs):
    run_segment_gmm(dataclasses.replace(s, k=min(s.k, 64)), **kwargs)


def run_segment_tgmm(s, columns_first=False, weights=E):
    out = s.new(weights, s.n, s.k) if columns_first else s.new(weights, s.k, s.n)
    plan = ints(max(weights, 2 * E)), None, ints(max(weights, 2 * E))
    i = SegmentTgmmInputs(s.new(s.rows, s.k), s.new(s.rows, s.n), *plan, weights, columns_first)
    bind_segment_tgmm(i)(out, i)


def run_add_low_rank(s, *named):
    i = AddLowRankInputs(s.new(s.rows, s.n), s.new(s.rows, s.k), s.weight(E, s.n, s.k).mT, ints(E), *named)
    bind_add_low_rank(i)(i.out, i)


def matrix(N, K, block, dtype, entries=None):
    """Values and lists of a matrix a tenth of whose blocks are there, or that has so many entries."""
    R, C = count((N, K), block)
    L = entries or R * C // 10 + 1
    values = new(L, dtype=dtype) if block == (1, 1) else new(L, *block, dtype=dtype)
    return values, ints(R + C + 2 + 4 * L)


def run_sparse(block, M=4096, N=4096, K=4096, dtype=BF16, transposed=False, **named):
    values, lists = matrix(N, K, block, dtype, **named)
    x, out = new(M, K, dtype=dtype), new(M, N, dtype=dtype)
    x, out = (out, x) if transposed else (x, out)
    bias = None if transposed else new(N, dtype=dtype)
    launcher("sparse_matmul", bind_sparse_matmul)(out, x, values, bias, lists, N, K, transposed)


def run_sparse_grad(block, M=4096, N=4096, K=4096, dtype=BF16, **named):
    values, lists = matrix(N, K, block, dtype, **named)
    launcher("sparse_matmul_grad", bind_sparse_matmul_grad)(
        values, new(M, N, dtype=dtype), new(M, K, dtype=dtype), lists, *block
    )


@dataclasses.dataclass(frozen=True)
class Dense:
    """One launch: sizes, how w lies, and the epilogue."""

    m: int = 4096
    n: int = 4096
    k: int = 4096
    batch: int = 1
    dtype: torch.dtype = BF16
    rows: bool = True  # w.mT is contiguous
    activation: str = ""
    bias: bool = False
    beta: float = 0.0
    alpha: float = 1.0
    save_z: bool = False
    out: torch.dtype | None = None

    def run(self, bind=bind_gemm):
        B, M, N, K = self.batch, self.m, self.n, self.k
        out = new(B, M, N, dtype=self.out or self.dtype)
        x = new(B, M, K, dtype=self.dtype)
        w = new(B, N, K, dtype=self.dtype).mT if self.rows else new(B, K, N, dtype=self.dtype)
        bias = new(N, dtype=self.dtype) if self.bias else None
        c = new(M, N, dtype=self.dtype).expand(B, M, N) if self.beta else None
        z = torch.empty_like(out) if self.save_z else out[:0]
        i = GemmInputs(x, w, bias, c, self.activation, self.alpha, self.beta, self.out, self.save_z)
        bind(i)((out, z), i)


EVERYTHING = Dense(activation="gelu", bias=True, beta=0.5, alpha=2.0, save_z=True)
EPILOGUES = {"gemm": Dense(bias=True), "gemm_full": EVERYTHING}
GROUPS, TOKENS = 16, 512  # of the products of 8 bits


def run_masked(
    rows=1024, n=4096, k=7168, x=E4M3, w=None, shuffled=False, columns=False, scaled=True, masked=True
):
    """One launch.  `columns`: w with its columns in a row; `scaled`: by scales of each row."""
    floats = {"dtype": F32}
    out = new(GROUPS, rows, n, dtype=BF16 if x in FP8 else x)
    weight = new(GROUPS, k, n, dtype=w or x).mT if columns else new(GROUPS, n, k, dtype=w or x)
    scales = (new(GROUPS, rows, **floats), new(GROUPS, n, **floats)) if scaled else (None, None)
    sizes = ints(GROUPS) if masked else None
    i = MaskedInputs(out, new(GROUPS, rows, k, dtype=x), weight, sizes, *scales, shuffled)
    bind_masked_gmm(i)(out, i)


def run_masked_orders(rows, dtype):
    for shuffled in (False, True):
        run_masked(rows, x=dtype, shuffled=shuffled)


def run_masked_op(op):
    run_masked(64 if "few" in op else 1024, x=masked_dtype(op, 8))


def masked_dtype(op, bits):
    """A dtype whose product looks up this op on the target at hand."""
    if bits != 8:
        return {16: BF16, 32: F32}[bits]
    native = native_fp8()
    return next(d for d in FP8 if (d in native) != op.endswith("decode"))


def run_scaled(
    rows=1024, n=4096, k=4096, x=INT8, w=None, columns=True, beside=True, out=BF16,
    bind=bind_scaled_gemm,
):  # fmt: skip
    """One launch.  `columns`: each column of w in a row; `beside`: with scales and a bias."""
    floats, w = {"dtype": F32}, w or x
    weight = new(n, k, dtype=w).mT if columns else new(k, n, dtype=w)
    more = (new(rows, **floats), new(n, **floats), new(n)) if beside else (None, None, None)
    i = ScaledInputs(new(rows, k, dtype=x), weight, *more, out)
    bind(i)(new(rows, n, dtype=out), i)


def run_scaled_groups(n=2048, k=4096, x=INT8, out=BF16, bias=True):
    floats, rows = {"dtype": F32}, TOKENS * 4
    more = new(TOKENS, **floats), new(GROUPS, n, **floats), new(GROUPS, n) if bias else None
    weight, order = new(GROUPS, n, k, dtype=x).mT, ints(rows)
    i = ScaledGroupsInputs(new(TOKENS, k, dtype=x), weight, ints(GROUPS), *more, order, 4, out)
    bind_scaled_gmm(i)(new(rows, n, dtype=out), i)


def scaled_sizes(op, rows):
    """What looks up this op on the target at hand."""
    dtype = INT8 if op.endswith(("int8", "long")) else None
    if dtype is None:
        dtype = next(d for d in FP8 if (d in native_fp8()) != op.endswith("decode"))
    return {
        "rows": rows or 4096,
        "k": MOST_K // 1024 * 1024 + 1024 if op.endswith("long") else 4096,
        "x": dtype,
    }


def run_scaled_op(op):
    run_scaled(**scaled_sizes(op, 1024))


TUNED = {
    "gmm": run_gmm,
    "tgmm": run_tgmm,
    "tgmm_gather": lambda s: run_tgmm_gather(dataclasses.replace(s, n=512)),
    "up": run_up,
    "down_grad": run_down_grad,
    "four_bit": run_four_bit,
    "segment_gmm": run_segment_gmm,
    "segment_expand": run_segment_expand,
    "segment_tgmm": run_segment_tgmm,
}
FULL = Shape()
SHORT = Shape(n=1032, k=360)
ODD = Shape(rows=1000, n=2 * 331, k=333)  # masked loads of single elements: may spill, must compile
NUMBERED = (LIMITED, True), (CAPPED, True), (CAPPED, False)  # activations, and whether interleaved
GROUPED = {
    "gmm by rows": lambda: run_gmm(Shape(transposed=True)),
    "gmm of short sums": lambda: run_gmm(SHORT),
    "gmm of short sums by rows": lambda: run_gmm(dataclasses.replace(SHORT, transposed=True)),
    "gmm of short sums into": lambda: [run_gmm_into(SHORT, t, programs=0, bias=False) for t in (BF16, F32)],
    "gmm with bias": lambda: run_gmm(FULL, bias=True),
    "gmm odd": lambda: run_gmm(ODD),
    "gmm walking": lambda: run_gmm_into(FULL, BF16),
    "gmm into float32": lambda: run_gmm_into(FULL, programs=0),
    "gmm into odd": lambda: run_gmm_into(ODD),
    "gmm in passes": lambda: run_gmm_into(FULL, BF16, programs=0, starts=ints(E)),
    "up in passes": lambda: in_passes(run_up, FULL),
    "down_grad in passes": lambda: in_passes(run_down_grad, FULL),
    "ptgmm": lambda: run_tgmm_into(FULL, BF16),
    "ptgmm accumulate": lambda: run_tgmm_into(FULL, accumulate=True),
    "ptgmm with sums of rhs": lambda: run_tgmm_into(FULL, of_y=True),
    "nptgmm odd": lambda: run_tgmm_into(ODD, accumulate=True, of_y=True, programs=0),
    "tgmm gather odd": lambda: [run_tgmm_gather(Shape(rows, 24, 20)) for rows in (1000, 33000)],
    "tgmm columns first": lambda: run_tgmm_gather(FULL, columns_first=True),
    "tgmm accumulate": lambda: run_tgmm_accumulate(FULL),
    "up interleaved with bias": lambda: run_up(FULL, interleaved=True, bias=True),
    "up with numbers": lambda: [run_up(FULL, a, i, True) for a, i in NUMBERED],
    "up without a": lambda: run_up(FULL, save_a=False),
    "up relu2 without z": lambda: run_up(FULL, activation="relu2", save_z=False),
    "up to a rank": lambda: run_up(Shape(n=16), activation="relu", save_a=False),
    "gmm from a rank": lambda: run_gmm(Shape(k=16)),
    "up geglu odd": lambda: run_up(ODD, activation="geglu"),
    "down_grad interleaved": lambda: [run_down_grad(FULL, a, True) for a in ("swiglu", "geglu", "reglu")],
    "down_grad with numbers": lambda: [run_down_grad(FULL, a, i) for a, i in NUMBERED],
    "down_grad relu2 frozen": lambda: run_down_grad(FULL, activation="relu2", need_a=False),
    "down_grad geglu odd": lambda: run_down_grad(ODD, activation="geglu"),
    **{
        f"four_bit {format}, {'forward' if transpose else 'backward'}": functools.partial(
            run_four_bit, FULL, format, transpose, bias=transpose
        )
        for format in FORMATS
        for transpose in (True, False)
    },
    "four_bit with float32 absmax": lambda: run_four_bit(FULL, double=False),
    "four_bit odd": lambda: (run_four_bit(ODD, "mxfp4"), run_four_bit(ODD, "mxfp4", transpose=False)),
}
# a float32 result, or sums beside a product, at tiles chosen for neither: some bytes, outside of the loop
FEW_SPILLS = {"gmm into float32": ["sm_100"], "ptgmm with sums of rhs": ["sm_100"]}
AITER = {  # of its files for gfx942 and gfx950, in the order of tuning.aiter_json.TILE
    "gfx942 gmm": (run_gmm_into, (256, 256, 64, 1, 8, 1), {}),
    "gfx950 gmm": (run_gmm_into, (256, 256, 64, 4, 4, 2), {}),
    "gfx942 ptgmm": (run_tgmm_into, (256, 256, 64, 1, 8, 1), {}),
    "gfx942 ptgmm, accumulate": (run_tgmm_into, (128, 128, 64, 1, 8, 1), {"accumulate": True}),
}
SEGMENTS = {
    "to a rank": lambda: run_segment_gmm(Shape(4096, 16, 4096), segments=64),
    "from a rank": lambda: run_segment_gmm(Shape(4096, 4096, 16), segments=64),
    "added, from a rank": lambda: (run_add_low_rank(Shape(k=16)), run_add_low_rank(Shape(k=16), ints(E))),
    "decode": lambda: run_segment_gmm(Shape(256, 64, 4096), indices=False, segments=256),
    "decode back": lambda: run_segment_gmm(Shape(256, 4096, 64), indices=False, segments=256),
    "dense": lambda: run_segment_gmm(Shape(8000, 4096, 4096), segments=8),
    "odd": lambda: run_segment_gmm(ODD),
    "odd, short": lambda: run_segment_gmm(dataclasses.replace(ODD, k=21)),
    "tgmm of many": lambda: run_segment_tgmm(Shape(4096, 4096, 16), columns_first=True, weights=512),
    "tgmm odd": lambda: run_segment_tgmm(ODD),
    "tgmm in parts": lambda: run_segment_tgmm(Shape(16384, 16, 4096), weights=1),
}
DENSE = {
    "plain": Dense(),
    "columns": Dense(rows=False),
    "float16": Dense(dtype=F16, bias=True),
    "float32": Dense(dtype=F32, bias=True),
    "float32 out": Dense(out=F32),
    "batched": Dense(m=300, n=528, k=320, batch=7),
    "batched, odd": Dense(m=300, n=520, k=328, batch=7),
    "everything": EVERYTHING,
    "few rows": Dense(m=16, activation="silu", bias=True),
    "few rows, batched": Dense(m=9, n=520, k=328, batch=7),
    "few rows, columns": Dense(m=1, n=14336, rows=False),
    "split": Dense(m=64, n=256, k=65536, beta=1.0, bias=True, activation="gelu", save_z=True),
    "odd": Dense(m=333, n=331, k=77, bias=True),
    **{name: Dense(activation=name) for name in ACTIVATIONS},
}
ONE_ROW = {
    "plain": Dense(m=1),
    "float32": Dense(m=1, dtype=F32),
    "eights": Dense(m=1, k=4104),
    "odd": Dense(m=1, n=1061, k=4097),
    "float32 out": Dense(m=1, out=F32),
    "batched": Dense(m=1, n=520, k=328, batch=7),
    "everything": dataclasses.replace(EVERYTHING, m=1),
    **{name: Dense(m=1, activation=name, save_z=True) for name in ACTIVATIONS},
}
MASKED = {
    "mixed": lambda: run_masked(w=E5M2),
    "mixed, few": lambda: run_masked(16, x=E5M2, w=E4M3),
    "columns": lambda: run_masked(columns=True, scaled=False, masked=False),
    "fnuz": lambda: run_masked(x=FNUZ, scaled=False),
    "fnuz, few": lambda: run_masked(16, x=FNUZ),
    "bfloat16 columns": lambda: run_masked(x=BF16, columns=True, masked=False),
    "odd, shuffled": lambda: run_masked(1000, 336, 352, shuffled=True),
    "odd, shuffled, few": lambda: run_masked(16, 336, 352, shuffled=True),
    "odd, shuffled bfloat16": lambda: run_masked(100, 336, 352, x=BF16, shuffled=True),
    "odd": lambda: run_masked(1000, 331, 333),
    "odd, few": lambda: run_masked(10, 331, 333, x=F16),
}


SCALED = {
    "mixed": lambda: run_scaled(x=E4M3, w=E5M2),
    "mixed, few": lambda: run_scaled(16, x=E5M2, w=E4M3),
    "fnuz": lambda: run_scaled(x=FNUZ, beside=False),
    "without scales": lambda: run_scaled(beside=False, out=F16),
    "odd": lambda: run_scaled(1000, 331, 333),
    "odd, few": lambda: run_scaled(10, 331, 333, columns=False),
    "odd, 8-bit floats": lambda: run_scaled(1000, 331, 333, x=E4M3, columns=False),
    "odd groups": lambda: run_scaled_groups(331, 333),
    "odd and long": lambda: run_scaled(10, 331, MOST_K + 5),
}


SPARSE = {  # what, and whether it may spill: masked loads of single elements
    "blocks of 32": (lambda: (run_sparse((32, 32)), run_sparse_grad((32, 32))), False),
    "blocks of 16": (lambda: (run_sparse((16, 16)), run_sparse_grad((16, 16))), False),
    "blocks of 128 x 64": (lambda: (run_sparse((128, 64)), run_sparse_grad((128, 64))), False),
    "blocks of 128 x 64, the other way": (lambda: run_sparse((128, 64), transposed=True), False),
    "blocks of 8 x 48": (lambda: (run_sparse((8, 48)), run_sparse_grad((8, 48))), True),
    "float16": (lambda: (run_sparse((64, 64), dtype=F16), run_sparse_grad((64, 64), dtype=F16)), False),
    "odd": (lambda: (run_sparse((64, 64), 1000, 331, 333), run_sparse_grad((64, 64), 1000, 331, 333)), True),
    "few rows": (lambda: (run_sparse((128, 128), 7), run_sparse((64, 64), 60)), True),
    "few rows, gradient": (lambda: run_sparse_grad((64, 64), 7), True),
    "few entries": (lambda: run_sparse((1, 1), 16, entries=999), False),
    "few entries, gradient": (lambda: run_sparse_grad((1, 1), 16, entries=999), False),
    "few entries, the other way": (lambda: run_sparse((1, 1), 16, entries=999, transposed=True), False),
    "few entries, float32": (lambda: run_sparse((1, 1), 16, dtype=F32, entries=9), False),
    "entries for few rows": (lambda: run_sparse((1, 1), 64, entries=99999), False),
    "entries for few rows, the other way": (lambda: run_sparse((1, 1), 16, transposed=True), False),
    "entries for one row": (lambda: (run_sparse((1, 1), 1), run_sparse_grad((1, 1), 1)), False),
    "entries for odd rows": (lambda: run_sparse((1, 1), 33, entries=9999), False),
    "entries for odd rows, float32": (lambda: run_sparse((1, 1), 33, dtype=F32, entries=99999), False),
    "entries": (lambda: run_sparse_grad((1, 1)), False),
}  # fmt: skip


MASKED_PRODUCTS = {  # of 8-bit floats; without a name here they become float16
    ("sm_90", E4M3): "wgmma.mma_async.sync.aligned.{}k32.f32.e4m3.e4m3",
    ("sm_100", E4M3): "tcgen05.mma.cta_group::1.kind::f8f6f4",
    ("gfx942", FNUZ): "v_mfma_f32_{}_fp8_fp8",
    ("gfx950", E4M3): "v_mfma_{}f8f6f4",
}


SCALED_PRODUCTS = {  # of 8 bits; 8-bit floats without a name here become float16
    ("sm_80", INT8): "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32",
    ("sm_90", INT8): "wgmma.mma_async.sync.aligned",
    ("sm_90", E4M3): "k32.f32.e4m3.e4m3",
    ("gfx942", INT8): "v_mfma_i32",
    ("gfx942", FNUZ): "fp8_fp8",
    ("gfx950", INT8): "v_mfma_i32",
    ("gfx950", E4M3): "f8f6f4",
}


def small(config):
    """An older matrix instruction is the only one for tiles of less than 64 rows."""
    return "any" if config.block_m < 64 else "own"


def odd(name):
    return TARGETS if "odd" in name else ()


# The rows of the tables: each at a shape that picks it.


def run_grouped_row(row):
    op, bits, rows, n, k = row.key
    s = Shape((rows or 1024) * E, n or 4096, k or 4096, {16: BF16, 32: F32}[bits])
    assert tuning.lookup(op, s.dtype, s.rows, s.n, s.k, E) == row.value
    TUNED[op](s)


def run_dense_row(row):
    op, bits, rows, n, k = row.key
    sizes = {"m": rows or 4096, "n": n or 4096, "k": k or 4096, "dtype": {16: BF16, 32: F32}[bits]}
    case = dataclasses.replace(EPILOGUES[op], **sizes)
    assert tuning.lookup(op, case.dtype, case.m, case.n, case.k, 1) == row.value
    case.run()


def run_masked_row(row, shuffled):
    op, bits, rows = row.key[:3]
    rows, dtype = rows or (100 if "few" in op else 1024), masked_dtype(op, bits)
    assert tuning.lookup(op, dtype, GROUPS * rows, 4096, 7168, GROUPS) == row.value
    run_masked(rows, x=dtype, shuffled=shuffled)


def run_scaled_row(row, columns):
    sizes = {**scaled_sizes(row.key.op, row.key.rows), "n": row.key.n or 4096}
    assert tuning.lookup(row.key.op, sizes["x"], sizes["rows"], sizes["n"], sizes["k"], 1) == row.value
    run_scaled(**sizes, columns=columns, out=BF16 if columns else F32)


def run_scaled_groups_row(row):
    x = scaled_sizes(row.key.op, row.key.rows)["x"]
    with_tile(row.value, lambda: run_scaled_groups(x=x))()


def run_sparse_row(row, transposed):
    op, bits, rows, n, _ = row.key
    dtype, side = {16: BF16, 32: F32}[bits], n or 256
    if op == "sparse_blocks":
        assert tuning.lookup(op, dtype, rows or 4096, side, side, 1) == row.value
        run_sparse((side, side), rows or 4096, dtype=dtype, transposed=transposed)
    else:
        assert tuning.lookup(op, dtype, side, side, 4096, 1) == row.value
        run_sparse_grad((side, side), dtype=dtype)


def each(run, name):
    """`run` with an argument of that name false, and true."""
    return [functools.partial(run, **{name: value}) for value in (False, True)]


masked = (lambda config: "own") if reads_registers_in_time() else small  # shuffled weights also
ROWS = {  # op -> the launches of a row, and the matrix instruction that its products use
    **{op: ([run_grouped_row], small if "segment" in op else lambda config: "own") for op in TUNED},
    **dict.fromkeys(EPILOGUES, ([run_dense_row], small)),
    **{op: (each(run_masked_row, "shuffled"), masked) for op in PORTABLE if op.startswith("masked")},
    **{
        op: ([*each(run_scaled_row, "columns"), run_scaled_groups_row], lambda config: "any")
        for op in PORTABLE
        if op.startswith("scaled")
    },
    "sparse_blocks": (each(run_sparse_row, "transposed"), small),
    "sparse_blocks_grad": ([functools.partial(run_sparse_row, transposed=False)], small),
}


def row_cases():
    for target, gpu in TARGETS.items():
        rows = load(tuning.TILES, tuning.table_name(gpu.gpu.backend, gpu.gpu.arch))
        for number, row in enumerate(row for row in rows if row.key.op in ROWS):
            runs, matrix = ROWS[row.key.op]
            sizes = "x".join(str(size or "any") for size in row.key[2:])
            name = f"row {number} of {target}: {row.key.op} {row.key.bits} {sizes}"
            matrix = None if row.key.bits == 32 else matrix(row.value)
            for i, run in enumerate(runs):
                yield f"{name} {i}", Case(functools.partial(run, row), [target], matrix=matrix)


def candidate_cases():
    """Each tile that is worth trying, on the GPU that it is for."""
    for op, epilogue in EPILOGUES.items():
        for tile in PORTABLE[op]:
            case = dataclasses.replace(epilogue, m=16 if tile.block_m == 16 else 4096)
            yield f"{op} {tile}", Case(with_tile(tile, case.run), ["sm_90"])
            if tile.block_k > 256:  # which reads long pieces
                case = dataclasses.replace(epilogue, m=16)
                yield f"{op} {tile} of few rows", Case(with_tile(tile, case.run), matrix="any")
    for op in PORTABLE:
        for tile in PORTABLE[op]:
            if op.startswith("masked"):  # one that spills is slow, not wrong
                run = functools.partial(run_masked_op, op)
                spills = ["sm_90"] if tile.block_n == 256 else ()
                yield f"{op} {tile}", Case(with_tile(tile, run), ["sm_90"], spills)
            elif op.startswith("scaled"):
                run = with_tile(tile, functools.partial(run_scaled_op, op))
                yield f"{op} {tile}", Case(run, ["sm_90"])
            elif op.startswith("sparse"):
                run = run_sparse if op == "sparse_blocks" else run_sparse_grad
                for side in (32, 64, 128):
                    case = Case(with_tile(tile, functools.partial(run, (side, side))), ["sm_90"])
                    yield f"{op} {tile} {side}", case


# What must be true of single kernels beside that.


def loads_one_row(wide):
    """Nothing but its sum is in shared memory, and 16 bytes are loaded at a time if `wide`."""

    def check(target, launches):
        (launch,) = launches
        assert launch.kernel == "one_row_kernel" and launch.shared_bytes <= 4096
        found = re.search(r"(?:global|buffer)_load_dwordx4|ld[.]global\S*[.]v4[.]b32", launch.assembly)
        assert bool(found) == wide

    return check


loads_wide, loads_odd = loads_one_row(True), loads_one_row(False)


def multiplies(name):
    """Each kernel has an instruction of that name, whose shape "{}" stands for."""
    head, _, tail = name.partition("{}")

    def check(target, launches):
        for launch in launches:
            assert any(tail in line for line in launch.assembly.splitlines() if head in line)

    return check


def fetches_16_bytes(target, launches):
    for launch in launches:
        assert "cp.async.cg.shared.global" in launch.assembly and "cp.async.ca" not in launch.assembly


def multiplies_in_warpgroups(target, launches):
    lines = [line for line in launches[0].assembly.splitlines() if "wgmma.mma_async" in line]
    assert lines and all("s32.s8.s8" in line for line in lines)
    assert "cp.async.cg.shared.global" in launches[0].assembly


def reads_shuffled_weights_in_their_order(target, launches):
    """Neighbouring threads copy neighbouring vectors, which become a left operand without another copy."""
    (launch,) = launches
    code = launch.compiled.asm["ttgir"]
    vector = 16 // launch.args[1].element_size()
    copies = re.findall(
        r"async_copy_global_to_local .*contiguity = (\d+).* tensor<\d+x!tt.ptr<\w+>, (#\w+)>", code
    )
    assert copies and {int(contiguity) for contiguity, _ in copies} == {vector}
    for _, layout in copies:
        assert f"{layout} = #ttg.blocked<{{sizePerThread = [{vector}], threadsPerWarp = [32]" in code
    loop = code[code.index("scf.for") : code.index("scf.yield")]
    assert "ldmatrix" in launch.assembly and "local_store" not in loop and "local_alloc %" not in loop


def needs_shared_memory_for_x_alone(target, launches):
    assert launches[0].shared_bytes == 4096  # a tile of x


def copies_blocks_ahead(side):
    """In all of the stages: what a block is looked up with does not take half of them."""

    def check(target, launches):
        fetches_16_bytes(target, launches)
        with compiling_for(TARGETS[target], compile=False):
            config = tuning.lookup("sparse_blocks", BF16, 4096, side, side, 1)
        tile = 2 * config.block_k * (config.block_m + config.block_n)
        assert launches[0].shared_bytes >= config.num_stages * tile

    return check


def detailed_cases():
    for (target, dtype), name in MASKED_PRODUCTS.items():
        for rows in (16, 100, 1024):
            run = functools.partial(run_masked_orders, rows, dtype)
            yield f"masked {dtype} {rows} on {target}", Case(run, [target], also=multiplies(name))
            if target == "sm_90":
                yield f"masked {dtype} {rows} fetched", Case(run, [target], also=fetches_16_bytes)
    for dtype in (E4M3, BF16) if reads_registers_in_time() else (E4M3,):
        for rows in (16, 32, 100, 1024):
            run = functools.partial(run_masked, rows, x=dtype, shuffled=True)
            name = f"masked {dtype} {rows} in order"
            yield name, Case(run, ["sm_90"], also=reads_shuffled_weights_in_their_order)
    for dtype in (FNUZ, BF16):
        run = functools.partial(run_masked, 16, x=dtype, shuffled=True)
        yield f"masked {dtype} few rows", Case(run, ["gfx942"], also=needs_shared_memory_for_x_alone)
    for (target, dtype), name in SCALED_PRODUCTS.items():
        for rows in (64, 4096):
            case = Case(functools.partial(run_scaled, rows, x=dtype), [target], also=multiplies(name))
            yield f"scaled {dtype} {rows} on {target}", case
    for rows in (64, 512, 4096):
        run = functools.partial(run_scaled, rows)
        yield f"scaled int8 {rows} in warpgroups", Case(run, ["sm_90"], also=multiplies_in_warpgroups)
    for entries in (9999, 99999):  # read where they are, and turned
        run = functools.partial(run_sparse, (1, 1), 16, entries=entries)
        yield f"{entries} entries", Case(run, matrix="any", kernels=["gather_entries_kernel"])
    for side in (64, 128):
        for transposed in (False, True):
            run = functools.partial(run_sparse, (side, side), transposed=transposed)
            yield f"blocks {side} {transposed} ahead", Case(run, ["sm_90"], also=copies_blocks_ahead(side))


def cases():
    for name, run in GROUPED.items():
        yield name, Case(run, spills=FEW_SPILLS.get(name, odd(name)), matrix="own")
    yield "scales of NF4", Case(lambda: run_four_bit(FULL), also=rounds_scales_twice)
    for name, run in SEGMENTS.items():
        yield f"segments {name}", Case(run, spills=odd(name), matrix="any")
    for dtype in (E4M3, E5M2):  # of x and w; the reference has e4m3 on sm_80
        targets = [target for target in TARGETS if (target, dtype) != ("sm_80", E4M3)]
        for run in (run_segment_gmm, run_segment_expand):
            case = Case(functools.partial(run, FULL, dtype=dtype), targets, matrix="any")
            yield f"{run.__name__} {dtype}", case
    for name, case in DENSE.items():
        matrix = "any" if case.m < 64 or name == "odd" else "own"
        yield f"dense {name}", Case(case.run, spills=odd(name), matrix=None if case.dtype == F32 else matrix)
    for name, case in ONE_ROW.items():
        yield f"one row {name}", Case(case.run, also=loads_odd if name == "odd" else loads_wide)
    for name, run in MASKED.items():
        yield f"masked {name}", Case(run, spills=odd(name), matrix="own")
    for name, run in SCALED.items():
        yield f"scaled {name}", Case(run, spills=odd(name), matrix="any")
    for name, (run, spills) in SPARSE.items():
        matrix = None if "entries" in name else "any"
        yield f"sparse {name}", Case(run, spills=TARGETS if spills else (), matrix=matrix)


def tuned_cases():
    yield from row_cases()
    yield from candidate_cases()
    for name, (run, tile, options) in AITER.items():
        run = functools.partial(run, FULL, BF16, tile=(*tile, 2, 16, 2), programs=304, **options)
        target = name.split()[0]
        yield f"AITER {name}", Case(run, [target], spills=[target], matrix="own")


CASES = dict(cases())
TUNED_CASES = {**dict(tuned_cases()), **dict(detailed_cases())}
