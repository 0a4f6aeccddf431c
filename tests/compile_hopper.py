"""Cases for test_compile.py: the Hopper kernels, at each tile that a table may name."""

import dataclasses
import functools
import importlib
import itertools
import re

import torch
from aot import Case, cubin_resources, disassembled, in_passes, ints, new, with_tile
from compile_four_bit import run_four_bit
from compile_products import DENSE as PORTABLE_DENSE
from compile_products import (
    EVERYTHING,
    GROUPS,
    INT8,
    TOKENS,
    TOP_K,
    Dense,
    E,
    Shape,
    run_masked,
    run_scaled,
)
from shapes import CAPPED, LIMITED

from moe_aiter import tuning
from moe_aiter.kernels import hopper
from moe_aiter.kernels.base.activations import ACTIVATIONS, get_activation
from moe_aiter.kernels.dense.gemm import ACTIVATIONS as UNGATED
from moe_aiter.kernels.experts.down import DownGradInputs
from moe_aiter.kernels.experts.up import UpInputs
from moe_aiter.kernels.grouped.gmm import GroupedIntoInputs
from moe_aiter.kernels.grouped.masked_gmm import MaskedInputs
from moe_aiter.kernels.grouped.scaled_gemm import ScaledGroupsInputs
from moe_aiter.kernels.grouped.tgmm import TgmmInputs, TgmmIntoInputs, TgmmSumsInputs
from moe_aiter.kernels.quantize.four_bit import FORMATS
from moe_aiter.tuning.candidates import HOPPER_TILES, PORTABLE
from moe_aiter.tuning.store import load

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SM90 = functools.partial(Case, targets=["sm_90"])
SIZES = ints(E)  # of the groups


def module(name):
    """The Hopper kernels of that name."""
    return importlib.import_module(f"moe_aiter.kernels.hopper.{name}")


def eight_bits(x, dtype=E4M3):
    """Strides and all."""
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")


def scales_of(rows, weight, blocks) -> tuple:
    """Those of rows (M, K) and of a weight (G, N, K): one for each row, or for each block."""
    if not blocks:
        return new(rows[0], dtype=F32), new(*weight[:2], dtype=F32)
    across = -(-rows[1] // 128)
    return new(rows[0], across, dtype=F32), new(weight[0], -(-weight[1] // 128), across, dtype=F32)


def run_hopper_up(
    activation="swiglu", interleaved=False, bias=False, save_z=True, save_a=True, n=1024,
    dtype=BF16, sizes=SIZES, fp8=None, blocks=False, by_columns=False, k=4096,
):  # fmt: skip
    s, parts, groups = Shape(n=n, k=k, dtype=dtype), get_activation(activation).projections, len(sizes)
    z, a, w = s.new(s.rows if save_z else 0, parts * n), s.new(s.rows, n), s.new(groups, parts * n, s.k)
    x, b = s.new(s.rows // TOP_K, s.k), s.new(groups, parts * n) if bias else None
    a, plan, scales = a if save_a else None, (*s.plan[:2], sizes), (None, None)
    w = s.new(groups, s.k, parts * n).mT if by_columns else w
    if fp8 is not None:
        x, w = eight_bits(x, fp8), eight_bits(w, fp8)
        scales = scales_of((s.rows, s.k), w.shape, blocks)
    i = UpInputs(x, w, b, *plan, activation, interleaved, save_z, 0, None)
    module("up").bind_expert_up(i, save_a, dtype, blocks)((z, a), i, scales)


def run_hopper_down_grad(
    activation="swiglu", interleaved=False, need_a=True, dtype=BF16, sizes=SIZES, fp8=None, blocks=False,
    by_rows=False, n=1024, k=4096,
):  # fmt: skip
    """`fp8`: the format of dout, whose weights are e4m3."""
    s, parts = Shape(n=n, k=k, dtype=dtype), get_activation(activation).projections
    z, dz, a = s.new(s.rows, parts * s.n), s.new(s.rows, parts * s.n), s.new(s.rows if need_a else 0, s.n)
    order, rank, _ = s.plan
    ds, weights = new(*rank.shape, dtype=F32), new(*rank.shape, dtype=F32)
    dout, w = s.new(s.rows // TOP_K, s.k), s.new(len(sizes), s.k, s.n)
    w, scales = s.new(len(sizes), s.n, s.k).mT if by_rows else w, (None, None)
    if fp8 is not None:
        dout, w = eight_bits(dout, fp8), eight_bits(w.mT.contiguous()).mT
        scales = scales_of((s.rows, s.k), w.mT.shape, blocks)
    i = DownGradInputs(dout, z, w, weights, order, rank, sizes, activation, interleaved, need_a)
    module("down_grad").bind_down_grad(i, blocks)((dz, a, ds), i, scales)


def run_hopper_gmm(
    rows=True, bias=False, k=4096, dtype=BF16, sliced=False, sizes=SIZES, m=None, numbers=None,
    fp8=None, folded=False, indptr=False, blocks=False,
):  # fmt: skip
    s, groups = Shape(k=k, dtype=dtype), len(sizes)
    m, n = m or s.rows, 2 * s.n if sliced else s.n
    w = (s.new(groups, n, k).mT if rows else s.new(groups, k, n))[:, :, n - s.n :]
    b = s.new(groups, s.n) if bias else None
    numbers = None if numbers is None else ints(groups, dtype=numbers)
    x, scales = s.new(m, k), (None, None)
    if fp8 is not None:
        x, w = eight_bits(x, fp8), eight_bits(w.mT).mT
        x_scale, w_scale = scales_of((m, k), (groups, n, k), blocks)
        scales = x_scale, None if folded else w_scale[:, -w_scale.shape[1] * s.n // n :]
    product = module("gmm").bind_product(x, w, (m, k, groups), dtype, indptr=indptr, blocks=blocks)
    product(s.new(m, s.n), x, w, sizes, b, numbers, *scales)


def run_hopper_tgmm(gather=True, columns_first=False, onto=None, k=1024, dtype=BF16, groups=E):
    s = Shape(n=2048, k=k, dtype=dtype)
    shape = (groups, s.n, s.k) if columns_first else (groups, s.k, s.n)
    x, y = s.new(s.rows // TOP_K if gather else s.rows, s.k), s.new(s.rows, s.n)
    plan = ints(groups), ints(s.rows) if gather else None, TOP_K if gather else 1
    if onto is None:
        i = TgmmInputs(x, y, *plan, columns_first)
        module("tgmm").bind_tgmm(i)(s.new(*shape), i)
    else:
        out = new(*shape, dtype=onto)
        i = TgmmIntoInputs(out.mT if columns_first else out, x, y, *plan)
        module("tgmm").bind_tgmm_into(i)(i.existing_out, i)


def run_hopper_tgmm_fp8(
    y=E4M3, x=E4M3, columns_first=False, onto=None, n=2048, k=4096, groups=E, scaled=False
):
    """n columns of y, the rows of the result, and k of x; `scaled`: by scales of groups."""
    chunks = 262144 // 128 + groups
    shape = (groups, k, n) if columns_first else (groups, n, k)
    out = new(*shape, dtype=onto or BF16)
    operands = new(chunks, k, 128, dtype=x), new(chunks, n, 128, dtype=y), new(chunks, n, dtype=F32)
    sizes, strides = (chunks, groups, n, k), (out.mT if columns_first else out).stride()
    product = module("tgmm").bind_tgmm_fp8(operands[1], sizes, strides, onto is not None)
    if scaled:
        of_groups = new(groups, n, dtype=F32), new(groups, k, dtype=F32)
        return product(out, *operands[:2], None, ints(groups, 3), of_groups)
    product(out, *operands, ints(groups, 3))


def run_hopper_gmm_into(starts=None):
    s = Shape()
    out, x, w, b = s.new(s.rows, 2 * s.n)[:, : s.n], s.new(s.rows, s.k), s.new(E, s.k, s.n), s.new(E, s.n)
    i = GroupedIntoInputs(out, x, w, ints(E), b, (), 100, starts)
    module("gmm").bind_gmm_into(i)(out, i)


def run_hopper_tgmm_sums():
    s = Shape()
    out, sums = s.new(E, s.k, s.n), new(E, s.n, dtype=F32)
    i = TgmmSumsInputs(s.new(s.rows, s.k), s.new(s.rows, s.n), ints(E), False)
    module("tgmm").bind_tgmm_sums(i)((out, sums), i)


def run_hopper_masked(x=BF16, w=None, out=BF16, groups=16, m=1024, k=7168, scales=True, sizes=torch.int32):
    """`scales`: by rows of both, or those strides of x's."""
    n, out = 4096, new(groups, m, 4096, dtype=out)
    of_x, of_w = new(groups, m, dtype=F32), new(groups, n, dtype=F32)
    if scales is not True:
        of_x, of_w = of_x.as_strided(of_x.shape, scales) if scales else None, None
    sizes = None if sizes is None else ints(groups, dtype=sizes)
    operands = new(groups, m, k, dtype=x), new(groups, n, k, dtype=w or x)
    i = MaskedInputs(out, *operands, sizes, of_x, of_w, False)
    module("gmm").bind_masked_gmm(i)(out, i)


def run_scaled_on_hopper(**named):
    run_scaled(bind=module("gmm").bind_scaled_gemm, **named)


def run_scaled_groups_on_hopper(x, order):
    more = new(TOKENS, dtype=F32), new(GROUPS, 2048, dtype=F32), new(GROUPS, 2048)
    operands = new(TOKENS, 4096, dtype=x), new(GROUPS, 2048, 4096, dtype=x).mT, ints(GROUPS)
    rows = TOKENS * 4 if order else TOKENS
    plan = ints(rows) if order else None, 4 if order else 1
    i = ScaledGroupsInputs(*operands, *more, *plan, BF16)
    module("gmm").bind_scaled_gmm(i)(new(rows, 2048), i)


def run_four_bit_on_hopper(format="nf4", transpose=True, dtype=BF16, **named):
    run_four_bit(Shape(dtype=dtype), format, transpose, bind=module("four_bit").bind_four_bit_gmm, **named)


def on_hopper(case):
    """The dense product of `case` by its Hopper kernel."""
    return lambda: case.run(module("gemm").bind_gemm)


NAMES = [*ACTIVATIONS, CAPPED]
GATED = [name for name in NAMES if get_activation(name).gated]
KINDS = [(name, False) for name in NAMES] + [(name, True) for name in GATED]
RUNS = {
    **{f"up {name}": functools.partial(run_hopper_up, name, bias=True) for name in NAMES},
    **{f"down_grad {name}": functools.partial(run_hopper_down_grad, name) for name in NAMES},
    **{f"up {name} interleaved": functools.partial(run_hopper_up, name, True, bias=True) for name in GATED},
    **{
        f"down_grad {name} interleaved": functools.partial(run_hopper_down_grad, name, True) for name in GATED
    },
    **{
        f"{name} {a} {n} {k}, turned": functools.partial(run, a, i, n=n, k=k, **turned)
        for a, i in (("swiglu", False), ("swiglu_oai", True), ("gelu", False))
        for n, k in ((1024, 4096), (360, 1000))
        for name, run, turned in (
            ("up", functools.partial(run_hopper_up, bias=True), {"by_columns": True}),
            ("down_grad", run_hopper_down_grad, {"by_rows": True}),
        )
    },
    **{
        f"{name} of a multiple of 8": functools.partial(run, n=360, k=1000)
        for name, run in (("up", run_hopper_up), ("down_grad", run_hopper_down_grad))
    },
    **{
        f"gmm of a multiple of 8, {rows}": functools.partial(run_hopper_gmm, rows, k=1000)
        for rows in (True, False)
    },
    "up narrow interleaved": lambda: run_hopper_up(interleaved=True, n=256),
    "up interleaved without z": lambda: run_hopper_up(interleaved=True, save_z=False),
    "up narrow": lambda: run_hopper_up(n=256),
    "up float16": lambda: run_hopper_up(dtype=F16),
    "up without z": lambda: run_hopper_up(save_z=False),
    **{
        f"up {name} without a": functools.partial(run_hopper_up, name, bias=True, save_a=False)
        for name in ("swiglu", "relu")
    },
    "down_grad geglu frozen": lambda: run_hopper_down_grad("geglu", need_a=False),
    "down_grad frozen": lambda: run_hopper_down_grad(need_a=False),
    "up swiglu_limit": lambda: run_hopper_up(LIMITED, bias=True),
    "up fp8 swiglu_limit": lambda: run_hopper_up(LIMITED, fp8=E4M3),
    "down_grad swiglu_limit": lambda: run_hopper_down_grad(LIMITED),
    "down_grad swiglu_oai frozen": lambda: run_hopper_down_grad("swiglu_oai", need_a=False),
    **{
        f"down_grad {name} interleaved frozen": functools.partial(
            run_hopper_down_grad, name, True, need_a=False
        )
        for name in GATED
    },
    "down_grad float16": lambda: run_hopper_down_grad(dtype=F16),
    **{
        f"{name} of {g} experts": functools.partial(run, sizes=ints(g))
        for g in (1, 256, hopper.MAX_GROUPS)
        for name, run in (("up", run_hopper_up), ("down_grad", run_hopper_down_grad), ("gmm", run_hopper_gmm))
    },
    **{
        f"{name} with wide sizes": functools.partial(run, sizes=ints(E, dtype=torch.int64))
        for name, run in (("up", run_hopper_up), ("down_grad", run_hopper_down_grad), ("gmm", run_hopper_gmm))
    },
    "gmm of a row": lambda: run_hopper_gmm(sizes=ints(1), m=1),
    "gmm": run_hopper_gmm,
    "gmm float16": lambda: run_hopper_gmm(dtype=F16),
    "gmm narrow with bias": lambda: run_hopper_gmm(bias=True, k=512),
    "gmm by columns": lambda: run_hopper_gmm(rows=False),
    "gmm into": run_hopper_gmm_into,
    "gmm in passes": lambda: run_hopper_gmm_into(ints(E)),
    "up in passes": lambda: in_passes(run_hopper_up),
    "down_grad in passes": lambda: in_passes(run_hopper_down_grad),
    "gmm of some columns": lambda: run_hopper_gmm(sliced=True),
    "gmm by columns, of some": lambda: run_hopper_gmm(rows=False, sliced=True),
    "gmm by columns with bias": lambda: run_hopper_gmm(rows=False, bias=True),
    "gmm by numbers": lambda: run_hopper_gmm(numbers=torch.int64),
    "gmm by indptr": lambda: run_hopper_gmm(indptr=True),
    "gmm by indptr and numbers": lambda: run_hopper_gmm(numbers=torch.int64, indptr=True),
    "gmm by columns and numbers": lambda: run_hopper_gmm(rows=False, numbers=torch.int32),
    "masked gmm": run_hopper_masked,
    "masked gmm float16": lambda: run_hopper_masked(F16, out=F16, sizes=torch.int64),
    "masked gmm, nothing but operands": lambda: run_hopper_masked(scales=None, sizes=None),
    **{
        f"masked gmm {x}, {w}": functools.partial(run_hopper_masked, x, w)
        for x in hopper.OCP
        for w in hopper.OCP
    },
    "masked gmm of a number": lambda: run_hopper_masked(E4M3, scales=(0, 0)),
    "masked gmm of a number for each group": lambda: run_hopper_masked(E4M3, scales=(1, 0)),
    "masked gmm, odd blocks": lambda: run_hopper_masked(E4M3, k=2880, scales=None, sizes=None),
    "masked gmm, short": lambda: run_hopper_masked(E4M3, k=16, m=128, out=F16),
    "masked gmm, float32 out": lambda: run_hopper_masked(E4M3, out=F32),
    **{f"up fp8 {name}": functools.partial(run_hopper_up, name, fp8=E4M3) for name in NAMES},
    "up fp8 float16": lambda: run_hopper_up(dtype=F16, fp8=E4M3),
    "up fp8 interleaved": lambda: run_hopper_up(interleaved=True, bias=True, fp8=E4M3),
    "up fp8 without z": lambda: run_hopper_up(save_z=False, fp8=E4M3),
    "up fp8 without a": lambda: run_hopper_up(save_a=False, fp8=E4M3),
    **{f"down_grad fp8 {f}": functools.partial(run_hopper_down_grad, fp8=f) for f in hopper.OCP},
    **{f"gmm fp8 {f}": functools.partial(run_hopper_gmm, fp8=f) for f in hopper.OCP},
    **{
        f"up of blocks {name}": functools.partial(run_hopper_up, name, bias=True, fp8=E4M3, blocks=True)
        for name in NAMES
    },
    "up of blocks, odd": lambda: run_hopper_up(interleaved=True, bias=True, fp8=E4M3, blocks=True, k=2880),
    "down_grad of blocks, odd": lambda: run_hopper_down_grad(fp8=E4M3, blocks=True, k=2880),
    "up of blocks interleaved": lambda: run_hopper_up(interleaved=True, fp8=E4M3, blocks=True),
    "up of blocks without z": lambda: run_hopper_up(save_z=False, fp8=E4M3, blocks=True),
    "up of blocks without a": lambda: run_hopper_up(save_a=False, fp8=E4M3, blocks=True),
    **{
        f"down_grad of blocks {name}": functools.partial(run_hopper_down_grad, name, fp8=E4M3, blocks=True)
        for name in NAMES
    },
    **{
        f"gmm of blocks {k} {some}": functools.partial(
            run_hopper_gmm, k=k, sliced=some, bias=some, fp8=E4M3, blocks=True
        )
        for k, some in itertools.product((2880, 4096), (False, True))
    },
    "gmm fp8 of some columns": lambda: run_hopper_gmm(sliced=True, bias=True, fp8=E4M3),
    **{f"gmm fp8 {f}, folded": functools.partial(run_hopper_gmm, fp8=f, folded=True) for f in hopper.OCP},
    "gmm fp8, odd blocks": lambda: run_hopper_gmm(k=2880, fp8=E4M3),
    **{f"four_bit {f}": functools.partial(run_four_bit_on_hopper, f) for f in FORMATS},
    **{f"four_bit gradient {f}": functools.partial(run_four_bit_on_hopper, f, False) for f in FORMATS},
    "four_bit float16": lambda: run_four_bit_on_hopper(dtype=F16, bias=True),
    "four_bit with float32 absmax": lambda: run_four_bit_on_hopper(double=False),
    "tgmm": lambda: run_hopper_tgmm(gather=False),
    "tgmm gather": run_hopper_tgmm,
    "tgmm gather float16": lambda: run_hopper_tgmm(dtype=F16),
    "tgmm gather, a multiple of 8": lambda: run_hopper_tgmm(k=200),
    "tgmm with sums": run_hopper_tgmm_sums,
    "tgmm columns first": lambda: run_hopper_tgmm(columns_first=True),
    "tgmm accumulate": lambda: run_hopper_tgmm(onto=F32),
    "tgmm accumulate columns first": lambda: run_hopper_tgmm(onto=F32, columns_first=True),
    **{f"tgmm of {g} groups": lambda g=g: run_hopper_tgmm(groups=g) for g in (8, 256)},
    "tgmm accumulate 256 groups": lambda: run_hopper_tgmm(onto=F32, groups=256),
    **{
        f"tgmm fp8 {y}, {x}": functools.partial(run_hopper_tgmm_fp8, y, x)
        for y in hopper.OCP
        for x in hopper.OCP
    },
    "tgmm fp8 columns first": lambda: run_hopper_tgmm_fp8(columns_first=True),
    "tgmm fp8, odd blocks": lambda: run_hopper_tgmm_fp8(n=656, k=208),
    "tgmm fp8 scaled": lambda: run_hopper_tgmm_fp8(scaled=True),
    "tgmm fp8 scaled, odd blocks": lambda: run_hopper_tgmm_fp8(n=656, k=208, scaled=True),
    "tgmm fp8 scaled, columns first": lambda: run_hopper_tgmm_fp8(columns_first=True, scaled=True),
    "tgmm fp8 scaled accumulate": lambda: run_hopper_tgmm_fp8(onto=F32, scaled=True),
    "tgmm fp8 accumulate": lambda: run_hopper_tgmm_fp8(onto=F32),
    "tgmm fp8 accumulate bfloat16": lambda: run_hopper_tgmm_fp8(onto=BF16),
    "tgmm accumulate bfloat16": lambda: run_hopper_tgmm(gather=False, onto=BF16),
}


# each tuned kernel where it needs the most registers; the walk changes nothing
TUNED = {
    "hopper_up": [
        functools.partial(run_hopper_up, a, i, bias=True, by_columns=columns, k=4096 - 8 * columns)
        for a in GATED
        for i in (False, True)
        for columns in (False, True)
    ],
    "hopper_up_plain": [
        functools.partial(run_hopper_up, "gelu", bias=True, by_columns=columns, k=4096 - 8 * columns)
        for columns in (False, True)
    ],
    "hopper_gmm": [functools.partial(run_hopper_gmm, rows, bias=True) for rows in (True, False)],
    "hopper_four_bit": [
        functools.partial(run_four_bit_on_hopper, format, transpose, bias=transpose)
        for format in FORMATS
        for transpose in (True, False)
    ],
    "hopper_down_grad": [
        functools.partial(run_hopper_down_grad, a, interleaved, need_a, by_rows=rows, k=4096 - 8 * rows)
        for a, interleaved in KINDS
        for need_a in (True, False)
        for rows in (False, True)
    ],
    "hopper_masked": [run_hopper_masked],
    "hopper_masked_fp8": [
        functools.partial(run_hopper_masked, E4M3, k=k, groups=groups, scales=scales)
        for k in (2880, 7168)  # of which blocks are added one or two at a time
        for groups in (16, hopper.MAX_GROUPS)
        for scales in (True, (1, 0), (1024, 1))
    ]
    + [functools.partial(run_scaled_on_hopper, x=E4M3, w=E5M2, k=k) for k in (2880, 4096)],
    "hopper_masked_fp8_plain": [
        functools.partial(run_hopper_masked, E4M3, out=out, k=k, groups=groups, scales=scales)
        for k in (2880, 7168)
        for groups in (16, hopper.MAX_GROUPS)
        for out, scales in ((BF16, None), (F32, None), (F32, True))
    ]
    + [functools.partial(run_scaled_on_hopper, x=E4M3, out=F32)],
    "hopper_up_fp8": [
        functools.partial(run_hopper_up, a, i, bias=True, fp8=E4M3, k=k)
        for a in GATED
        for i in (False, True)
        for k in (4096, 2880)
    ],
    "hopper_up_plain_fp8": [
        functools.partial(run_hopper_up, "gelu", bias=True, fp8=E4M3, k=k) for k in (4096, 2880)
    ],
    "hopper_gmm_fp8": [functools.partial(run_hopper_gmm, bias=True, k=k, fp8=E5M2) for k in (2880, 4096)]
    + [functools.partial(run_scaled_groups_on_hopper, E4M3, order) for order in (True, False)],
    "hopper_down_grad_fp8": [
        functools.partial(run_hopper_down_grad, a, interleaved, need_a, fp8=E5M2, k=k)
        for a, interleaved in KINDS
        for need_a in (True, False)
        for k in (4096, 2880)
    ],
    "hopper_tgmm": [
        functools.partial(run_hopper_tgmm, gather, columns_first, groups=256)
        for gather in (False, True)
        for columns_first in (False, True)
    ],
    "hopper_tgmm_fp8": [
        functools.partial(run_hopper_tgmm_fp8, columns_first=c, scaled=scaled)
        for c in (False, True)
        for scaled in (False, True)
    ],
    "hopper_tgmm_accumulate_fp8": [
        functools.partial(run_hopper_tgmm_fp8, columns_first=c, onto=F32, scaled=scaled)
        for c in (False, True)
        for scaled in (False, True)
    ],
    "hopper_tgmm_accumulate": [functools.partial(run_hopper_tgmm, onto=F32, groups=256)],
    "hopper_masked_int8": [
        functools.partial(run_scaled_on_hopper, k=k, beside=beside, out=out)
        for k in (2880, 4096)
        for beside in (True, False)
        for out in (BF16, F32)
    ],
    "hopper_up_int8": [
        functools.partial(run_hopper_up, a, i, bias=True, fp8=INT8) for a in GATED for i in (False, True)
    ],
    "hopper_up_plain_int8": [functools.partial(run_hopper_up, "gelu", bias=True, fp8=INT8)],
    "hopper_gmm_int8": [
        functools.partial(run_scaled_groups_on_hopper, INT8, order) for order in (True, False)
    ],
}

# up has a slope in registers, where others have a constant or a predicate: 16 bytes too many
FEW_SPILLS = [
    run
    for run in TUNED["hopper_down_grad"]
    if run.args == (CAPPED, False, True) and run.keywords["by_rows"] and run.keywords["k"] % 64
]
DENSE_TUNED = {  # where each needs the most registers
    "hopper_gemm": [Dense(bias=True, alpha=2.0), Dense()],
    "hopper_gemm_act": [Dense(activation=name, alpha=a, save_z=True) for name in UNGATED for a in (1.0, 2.0)],
    "hopper_gemm_full": [EVERYTHING, Dense(beta=0.5)],
}
DENSE = {
    **{
        name: case
        for name, case in PORTABLE_DENSE.items()
        if case.dtype != F32 and not case.out and name != "odd"
    },
    "batched columns": Dense(m=300, n=520, k=320, batch=7, rows=False),
    "everything, columns": dataclasses.replace(EVERYTHING, rows=False),
    **{f"{name}, kept": Dense(activation=name, save_z=True) for name in UNGATED},
    **{f"{name}, kept, with bias": Dense(activation=name, bias=True, save_z=True) for name in UNGATED},
}


def multiplies_once(target, launches):
    """One kernel has wgmma, and its warps give each other registers."""
    (product,) = (launch for launch in launches if "wgmma.mma_async" in launch.assembly)
    assert "setmaxnreg" in product.assembly
    return product


def gathers_rows(target, launches):
    assert "cp.async.cg" in multiplies_once(target, launches).assembly


def copies_by_tma(target, launches):
    assert "cp.async.cg" not in multiplies_once(target, launches).assembly


def is_dense(target, launches):
    product, *rest = launches
    if product.kernel == "few_rows_kernel":
        assert [launch.kernel for launch in rest] in ([], ["finish_kernel"])
        check_few_rows(product)
    else:
        assert not rest
        multiplies_once(target, launches)


def check_few_rows(launch):
    """Shared memory is for the sum over warps alone; all loads of a step come before its products."""
    before, products, after = launch.assembly.partition("mma.sync.aligned.m16n8k16")
    assert products and "ld.global.L1::evict_first" in before and ".v4.b32" in before
    assert not re.search("(ld|st)[.]shared|shfl", before + after[: after.rindex("mma.sync")])
    code = re.findall(r"\b(LDG|HMMA)\b", disassembled(launch.compiled.asm["cubin"]))
    loads = code.index("HMMA")
    assert loads > 4 and "LDG" not in code[loads : code.count("HMMA") + loads]


def leaves_room(tile):
    """An SM has room for the programs that keep it busy."""

    def check(target, launches):
        registers = cubin_resources(launches[0].compiled.asm["cubin"])["REG"]
        at_once = module("gemm").programs_at_once(tile)
        assert at_once * tile.num_warps * 32 * (-(-registers // 8) * 8) <= 2**16
        assert at_once >= 1 and tile.num_warps * at_once >= 16

    return check


def loads_before_sums(tile):
    """All of a step, in the machine code."""

    def check(target, launches):
        (launch,) = launches
        assert launch.kernel == "one_row_kernel"
        names = re.findall(r"\b(LDG|FFMA|BRA)\b", disassembled(launch.compiled.asm["cubin"]))
        code = "".join({"LDG": "l", "FFMA": "f", "BRA": "|"}[name] for name in names)
        step = next(part for part in code.split("|") if "l" in part)
        pieces = tile.block_n * tile.block_k // (32 * tile.num_warps * 8)
        assert step.count("l") > pieces and "f" not in step

    return check


PRODUCTS = (
    32  # of an 8-bit wgmma, for each number of the result; a chain begins with one that adds to nothing
)
MOST = 128 * 128  # numbers of a tile that registers hold twice, as it is and as the tensor core's sum


def longest_sum(launch) -> int:
    """The most products that a tensor core adds up, 0 where none multiplies 8-bit floats."""
    chains, longest = {}, 0
    for line in launch.assembly.splitlines():
        if "wgmma.mma_async" in line and ".e4m3.e4m3" in line:
            acc, rest = re.search(r"\{(.*?)\},(.*);", line).groups()
            adds = rest.split(",")[-3].strip()  # to what is there: a predicate, 0 where it never does
            chains[acc] = PRODUCTS if adds == "0" else chains[acc] + PRODUCTS
            longest = max(longest, chains[acc])
    return longest


def sums_at_most(most, exactly=False):
    def check(target, launches):
        for launch in launches:
            longest = longest_sum(launch)
            assert longest == most if exactly else 0 < longest <= most

    return check


sums_128, sums_exactly_128 = sums_at_most(128), sums_at_most(128, exactly=True)


def sums_in_float32(target, launches):
    """Tiles without warpgroups."""
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in launches[0].assembly
    assert not longest_sum(launches[0])


def promoted_cases():
    """Sums of 8-bit floats on Hopper: how many products the tensor core adds up before float32 does."""
    for op in ("scaled_fp8", "masked", "masked_few"):
        tabled = [row.value for row in load(tuning.TILES, "sm90") if row.key[:2] == (op, 8)]
        for tile in dict.fromkeys([*tabled, *PORTABLE[op]]):
            if tile.block_m * tile.block_n > MOST:
                continue
            rows = min(tile.block_m, 64) if op == "scaled_fp8" else tile.block_m if "few" in op else 256
            for choice in (4096, 6544) if op == "scaled_fp8" else (False, True):
                if op == "scaled_fp8":
                    run = functools.partial(run_scaled, rows, k=choice, x=E4M3, out=F16)
                else:
                    run = functools.partial(run_masked, rows, x=E4M3, shuffled=choice)
                yield f"sums of {op} {tile} {choice}", SM90(with_tile(tile, run), also=sums_128)
    for m, n in ((16, 64), (64, 32), (128, 128)):
        run = functools.partial(run_scaled, rows=m, x=E4M3)
        tile = tuning.Config(m, n, 256, 1, 8 if m == 128 else 4, 3)
        yield f"sums of a longer step {m} {n}", SM90(with_tile(tile, run), also=sums_exactly_128)
    run = with_tile(tuning.Config(16, 32, 256, 1, 4, 3), functools.partial(run_scaled, rows=16, x=E4M3))
    yield "sums without warpgroups", SM90(run, also=sums_in_float32)


def sums_few(out):
    """The tensor core adds up more products only where bfloat16 hides it."""
    most = 256 if out == BF16 else 128

    def check(target, launches):
        longest = [longest_sum(launch) for launch in launches]
        assert longest[0] == most and max(longest) <= most

    return check


def tile_cases():
    """Every tile that a table may name."""
    for op, runs in TUNED.items():
        many = (256, hopper.MAX_GROUPS) if op in ("hopper_up", "hopper_gmm", "hopper_down_grad") else ()
        # lists of many groups have room beside the stages, or in the place of some
        runs = [*runs, *(functools.partial(runs[0], sizes=ints(groups)) for groups in many)]
        for tile in HOPPER_TILES[op]:
            for number, run in enumerate(runs):
                spills = ["sm_90"] if run in FEW_SPILLS and tile.block_k == 64 else ()
                case = SM90(with_tile(tile, run, op), spills=spills, also=multiplies_once)
                yield f"{op} {number} {tile}", case
    for op, dense in DENSE_TUNED.items():
        for tile in HOPPER_TILES[op]:
            for number, case in enumerate(dense):
                for rows in (True, False):
                    run = with_tile(tile, on_hopper(dataclasses.replace(case, rows=rows)), op)
                    yield f"{op} {number} {'rows' if rows else 'columns'} {tile}", SM90(run, also=is_dense)
    op = "hopper_few_rows"
    for tile in HOPPER_TILES[op]:
        for m in (2, 5, 16):
            odd = dataclasses.replace(EVERYTHING, m=m, k=4104)
            split = Dense(m=m - 1, n=256, k=65536, dtype=F16)
            for name, case in (("", Dense(m=m)), (", everything", odd), (", split", split)):
                run = with_tile(tile, on_hopper(case), op)
                yield f"{op} {m}{name} {tile}", SM90(run, also=is_dense)
        run = with_tile(tile, on_hopper(Dense(m=16)), op)
        yield f"{op} at once {tile}", SM90(run, also=leaves_room(tile))
    for tile in PORTABLE["gemm_row"]:
        also = loads_before_sums(tile)
        yield f"one row {tile}", SM90(with_tile(tile, on_hopper(Dense(m=1))), also=also)
        everything = dataclasses.replace(EVERYTHING, m=1, k=4104)
        yield f"one row, everything {tile}", SM90(with_tile(tile, on_hopper(everything)), also=also)
    for out in (F16, F32, BF16):
        runs = [functools.partial(run_scaled_on_hopper, k=k, x=E4M3, out=out) for k in (4096, 2880)]
        yield f"sums to {out}", SM90(lambda runs=runs: [run() for run in runs], also=sums_few(out))


def cases():
    by_tma = "gmm", "masked", "tgmm fp8"
    alone = "tgmm", "tgmm with sums", "tgmm accumulate bfloat16"
    for name, run in RUNS.items():
        also = copies_by_tma if name.startswith(by_tma) or name in alone else gathers_rows
        yield f"hopper {name}", SM90(run, also=also)
    for name, case in DENSE.items():
        yield f"hopper dense {name}", SM90(on_hopper(case), also=is_dense)


CASES, TUNED_CASES = dict(cases()), {**dict(tile_cases()), **dict(promoted_cases())}
