"""The Hopper kernels compile without a GPU: no spills, in shared memory, with wgmma and moving registers."""

import functools
import importlib
import pathlib

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels import hopper
from moe_aiter.kernels.base.activations import ACTIVATIONS, get_activation
from moe_aiter.tuning.candidates import HOPPER_TILES

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aot import TARGETS, compiling_for, kernels_launched_by
from test_compile_targets import TOP_K, E, Shape, check, ints, new

F16, F32 = torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = ints(E)  # of the groups


def module(name):
    """The Hopper kernels of that name."""
    return importlib.import_module(f"moe_aiter.kernels.hopper.{name}")


def eight_bits(x, dtype=E4M3):
    """Strides and all."""
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")


def run_hopper_up(
    activation="swiglu", interleaved=False, bias=False, save_z=True, save_a=True, n=1024,
    dtype=torch.bfloat16, sizes=SIZES, fp8=None,
):  # fmt: skip
    s, parts, groups = Shape(n=n, dtype=dtype), get_activation(activation).parts, len(sizes)
    z, a, w = s.new(s.rows if save_z else 0, parts * n), s.new(s.rows, n), s.new(groups, parts * n, s.k)
    x, b = s.new(s.rows // TOP_K, s.k), s.new(groups, parts * n) if bias else None
    a, plan, scales = a if save_a else None, (*s.plan[:2], sizes), (None, None)
    if fp8 is not None:
        x, w = eight_bits(x, fp8), eight_bits(w, fp8)
        scales = new(s.rows, dtype=F32), new(groups, parts * n, dtype=F32)
    inputs = x, w, b, *plan, activation, interleaved, save_z, None
    module("up").launch_expert_up((z, a), *inputs, scales=scales)


def run_hopper_down_grad(
    activation="swiglu", interleaved=False, need_a=True, dtype=torch.bfloat16, sizes=SIZES, fp8=None
):
    """`fp8`: the format of dout, whose weights are e4m3."""
    s, parts = Shape(n=1024, dtype=dtype), get_activation(activation).parts
    z, dz, a = s.new(s.rows, parts * s.n), s.new(s.rows, parts * s.n), s.new(s.rows if need_a else 0, s.n)
    order, rank, _ = s.plan
    ds, weights = new(*rank.shape, dtype=torch.float32), new(*rank.shape, dtype=torch.float32)
    dout, w = s.new(s.rows // TOP_K, s.k), s.new(len(sizes), s.k, s.n)
    scales = None, None
    if fp8 is not None:
        dout, w = eight_bits(dout, fp8), eight_bits(w.mT.contiguous()).mT
        scales = new(s.rows, dtype=F32), new(len(sizes), s.n, dtype=F32)
    inputs = dout, z, w, weights, order, rank, sizes, activation, interleaved, need_a
    module("down_grad").launch_down_grad((dz, a, ds), *inputs, scales=scales)


def run_hopper_gmm(
    rows=True, bias=False, k=4096, dtype=torch.bfloat16, sliced=False, sizes=SIZES, m=None, numbers=None,
    fp8=None, folded=False, indptr=False,
):  # fmt: skip
    s, groups = Shape(k=k, dtype=dtype), len(sizes)
    m, n = m or s.rows, 2 * s.n if sliced else s.n
    w = (s.new(groups, n, k).mT if rows else s.new(groups, k, n))[:, :, n - s.n :]
    b = s.new(groups, s.n) if bias else None
    numbers = None if numbers is None else ints(groups, dtype=numbers)
    x, scales = s.new(m, k), {}
    if fp8 is not None:
        x, w = eight_bits(x, fp8), eight_bits(w.mT).mT
        w_scale = None if folded else new(groups, n, dtype=F32)[:, n - s.n :]
        scales = {"x_scale": new(m, dtype=F32), "w_scale": w_scale}
    module("gmm").launch_gmm(s.new(m, s.n), x, w, sizes, b, numbers=numbers, indptr=indptr, **scales)


def run_hopper_tgmm(gather=True, columns_first=False, onto=None, k=1024, dtype=torch.bfloat16, groups=E):
    s = Shape(n=2048, k=k, dtype=dtype)
    shape = (groups, s.n, s.k) if columns_first else (groups, s.k, s.n)
    x, y = s.new(s.rows // TOP_K if gather else s.rows, s.k), s.new(s.rows, s.n)
    plan = ints(groups), ints(s.rows) if gather else None, TOP_K if gather else 1
    if onto is None:
        module("tgmm").launch_tgmm(s.new(*shape), x, y, *plan, columns_first)
    else:
        out = new(*shape, dtype=onto)
        module("tgmm").launch_tgmm_into(out.mT if columns_first else out, x, y, *plan)


def run_hopper_tgmm_fp8(y=E4M3, x=E4M3, columns_first=False, onto=None, n=2048, k=4096, groups=E):
    """n columns of y, the rows of the result, and k of x."""
    chunks = 262144 // 128 + groups
    shape = (groups, k, n) if columns_first else (groups, n, k)
    out = new(*shape, dtype=onto or torch.bfloat16)
    operands = new(chunks, k, 128, dtype=x), new(chunks, n, 128, dtype=y), new(chunks, n, dtype=F32)
    out = out.mT if columns_first else out
    module("tgmm").launch_tgmm_fp8(out, *operands, ints(groups, 3), onto is not None)


def run_hopper_gmm_into():
    s = Shape()
    x, w, b = s.new(s.rows, s.k), s.new(E, s.k, s.n), s.new(E, s.n)
    module("gmm").launch_gmm_into(s.new(s.rows, 2 * s.n)[:, : s.n], x, w, ints(E), b, [], 100)


def run_hopper_tgmm_sums():
    s = Shape()
    out, sums = s.new(E, s.k, s.n), new(E, s.n, dtype=F32)
    module("tgmm").launch_tgmm_sums((out, sums), s.new(s.rows, s.k), s.new(s.rows, s.n), ints(E), False)


def run_hopper_masked(
    x=torch.bfloat16, w=None, out=torch.bfloat16, groups=16, m=1024, k=7168, scales=True, sizes=torch.int32
):
    """`scales`: by rows of both, or those strides of x's."""
    n, out = 4096, new(groups, m, 4096, dtype=out)
    of_x, of_w = new(groups, m, dtype=F32), new(groups, n, dtype=F32)
    if scales is not True:
        of_x, of_w = of_x.as_strided(of_x.shape, scales) if scales else None, None
    sizes = None if sizes is None else ints(groups, dtype=sizes)
    operands = new(groups, m, k, dtype=x), new(groups, n, k, dtype=w or x)
    module("gmm").launch_masked_gmm(out, *operands, sizes, of_x, of_w, False)


GATED = [a.name for a in ACTIVATIONS.values() if a.gated]
KINDS = [(name, False) for name in ACTIVATIONS] + [(name, True) for name in GATED]
CASES = {
    **{f"up {name}": functools.partial(run_hopper_up, name, bias=True) for name in ACTIVATIONS},
    **{f"down_grad {name}": functools.partial(run_hopper_down_grad, name) for name in ACTIVATIONS},
    **{f"up {name} interleaved": functools.partial(run_hopper_up, name, True, bias=True) for name in GATED},
    **{
        f"down_grad {name} interleaved": functools.partial(run_hopper_down_grad, name, True) for name in GATED
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
    **{f"up fp8 {name}": functools.partial(run_hopper_up, name, fp8=E4M3) for name in ACTIVATIONS},
    "up fp8 float16": lambda: run_hopper_up(dtype=F16, fp8=E4M3),
    "up fp8 interleaved": lambda: run_hopper_up(interleaved=True, bias=True, fp8=E4M3),
    "up fp8 without z": lambda: run_hopper_up(save_z=False, fp8=E4M3),
    "up fp8 without a": lambda: run_hopper_up(save_a=False, fp8=E4M3),
    **{f"down_grad fp8 {f}": functools.partial(run_hopper_down_grad, fp8=f) for f in hopper.OCP},
    **{f"gmm fp8 {f}": functools.partial(run_hopper_gmm, fp8=f) for f in hopper.OCP},
    "gmm fp8 of some columns": lambda: run_hopper_gmm(sliced=True, bias=True, fp8=E4M3),
    **{f"gmm fp8 {f}, folded": functools.partial(run_hopper_gmm, fp8=f, folded=True) for f in hopper.OCP},
    "gmm fp8, odd blocks": lambda: run_hopper_gmm(k=2880, fp8=E4M3),
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
    "tgmm fp8 accumulate": lambda: run_hopper_tgmm_fp8(onto=F32),
    "tgmm fp8 accumulate bfloat16": lambda: run_hopper_tgmm_fp8(onto=torch.bfloat16),
    "tgmm accumulate bfloat16": lambda: run_hopper_tgmm(gather=False, onto=torch.bfloat16),
}


# each tuned kernel where it needs the most registers
TUNED = {
    "hopper_up": [functools.partial(run_hopper_up, a, i, bias=True) for a in GATED for i in (False, True)],
    "hopper_up_plain": [functools.partial(run_hopper_up, "gelu", bias=True)],
    "hopper_gmm": [functools.partial(run_hopper_gmm, rows, bias=True) for rows in (True, False)],
    "hopper_down_grad": [
        functools.partial(run_hopper_down_grad, a, interleaved, need_a)
        for a, interleaved in KINDS
        for need_a in (True, False)
    ],
    "hopper_masked": [run_hopper_masked],
    "hopper_masked_fp8": [
        functools.partial(run_hopper_masked, E4M3, k=k, groups=groups, scales=scales)
        for k in (2880, 7168)  # of which blocks are added one or two at a time
        for groups in (16, hopper.MAX_GROUPS)
        for scales in (True, (1, 0), (1024, 1))
    ],
    "hopper_masked_fp8_plain": [
        functools.partial(run_hopper_masked, E4M3, out=out, k=k, groups=groups, scales=scales)
        for k in (2880, 7168)
        for groups in (16, hopper.MAX_GROUPS)
        for out, scales in ((torch.bfloat16, None), (F32, None), (F32, True))
    ],
    "hopper_up_fp8": [
        functools.partial(run_hopper_up, a, i, bias=True, fp8=E4M3) for a in GATED for i in (False, True)
    ],
    "hopper_up_plain_fp8": [functools.partial(run_hopper_up, "gelu", bias=True, fp8=E4M3)],
    "hopper_gmm_fp8": [functools.partial(run_hopper_gmm, bias=True, k=k, fp8=E5M2) for k in (2880, 4096)],
    "hopper_down_grad_fp8": [
        functools.partial(run_hopper_down_grad, a, interleaved, need_a, fp8=E5M2)
        for a, interleaved in KINDS
        for need_a in (True, False)
    ],
    "hopper_tgmm": [
        functools.partial(run_hopper_tgmm, gather, columns_first, groups=256)
        for gather in (False, True)
        for columns_first in (False, True)
    ],
    "hopper_tgmm_fp8": [functools.partial(run_hopper_tgmm_fp8, columns_first=c) for c in (False, True)],
    "hopper_tgmm_accumulate_fp8": [
        functools.partial(run_hopper_tgmm_fp8, columns_first=c, onto=F32) for c in (False, True)
    ],
    "hopper_tgmm_accumulate": [functools.partial(run_hopper_tgmm, onto=F32, groups=256)],
}


@pytest.mark.parametrize(
    "op, tile", [pytest.param(op, t, id=f"{op}: {t}") for op in TUNED for t in HOPPER_TILES[op]]
)
def test_tile(op, tile):
    """Every tile that a table may name; the walk changes nothing here.  Dense ones: test_compile_gemm.py."""
    for run in TUNED[op]:
        check_tile(op, tile, run)


@pytest.mark.parametrize("groups", [256, hopper.MAX_GROUPS])
@pytest.mark.parametrize("op", ["hopper_up", "hopper_gmm", "hopper_down_grad"])
def test_tile_of_many_groups(op, groups):
    """Their lists have room beside the stages, or in the place of some."""
    for tile in HOPPER_TILES[op]:
        check_tile(op, tile, functools.partial(TUNED[op][0], sizes=ints(groups)))


def check_tile(op, tile, run):
    with (
        tuning.choose(lambda key: tile if key.op == op else None),
        compiling_for(TARGETS["sm_90"]) as launches,
    ):
        run()
    check(TARGETS["sm_90"], launches)
    assert sum("wgmma.mma_async" in launch.assembly for launch in launches) == 1


@pytest.mark.parametrize("case", CASES)
def test_case(case):
    target = TARGETS["sm_90"]
    with compiling_for(target) as launches:
        CASES[case]()
    check(target, launches)
    products = [launch for launch in launches if "wgmma.mma_async" in launch.assembly]
    assert len(products) == 1 and "setmaxnreg" in products[0].assembly
    gathers = not case.startswith(("gmm", "masked", "tgmm fp8")) and case not in (
        "tgmm",
        "tgmm with sums",
        "tgmm accumulate bfloat16",
    )
    assert ("cp.async.cg" in products[0].assembly) == gathers


def test_every_kernel_has_a_case():
    with compiling_for(TARGETS["sm_90"], compile=False) as launches:
        for case in CASES.values():
            case()
    written = kernels_launched_by(pathlib.Path(hopper.__file__).parent.glob("*.py"))
    assert written and written - {"gemm_kernel", "few_rows_kernel"} <= {launch.kernel for launch in launches}
