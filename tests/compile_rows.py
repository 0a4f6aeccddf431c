"""Cases for test_compile.py: the kernels that multiply nothing."""

import functools
import itertools
import re
import unittest.mock

import torch
from aot import TARGETS, Case, ints, new
from check import launcher

from moe_aiter.kernels.dense.attention_mask import (
    MaskBiasInputs,
    ZeroRowsInputs,
    bind_mask_bias,
    bind_zero_rows,
)
from moe_aiter.kernels.experts.glu import bind_glu, bind_glu_backward
from moe_aiter.kernels.quantize import blocks, layouts, scale_blocks
from moe_aiter.kernels.quantize.rows import (
    FORMATS,
    LONGEST,
    bind_quantize_by_amax,
    bind_quantize_rows,
    bind_quantize_rows_and_amax,
)
from moe_aiter.kernels.rows.guests import add_guests, clear_guests, places_in, send_guests
from moe_aiter.kernels.rows.lend import LendInputs, bind_lend, new_lend
from moe_aiter.kernels.rows.merge import MergeInputs, bind_merge, new_merge
from moe_aiter.kernels.rows.permute import (
    bind_permute,
    bind_row_dots,
    bind_unpermute,
    bind_unpermute_columns,
)
from moe_aiter.kernels.rows.route import bind_route, bind_route_backward
from moe_aiter.kernels.rows.sort import bind_sort
from moe_aiter.kernels.rows.sums import bind_group_sum, bind_weigh_rows
from moe_aiter.kernels.rows.topk import bind_topk

BF16, F32 = torch.bfloat16, torch.float32
E, TOP_K = 128, 8
NATIVE = "sm_90", "sm_100", "gfx950"  # GPUs that multiply 8-bit floats; for others the reference quantizes


def run_merge(dtype=torch.int32, num_experts=64, sources=4, last_first=True, guests=None):
    plans = ints(sources, 32768, dtype=dtype), ints(sources, num_experts, dtype=dtype)
    lent = () if guests is None else (ints(2, num_experts), guests)
    i = MergeInputs(*plans, 8, 16, 16, 65536, last_first, *lent)
    bind_merge(i)(new_merge(i), i)


def run_lend(dtype, ranks, num_experts, guests):
    sizes = ints(ranks, num_experts, dtype=dtype)
    run_new(bind_lend, new_lend, LendInputs(sizes, -(-num_experts // ranks), guests, 128, 2500))


def run_guests(run, dtype, *sizes):
    parts, places = ([new(*axes, n, dtype=dtype) for n in sizes] for axes in ((16,), (8, 4)))
    run(parts, list(map(places_in, places)), ints(8, 4), 16)


def run_sort(dtype, num_experts=E, tokens=4096):
    out = ints(tokens * 8), ints(tokens, 8), ints(num_experts)
    launcher("sort_by_expert", bind_sort)(out, ints(tokens, 8, dtype=dtype), num_experts)


def run_topk(num_experts, k):
    scores = new(4096, num_experts, dtype=torch.float32)
    out = new(4096, k, dtype=torch.float32), ints(4096, k, dtype=torch.int64)
    launcher("topk", bind_topk)(out, scores, k)


def routed(num_experts, k):
    """scores, weights and expert_ids of 4096 tokens."""
    floats = (new(4096, n, dtype=torch.float32) for n in (num_experts, k))
    return *floats, ints(4096, k, dtype=torch.int64)


def run_route(num_experts, k, sigmoid, renormalize, need_scores=True, fixed=False):
    logits = new(4096, num_experts, dtype=torch.float32)
    scores, *rest = routed(num_experts, k)
    out = scores if need_scores else scores[:0], *rest
    ids = new(4096, k, dtype=torch.int16) if fixed else None
    launcher("route", bind_route)(out, logits, k, sigmoid, renormalize, 1.0, need_scores, ids)


def run_route_backward(num_experts, k, sigmoid, renormalize, of_scores=True, of_weights=True):
    scores, weights, ids = routed(num_experts, k)
    grads = weights if of_weights else None, scores if of_scores else None
    saved = weights, ids, scores if sigmoid or not renormalize else None
    rest = *saved, *grads, num_experts, sigmoid, renormalize, 1.0
    launcher("route_backward", bind_route_backward)(new(*scores.shape), *rest)


def run_permute(dtype, weighted, h=2048):
    x, weights = new(4096, h, dtype=dtype), new(4096, 8, dtype=torch.float32) if weighted else None
    launch = launcher("permute", bind_permute)
    launch(new(4096 * 8, h, dtype=dtype), x, ints(4096 * 8), ints(4096, 8), weights)


def run_unpermute(dtype, weighted, h=2048):
    rows, weights = new(4096 * 8, h, dtype=dtype), new(4096, 8, dtype=torch.float32) if weighted else None
    launch = launcher("unpermute", bind_unpermute)
    launch(new(4096, h, dtype=dtype), rows, ints(4096 * 8), ints(4096, 8), weights)


def run_add_to_sums(dtype):
    rows, rank, weights = new(9000, 512, dtype=dtype), ints(4096, 8), new(4096, 8, dtype=torch.float32)
    for how in ({"add": True}, {"some": True}):
        add = bind_unpermute_columns(rank.shape, 512, rows.stride(), 2048, **how)
        add(new(4096, 2048, dtype=dtype)[:, 512:1024], rows, rank, weights)


def run_row_dots(dtype, h=2048):
    rows, x = new(4096 * 8, h, dtype=dtype), new(4096, h, dtype=dtype)
    launch = launcher("row_dots", bind_row_dots)
    launch(new(4096, 8, dtype=torch.float32), rows, x, ints(4096 * 8), ints(4096, 8))


def run_weigh_rows(dtype, h=2048):
    x, s = new(4096 * 8, h, dtype=dtype), new(4096, 8, dtype=torch.float32)
    launcher("weigh_rows", bind_weigh_rows)((x, s), x, x, s, ints(4096 * 8), ints(4096, 8))


def run_glu(activation, dtype=torch.bfloat16, h=1024):
    launcher("glu", bind_glu)(new(4096, h, dtype=dtype), new(4096, 2 * h, dtype=dtype), activation, False)


def run_glu_backward(activation, dtype=torch.bfloat16, h=1024):
    z, dout = new(4096, 2 * h, dtype=dtype), new(4096, h, dtype=dtype)
    launcher("glu_backward", bind_glu_backward)(new(4096, 2 * h, dtype=dtype), dout, z, activation, False)


def run_group_sum(scaled, h=2048):
    order, scale = (ints(4096 * 8), new(4096, 8, dtype=torch.float32)) if scaled else (None, None)
    out, y = new(E, h, dtype=torch.float32), new(4096, h)
    launcher("group_sum", bind_group_sum)(out, y, ints(E), order, TOP_K if scaled else 1, scale)


def run_attention(rows, dtype):
    mask, alive = new(64, 1, rows, 4096, dtype=torch.bool), new(64, 1, rows, 1, dtype=torch.uint8)
    i = MaskBiasInputs(mask, dtype)
    bind_mask_bias(i)((new(64, 1, rows, 4096, dtype=dtype), alive), i)
    i = ZeroRowsInputs(new(64, 32, rows, 128, dtype=dtype), alive.view(torch.bool))
    bind_zero_rows(i)(i.out, i)


def run_quantize(x, format):
    dtype = torch.int8 if format == "int8" else FORMATS[format]
    out = new(*x.shape, dtype=dtype), new(*x.shape[:-1], dtype=F32)
    launcher("quantize_rows", bind_quantize_rows)(out, x, format)


def run_both_ways(shape, dtype, format, columns_too=True):
    """Rows with the columns' largest magnitudes, and the columns by these."""
    x = new(*shape, dtype=dtype)
    amax = new(*x.mT.shape[:-1], dtype=F32)
    with unittest.mock.patch.object(torch, "amax", lambda *_, out: out):
        rows, columns = (
            (new(*t.shape, dtype=FORMATS[format]), new(*t.shape[:-1], dtype=F32)) for t in (x, x.mT)
        )
        launcher("quantize_rows_and_amax", bind_quantize_rows_and_amax)((*rows, amax), x, format)
        if columns_too:
            launcher("quantize_by_amax", bind_quantize_by_amax)(columns, x.mT, amax, format)


def run_new(bind, new, i):
    """Launch into new outputs, and return these."""
    out = new(i)
    bind(i)(out, i)
    return out


def run_row_blocks(rows, tokens, n, k, formats):
    groups, top_k = 128, rows // tokens
    sizes, order = ints(groups), ints(rows)
    plan = blocks.PlanRowBlocksInputs(sizes, rows)
    _, row_blocks = run_new(blocks.bind_plan_row_blocks, blocks.new_plan_row_blocks, plan)
    i = blocks.TransposeRowBlocksInputs(new(tokens, k, dtype=FORMATS["e4m3"]), order, top_k, row_blocks)
    run_new(blocks.bind_transpose_row_blocks, blocks.new_transpose_row_blocks, i)
    own = i._replace(x8=new(rows, k, dtype=FORMATS["e4m3"]), order=None, top_k=1)
    run_new(blocks.bind_transpose_row_blocks, blocks.new_transpose_row_blocks, own)
    for format in formats:
        factor = new(tokens, dtype=F32)
        i = blocks.QuantizeRowBlocksInputs(new(rows, n), factor, order, top_k, row_blocks, format)
        run_new(blocks.bind_quantize_row_blocks, blocks.new_quantize_row_blocks, i)


def run_transposed(shape, dtype, format, columns):
    groups, m, k = shape
    w = new(groups, k, m, dtype=dtype).mT if columns else new(groups, m, k, dtype=dtype)
    i = layouts.QuantizeTransposedInputs(w, new(groups, m, dtype=F32), format)
    run_new(layouts.bind_quantize_transposed, layouts.new_quantize_transposed, i)


def run_transpose_rows8(groups, m, k):
    i = layouts.TransposeRows8Inputs(new(groups, m, k, dtype=FORMATS["e4m3"]))
    run_new(layouts.bind_transpose_rows8, layouts.new_transpose_rows8, i)


def run_blocks(x, square, format):
    i = scale_blocks.QuantizeBlocksInputs(x, square, format)
    run_new(scale_blocks.bind_quantize_blocks, scale_blocks.new_quantize_blocks, i)


def run_folded(k, dtype, format):
    factor, sizes = new(128, k, dtype=F32), ints(128)
    i = layouts.QuantizeFoldedInputs(new(262144, k, dtype=dtype), factor, sizes, format)
    run_new(layouts.bind_quantize_folded, layouts.new_quantize_folded, i)


def is_one_launch(target, launches):
    assert len(launches) == 1


def converts_in_hardware(format):
    def check(target, launches):
        (launch,) = launches
        assert target != "sm_90" or f"{format}x2" in launch.assembly

    return check


def fuses_no_product(target, launches):
    """A product is rounded before the sum that it belongs to, in each lane of a reduction alike."""
    (launch,) = launches
    assert not re.search(r"\b(fma|v_fma|v_fmac|v_pk_fma|v_mad)[._](rn\.)?f32", launch.assembly)


def rounds_int8_after_the_product(target, launches):
    """By an addition, which one instruction with the product would not round in between."""
    (launch,) = launches
    if target.startswith("sm"):
        assert "fma." not in launch.assembly and re.search(r"add(\.rn)?\.f32", launch.assembly)
    else:
        assert "v_pk_fma_f32" not in launch.assembly
        assert "v_add_f32" in launch.assembly or "v_pk_add_f32" in launch.assembly


def warps_do_not_meet_at_each_row(target, launches):
    """Maxima of columns that several warps share would go through shared memory at every step."""
    (launch,) = launches
    assert len(re.findall(r"(ld|st)\.shared", launch.assembly)) <= 16


def moves_16_bytes(store=r"st\.global\.v4\.b32", load=r"ld\.global.*v4\.b32", which=None, shared_bytes=None):
    """A check on Hopper: loads and stores are whole, and little goes through shared memory."""

    def check(target, launches):
        for launch in launches[which or slice(None)] if target == "sm_90" else ():
            assert re.search(store, launch.assembly) and re.search(load, launch.assembly), launch.kernel
            assert shared_bytes is None or launch.shared_bytes <= shared_bytes

    return check


SHAPES = [(32768, 4096), (262144, 1024), (64, 28672), (128, 4096, 1024), (8, 2880, 2880), (1, 24)]
BOTH_WAYS = [*SHAPES, (3, 200, 130), (8, 512, 8192), (8, 4096, 14336)]
TRANSPOSED = [(128, 2048, 4096), (8, 28672, 4096), (3, 200, 132), (3, 41, 23)]
moves_both = moves_16_bytes(load=r"(ld|cp\.async\.cg\.shared)\.global.*(v4|0x10)")
moves_row_blocks = moves_16_bytes(r"st\.global(\.cs)?\.v4\.b32", which=slice(1, None), shared_bytes=16384)
moves_few = moves_16_bytes(shared_bytes=16384)
moves_all = moves_16_bytes()
converts = {format: converts_in_hardware(format) for format in FORMATS}


def quantize_cases():
    for shape, dtype, columns, format in itertools.product(SHAPES, (BF16, F32), (False, True), FORMATS):
        x = new(*shape, dtype=dtype)
        run = functools.partial(run_quantize, x.mT if columns else x, format)
        name = f"quantize {format} {shape} {dtype} {'columns' if columns else 'rows'}"
        yield name, Case(run, NATIVE, also=converts[format])
    for columns in (False, True):
        x = new(4096, 4096)
        run = functools.partial(run_quantize, x.mT if columns else x, "int8")
        yield f"quantize int8 columns={columns}", Case(run, also=rounds_int8_after_the_product)
    for shape in SHAPES:
        run = functools.partial(run_quantize, new(*shape), "int8")
        yield f"quantize int8 {shape}", Case(run, also=is_one_launch)
    for shape, dtype, format in itertools.product(BOTH_WAYS, (BF16, F32), FORMATS):
        rows_kernel = f"quantize_rows{'_and_amax' if shape[-1] <= LONGEST else ''}_kernel"
        also = moves_both if dtype == BF16 and shape[-1] % 16 == 0 else None
        run = functools.partial(run_both_ways, shape, dtype, format)
        names = [rows_kernel, "quantize_columns_kernel"]
        yield f"quantize both ways {format} {shape} {dtype}", Case(run, NATIVE, kernels=names, also=also)
    for shape, dtype, square, format in itertools.product(TRANSPOSED, (BF16, F32), (False, True), FORMATS):
        for x in (new(*shape, dtype=dtype), new(*shape, dtype=dtype).mT):
            name = f"quantize blocks {format} {tuple(x.shape)} {x.stride()} {dtype} {square}"
            yield name, Case(functools.partial(run_blocks, x, square, format), NATIVE, also=converts[format])
    for k in (2**n for n in range(6, 15)):
        run = functools.partial(run_both_ways, (128, 4096, k), BF16, "e4m3", columns_too=False)
        yield f"amax {k}", Case(run, ["sm_90"], also=warps_do_not_meet_at_each_row)


def layout_cases():
    for sizes in ((262144, 32768, 2048, 4096), (96, 48, 40, 24)):
        also = moves_row_blocks if sizes[0] > 96 else None
        for targets, formats in ((NATIVE, tuple(FORMATS)), (sorted(TARGETS.keys() - NATIVE), ())):
            names = [
                "plan_row_blocks_kernel",
                *["transpose_row_blocks_kernel"] * 2,
                *["quantize_row_blocks_kernel"] * len(formats),
            ]
            run = functools.partial(run_row_blocks, *sizes, formats)
            yield f"row blocks {sizes} {len(formats)}", Case(run, targets, kernels=names, also=also)
    for shape in TRANSPOSED:
        also, names = moves_few if shape[1] % 16 == 0 else None, ["quantize_transposed_kernel"]
        for dtype, format, columns in itertools.product((BF16, F32), FORMATS, (False, True)):
            run = functools.partial(run_transposed, shape, dtype, format, columns)
            case = Case(run, NATIVE, kernels=names, also=None if columns else also)
            yield f"quantize transposed {format} {shape} {dtype} {columns}", case
        if shape[1] % 4 == shape[2] % 4 == 0:
            run = functools.partial(run_transpose_rows8, *shape)
            yield f"transpose {shape}", Case(run, kernels=["transpose_rows8_kernel"], also=also)
    for k, dtype, format in itertools.product((8, 40, 1536, 2048, 6000, 28672), (BF16, F32), FORMATS):
        also, names = moves_all if k % 16 == 0 else None, ["quantize_folded_kernel"]
        run = functools.partial(run_folded, k, dtype, format)
        yield f"quantize folded {format} {k} {dtype}", Case(run, NATIVE, kernels=names, also=also)
    for rows, dtype in itertools.product((1, 4096), (BF16, torch.float16, F32)):
        run, names = functools.partial(run_attention, rows, dtype), ["mask_bias_kernel", "zero_rows_kernel"]
        yield f"attention {rows} {dtype}", Case(run, kernels=names)


ROUTERS = [(8, 2), (64, 16), (256, 16), (512, 16)]
RUNS = {
    "merge": run_merge,
    "merge int64": lambda: run_merge(torch.int64, 256, last_first=False),
    "merge shares": lambda: run_merge(guests=0),
    "merge shares, first window first": lambda: run_merge(guests=0, last_first=False),
    "merge guests": lambda: run_merge(num_experts=256, guests=4),
    "merge guests, first window first": lambda: run_merge(guests=90, last_first=False),
    "lend": lambda: run_lend(torch.int32, 8, 256, 8),
    "lend int64": lambda: run_lend(torch.int64, 3, 100, 33),
    "lend among many": lambda: run_lend(torch.int32, 64, 512, 4),
    "send guests": lambda: run_guests(send_guests, BF16, 2048 * 768),
    "send two guests": lambda: run_guests(send_guests, BF16, 2048 * 1536, 2048 * 768),
    "add guests": lambda: run_guests(add_guests, BF16, 2048 * 768),
    "add two guests": lambda: run_guests(add_guests, BF16, 2048 * 1536, 2048 * 768),
    "clear guests": lambda: clear_guests([new(4, 4096, dtype=F32), new(4, 512, dtype=F32)], ints(4)),
    "add guests in float32": lambda: run_guests(add_guests, F32, 4099),
    "sort int32": lambda: run_sort(torch.int32),
    "sort int64": lambda: run_sort(torch.int64),
    "sort by one expert": lambda: run_sort(torch.int64, 1),
    "sort by many experts": lambda: run_sort(torch.int64, 4096),
    "sort few int32": lambda: run_sort(torch.int32, tokens=32),
    "sort few by one expert": lambda: run_sort(torch.int64, 1, 5),
    "sort few by many experts": lambda: run_sort(torch.int64, 1024, 512),
    "topk 8 of 128": lambda: run_topk(128, 8),
    "topk 2 of 8": lambda: run_topk(8, 2),
    "route softmax": lambda: run_route(128, 8, False, False),
    "route without scores": lambda: run_route(128, 8, False, True, need_scores=False),
    "route sigmoid": lambda: run_route(128, 8, True, True),
    "route fixed": lambda: run_route(128, 8, False, True, fixed=True),
    "route backward": lambda: run_route_backward(128, 8, False, True, of_scores=False),
    "route backward of the scores": lambda: run_route_backward(128, 8, True, True, of_weights=False),
    "route backward of the weights": lambda: run_route_backward(128, 8, True, True, of_scores=False),
    "route backward softmax": lambda: run_route_backward(128, 8, False, False),
    "route backward sigmoid": lambda: run_route_backward(128, 8, True, True),
    **{f"route {k} of {e}": lambda e=e, k=k: run_route(e, k, False, True) for e, k in ROUTERS},
    **{
        f"route backward {k} of {e}": lambda e=e, k=k: run_route_backward(e, k, True, True)
        for e, k in ROUTERS
    },
    "permute": lambda: run_permute(torch.bfloat16, False),
    "permute weighted float32": lambda: run_permute(torch.float32, True),
    "unpermute": lambda: run_unpermute(torch.bfloat16, False),
    "unpermute weighted": lambda: run_unpermute(torch.bfloat16, True),
    "unpermute, added": lambda: run_add_to_sums(torch.bfloat16),
    "row_dots": lambda: run_row_dots(torch.bfloat16),
    "weigh_rows": lambda: run_weigh_rows(torch.bfloat16),
    "glu swiglu": lambda: run_glu("swiglu"),
    "glu geglu backward": lambda: run_glu_backward("geglu"),
    "group_sum": lambda: run_group_sum(False),
    "group_sum scaled": lambda: run_group_sum(True),
}
# a division is made of fused products
CHECKS = {"route backward": fuses_no_product, "route backward softmax": fuses_no_product}
PLAIN = {name: Case(run, also=CHECKS.get(name)) for name, run in RUNS.items()}
CASES = {**PLAIN, **dict(quantize_cases()), **dict(layout_cases())}
