"""Rows become 8-bit floats where the GPU multiplies these: the kernel compiles there, without spills."""

import re

import pytest
import torch

from moe_aiter.config import interpret
from moe_aiter.kernels.quantize import blocks, layouts
from moe_aiter.kernels.quantize.rows import (
    FORMATS,
    LONGEST,
    launch_quantize_by_amax,
    launch_quantize_rows,
    launch_quantize_rows_and_amax,
)

if interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aot import TARGETS, compiling_for
from test_compile_targets import check, new

SHAPES = [(32768, 4096), (262144, 1024), (64, 28672), (128, 4096, 1024), (8, 2880, 2880), (1, 24)]


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx950"])
def test_compiles(target, shape, dtype, columns):
    x = new(*shape, dtype=dtype)
    x = x.mT if columns else x
    for format, small in FORMATS.items():
        out = new(*x.shape, dtype=small), new(*x.shape[:-1], dtype=torch.float32)
        with compiling_for(TARGETS[target]) as launches:
            launch_quantize_rows(out, x, format)
        check(TARGETS[target], launches)
        assert len(launches) == 1
        if target == "sm_90":
            assert f"{format}x2" in launches[0].assembly  # converted by the hardware


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("target", TARGETS)
def test_int8_is_rounded_after_the_product_is(target, columns):
    """By an addition, which one instruction with the product would not round in between."""
    x = new(4096, 4096)
    out = new(4096, 4096, dtype=torch.int8), new(4096, dtype=torch.float32)
    with compiling_for(TARGETS[target]) as launches:
        launch_quantize_rows(out, x.mT if columns else x, "int8")
    check(TARGETS[target], launches)
    code = launches[0].assembly
    if target.startswith("sm"):
        assert "fma." not in code and re.search(r"add(\.rn)?\.f32", code)
    else:
        assert "v_pk_fma_f32" not in code and "v_add_f32" in code or "v_pk_add_f32" in code


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 200, 130), (8, 512, 8192), (8, 4096, 14336)], ids=str)
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx950"])
def test_both_ways_compile(target, shape, dtype, monkeypatch):
    """Rows with the columns' largest magnitudes, and the columns by these."""
    monkeypatch.setattr(torch, "amax", lambda *_, out: out)
    x = new(*shape, dtype=dtype)
    amax = new(*x.mT.shape[:-1], dtype=torch.float32)
    for format, small in FORMATS.items():
        rows, columns = (
            (new(*t.shape, dtype=small), new(*t.shape[:-1], dtype=torch.float32)) for t in (x, x.mT)
        )
        with compiling_for(TARGETS[target]) as launches:
            launch_quantize_rows_and_amax((*rows, amax), x, format)
            launch_quantize_by_amax(columns, x.mT, amax, format)
        check(TARGETS[target], launches)
        one_pass = shape[-1] <= LONGEST
        rows_kernel = "quantize_rows_and_amax_kernel" if one_pass else "quantize_rows_kernel"
        assert [launch.kernel for launch in launches] == [rows_kernel, "quantize_columns_kernel"]
        if target == "sm_90" and dtype == torch.bfloat16 and shape[-1] % 16 == 0:
            for launch in launches:  # whole 16 bytes
                assert re.search(r"st\.global\.v4\.b32", launch.assembly), launch.kernel
                assert re.search(r"(ld|cp\.async\.cg\.shared)\.global.*(v4|0x10)", launch.assembly)


@pytest.mark.parametrize("k", [2**n for n in range(6, 15)])
def test_warps_do_not_meet_at_each_row(k, monkeypatch):
    """Maxima of columns that several warps share would go through shared memory at every step."""
    monkeypatch.setattr(torch, "amax", lambda *_, out: out)
    x, scale, amax = new(128, 4096, k), new(128, 4096, dtype=torch.float32), new(128, k, dtype=torch.float32)
    with compiling_for(TARGETS["sm_90"]) as launches:
        launch_quantize_rows_and_amax((new(*x.shape, dtype=FORMATS["e4m3"]), scale, amax), x, "e4m3")
    (launch,) = launches
    assert not launch.spilled()
    assert len(re.findall(r"(ld|st)\.shared", launch.assembly)) <= 16


@pytest.mark.parametrize("rows, tokens, n, k", [(262144, 32768, 2048, 4096), (96, 48, 40, 24)])
@pytest.mark.parametrize("target", TARGETS)
def test_chunks_compile(target, rows, tokens, n, k):
    """Rows in chunks: on a GPU without 8-bit products the reference quantises them."""
    groups, top_k = 128, rows // tokens
    sizes, order = new(groups, dtype=torch.int32), new(rows, dtype=torch.int32)
    plan = blocks.new_plan_chunks(sizes, rows)
    y, factor, x8 = new(rows, n), new(tokens, dtype=torch.float32), new(tokens, k, dtype=FORMATS["e4m3"])
    names = ["plan_chunks_kernel", "transpose_chunks_kernel"]
    with compiling_for(TARGETS[target]) as launches:
        blocks.launch_plan_chunks(plan, sizes, rows)
        inputs = x8, order, top_k, plan[1]
        blocks.launch_transpose_chunks(blocks.new_transpose_chunks(*inputs), *inputs)
        for format in FORMATS if target in ("sm_90", "sm_100", "gfx950") else ():
            inputs = y, factor, order, top_k, plan[1], format
            blocks.launch_quantize_chunks(blocks.new_quantize_chunks(*inputs), *inputs)
            names.append("quantize_chunks_kernel")
    check(TARGETS[target], launches)
    assert [launch.kernel for launch in launches] == names
    if target == "sm_90" and rows > 96:
        for launch in launches[1:]:  # whole 16 bytes, and bytes rather than float32 through shared memory
            assert re.search(r"st\.global(\.cs)?\.v4\.b32", launch.assembly), launch.kernel
            assert re.search(r"ld\.global.*v4\.b32", launch.assembly), launch.kernel
            assert launch.shared_bytes <= 16384


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("groups, m, k", [(128, 2048, 4096), (8, 28672, 4096), (3, 200, 132), (3, 41, 23)])
@pytest.mark.parametrize("target", TARGETS)
def test_rows_in_the_other_order_compile(target, groups, m, k, dtype):
    w, scale = new(groups, m, k, dtype=dtype), new(groups, m, dtype=torch.float32)
    native = target in ("sm_90", "sm_100", "gfx950")
    with compiling_for(TARGETS[target]) as launches:
        for format, small in FORMATS.items():
            for given in (w, new(groups, k, m, dtype=dtype).mT) if native else ():
                layouts.launch_quantize_transposed(new(groups, k, m, dtype=small), given, scale, format)
        x8 = new(groups, m, k, dtype=FORMATS["e4m3"])
        if m % 4 == k % 4 == 0:
            layouts.launch_transpose_rows8(layouts.new_transpose_rows8(x8), x8)
    if launches:
        check(TARGETS[target], launches)
    names = ["quantize_transposed_kernel"] * 4 * native + ["transpose_rows8_kernel"] * (m % 4 == 0)
    assert [launch.kernel for launch in launches] == names
    if target == "sm_90" and m % 16 == 0:
        for launch in launches[0], launches[-1]:  # whole 16 bytes
            assert re.search(r"st\.global\.v4\.b32", launch.assembly), launch.kernel
            assert re.search(r"ld\.global.*v4\.b32", launch.assembly), launch.kernel
            assert launch.shared_bytes <= 16384


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("k", [8, 40, 1536, 2048, 6000, 28672])
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx950"])
def test_rows_that_take_scales_over_compile(target, k, dtype):
    factor, sizes = new(128, k, dtype=torch.float32), new(128, dtype=torch.int32)
    with compiling_for(TARGETS[target]) as launches:
        for format in FORMATS:
            inputs = new(262144, k, dtype=dtype), factor, sizes, format
            layouts.launch_quantize_folded(layouts.new_quantize_folded(*inputs), *inputs)
    check(TARGETS[target], launches)
    assert [launch.kernel for launch in launches] == ["quantize_folded_kernel"] * 2
    if target == "sm_90" and k % 16 == 0:
        for launch in launches:
            assert re.search(r"st\.global\.v4\.b32", launch.assembly)
            assert re.search(r"ld\.global.*v4\.b32", launch.assembly)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_int8_compiles_everywhere(target, shape):
    out = new(*shape, dtype=torch.int8), new(*shape[:-1], dtype=torch.float32)
    with compiling_for(TARGETS[target]) as launches:
        launch_quantize_rows(out, new(*shape), "int8")
    check(TARGETS[target], launches)
    assert len(launches) == 1


def test_elsewhere_by_the_reference():
    x = new(16, 32)
    with compiling_for(TARGETS["sm_80"]) as launches:
        launch_quantize_rows((new(16, 32, dtype=FORMATS["e4m3"]), new(16, dtype=torch.float32)), x, "e4m3")
    assert not launches
