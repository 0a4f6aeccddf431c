"""Rows become 8-bit floats where the GPU multiplies these: the kernel compiles there, without spills."""

import re

import pytest
import torch

from moe_aiter.config import interpret
from moe_aiter.kernels import quantize_amax
from moe_aiter.kernels.quantize import FORMATS, launch_quantize_rows

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 200, 130), (8, 4096, 14336)], ids=str)
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
            quantize_amax.launch_quantize_rows_and_amax((*rows, amax), x, format)
            quantize_amax.launch_quantize_by_amax(columns, x.mT, amax, format)
        check(TARGETS[target], launches)
        one_pass = shape[-1] <= quantize_amax.LONGEST
        rows_kernel = "quantize_rows_and_amax_kernel" if one_pass else "quantize_rows_kernel"
        assert [launch.kernel for launch in launches] == [rows_kernel, "quantize_columns_kernel"]
        if target == "sm_90" and dtype == torch.bfloat16 and shape[-1] % 16 == 0:
            for launch in launches:  # whole 16 bytes
                assert re.search(r"st\.global\.v4\.b32", launch.assembly), launch.kernel
                assert re.search(r"(ld|cp\.async\.cg\.shared)\.global.*(v4|0x10)", launch.assembly)


def test_elsewhere_by_the_reference():
    x = new(16, 32)
    with compiling_for(TARGETS["sm_80"]) as launches:
        launch_quantize_rows((new(16, 32, dtype=FORMATS["e4m3"]), new(16, dtype=torch.float32)), x, "e4m3")
    assert not launches
