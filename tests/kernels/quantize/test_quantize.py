"""Rows as 8-bit floats: how far off they are, and what becomes of zeros, infinities and NaN."""

import pytest
import torch
from check import Peak, as_tuple, launcher

from moe_aiter.config import interpret
from moe_aiter.kernels import quantize
from moe_aiter.kernels.quantize.rows import (
    FORMATS,
    LEAST,
    dequantize_rows,
    quantize_by_amax,
    quantize_rows,
    quantize_rows_and_amax,
)
from moe_aiter.kernels.quantize.scale_blocks import dequantize, quantize_blocks
from moe_aiter.op import IMPLS, INPUTS, fill, use

from ... import references
from ...references import quantize_rows_reference
from ...shapes import LAYOUTS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DTYPES = DTYPES[:2] if interpret else DTYPES
HALF_STEP = {"e4m3": 2**-4, "e5m2": 2**-3}  # of a number that is not subnormal, relative
SMALLEST = {"e4m3": 2**-9, "e5m2": 2**-16}

every_format = pytest.mark.parametrize("format", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(*shape, dtype, device):
    """Rows of very different sizes."""
    size = torch.rand(*shape[:-1], 1) * 2.0 ** torch.randint(-6, 7, (*shape[:-1], 1))
    return (torch.randn(shape) * size).to(device, dtype)


@every_format
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (13, 40), (5, 300), (3, 7, 24), (2, 65, 33)], ids=str)
@pytest.mark.no_interpreter
@pytest.mark.pairwise
def test_error(device, shape, dtype, format):
    x = draw(*shape, dtype=dtype, device=device)
    x8, scale = quantize_rows(x, format)
    assert x8.dtype == FORMATS[format] and scale.shape == shape[:-1] and scale.dtype == torch.float32
    exact = x.double()
    off = (dequantize_rows(x8, scale, torch.float64) - exact).abs()
    allowed = HALF_STEP[format] * exact.abs() + 0.51 * SMALLEST[format] * scale[..., None]
    assert (off <= allowed * (1 + 1e-6)).all()
    largest = torch.finfo(FORMATS[format]).max
    assert (x8.float().abs().amax(-1) == largest).all()  # all of the range is used


@every_format
def test_rows_that_are_not_numbers(device, format):
    x = torch.randn(6, 20, device=device)
    x[1], x[2, 3], x[3, 4] = 0, float("inf"), float("nan")
    x[4] = 1e-44  # below what a scale can be
    x8, scale = quantize_rows(x, format)
    back = dequantize_rows(x8, scale, torch.float32)
    assert back[1].eq(0).all() and scale[1] == scale[4] == LEAST
    assert back[2:4].isnan().all()
    assert back[[0, 4, 5]].isfinite().all() and back[4].abs().max() <= 2e-44


@every_format
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.no_interpreter
def test_strides(device, layout, format):
    x = LAYOUTS[layout](torch.randn(37, 48, device=device))
    for given in (x, x.mT, x[None], torch.stack([x, x + 1]).mT):
        x8, scale = quantize_rows(given, format)
        expected = quantize_rows(given.contiguous(), format)
        assert x8.is_contiguous()
        assert torch.equal(x8.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scale, expected[1])


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (13, 40), (5, 300), (70, 9000), (3, 7, 24)], ids=str)
def test_int8_is_the_nearest_and_of_two_the_even(device, shape, dtype):
    x = draw(*shape, dtype=dtype, device=device)
    x8, scale = quantize_rows(x, "int8")
    assert x8.dtype == torch.int8 and scale.shape == shape[:-1] and scale.dtype == torch.float32
    torch.testing.assert_close(scale, x.float().abs().amax(-1) / 127)
    assert torch.equal(x8.float(), (x.float() * (1 / scale)[..., None]).round())
    assert (x8.float().abs().amax(-1) == 127).all()
    halves = torch.tensor([[127, 0.5, 1.5, -2.5, -0.5]], dtype=dtype, device=device)
    assert quantize_rows(halves, "int8")[0].tolist() == [[127, 0, 2, -2, 0]]
    assert torch.equal(quantize_rows(x.mT, "int8")[0], quantize_rows(x.mT.contiguous(), "int8")[0])


def test_int8_of_what_is_not_a_number(device):
    x = torch.randn(5, 20, device=device)
    x[1], x[2, 3], x[3, 4], x[4] = 0, float("inf"), float("nan"), 1e-44
    x8, scale = quantize_rows(x, "int8")
    back = dequantize_rows(x8, scale, torch.float32)
    assert back[1].eq(0).all() and back[2:4].isnan().all() and back[[0, 4]].isfinite().all()


@every_format
@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.no_interpreter
@pytest.mark.pairwise
def test_columns_whose_largest_are_known(device, layout, dtype, format):
    x = LAYOUTS[layout](odd(torch.randn(3, 37, 48).to(device, dtype)))
    for w in (x, x[1]):
        *rows, amax = quantize_rows_and_amax(w, format)
        assert same(rows, quantize_rows(w, format))
        assert same([amax], [w.abs().amax(-2).float().nan_to_num(*3 * [float("inf")])])
        assert same(quantize_by_amax(w.mT, amax, format), quantize_rows(w.mT, format))


@every_format
def test_the_definition_of_a_scale(device, format):
    """One product and one quotient, each correctly rounded, so that it has no choice of its bits."""
    x = draw(50, 20, dtype=torch.float32, device=device)
    x8, scale = quantize_rows(x, format)
    most = torch.tensor(torch.finfo(FORMATS[format]).max, device=device)
    expected = (x.abs().amax(1).double() * (1 / most.double()).float().double()).float()
    assert torch.equal(scale, expected)
    inverse = (1 / scale.double()).float()
    assert torch.equal(x8.float(), (x * inverse[:, None]).to(x8.dtype).float())
    # a largest number whose rounded scale is too small still becomes the largest 8-bit float
    assert (x * inverse[:, None]).abs().max() > most and (x8.float().abs().amax(1) == most).all()


def odd(x):
    """With rows of zeros and of tiny numbers, an infinity and a NaN, where there are so many."""
    if x.shape[-2] < 4 or x.shape[-1] < 3:
        return x
    x[..., 0, :] = 0
    x[..., 1, 2], x[..., 2, 1] = float("inf"), float("nan")
    x[..., 3, :] = 6e-8
    return x


def same(some, others):
    """Bit for bit, but for the bits of a NaN."""
    pairs = list(zip(some, others, strict=True))
    kinds = [(a.dtype, a.shape) == (b.dtype, b.shape) for a, b in pairs]
    return all(kinds) and all(torch.equal(*(t.float().nan_to_num(-1, 9e9) for t in pair)) for pair in pairs)


SHAPES = [(5, 16), (37, 256), (64, 9000), (70, 20000), (3, 200, 130), (2, 2304, 96), (4, 65, 1024)]


@pytest.mark.gpu
@every_format
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_are_the_reference(shape, dtype, format):
    x = odd(draw(*shape, dtype=dtype, device="cuda"))
    found = {}
    for backend in ("triton", "torch"):
        with use(backend):
            *_, amax = results = quantize_rows_and_amax(x, format)
            columns, known = quantize_rows(x.mT, format), quantize_by_amax(x.mT, amax, format)
            found[backend] = *results, *quantize_rows(x, format), *columns, *known
    assert same(found["triton"], found["torch"])
    assert same(found["triton"][5:7], found["triton"][7:])


@pytest.mark.skipif(not interpret, reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    "shape", [(5, 0), (0, 5), (1, 1), (5, 16), (37, 256), (70, 4100), (3, 200, 130), (2, 65, 33)], ids=str
)
def test_kernels_without_the_last_rounding(shape, monkeypatch):
    """The interpreter rounds to 8 bits in its own way, so the kernels write what they would round."""
    monkeypatch.setattr(quantize.rows, "native_fp8", FORMATS.values)
    x = odd(draw(*shape, dtype=torch.float32, device="cpu"))
    amax = quantize.rows.amax_reference(x, -2)
    for given, name, inputs, more in (
        (x, "quantize_rows", (), ()),
        (x.mT, "quantize_rows", (), ()),
        (x, "quantize_rows_and_amax", (), (amax,)),
        (x.mT, "quantize_by_amax", (amax,), ()),
    ):
        scale = quantize_rows_reference(given, "e4m3")[1]
        expected = given * (1 / scale)[..., None], scale, *more
        out = tuple(torch.full(t.shape, 5.0) for t in expected)
        launcher(name, IMPLS[name]["triton"])(out, given, *inputs, "e4m3")
        assert same(out, expected), name


def test_refuses():
    with pytest.raises(ValueError, match="unknown format 'e3m4'; known: e4m3, e5m2"):
        quantize_rows(torch.randn(2, 3), "e3m4")
    with pytest.raises(TypeError, match=r"not torch.int32"):
        quantize_rows(torch.ones(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"\(M, K\) or \(G, M, K\)"):
        quantize_rows(torch.randn(3))
    for amax in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"amax must be \(2,\) in float32, not "):
            quantize_by_amax(torch.randn(2, 3), amax)


WEIGHTS = {  # an op that quantises weights, and what it takes
    "quantize_rows": lambda w: (w, "int8"),
    "quantize_rows_and_amax": lambda w: (w, "e4m3"),
    "quantize_by_amax": lambda w: (w, quantize.rows.amax_reference(w, -1), "e5m2"),
    "quantize_blocks": lambda w: (w, False, "e4m3"),
    "quantize_blocks of squares": lambda w: (w, True, "e4m3"),
    "quantize_transposed": lambda w: (w, quantize.rows.amax_reference(w, -1).clamp(min=1), "e4m3"),
}
every_weight = pytest.mark.parametrize("case", WEIGHTS)


def of_weight(case, w):
    """The name of the op, its inputs and results, and those of its reference."""
    op, inputs = case.split()[0], WEIGHTS[case](w)
    if op == "quantize_rows_and_amax":
        expected = *quantize_rows_reference(*inputs), quantize.rows.amax_reference(w, -2)
    else:
        expected = as_tuple(getattr(references, f"{op}_reference")(*inputs))
    return op, INPUTS[op](*inputs), tuple(torch.full_like(t, 1) for t in expected), expected


@every_weight
@pytest.mark.parametrize("part", [1, 1000, 6000, 10**6])
@pytest.mark.parametrize(
    "shape", [(7, 300), (3, 300, 5), (5, 2, 130), (3, 0, 4), (0, 2, 3), (2, 3, 0)], ids=str
)
@pytest.mark.pairwise
def test_parts_have_the_bits_of_the_whole(monkeypatch, case, part, shape):
    if case == "quantize_transposed" and len(shape) == 2:
        shape = (1, *shape)
    monkeypatch.setattr(quantize.rows, "PART", part)
    op, i, outs, expected = of_weight(case, odd(draw(*shape, dtype=torch.bfloat16, device="cpu")))
    IMPLS[op]["torch"](outs if len(outs) > 1 else outs[0], i)
    assert same(outs, expected)


@every_weight
@pytest.mark.no_interpreter
def test_torch_quantises_in_little_memory(case):
    w = torch.randn(128, 128, 512).bfloat16()
    op, i, outs, _ = of_weight(case, w)
    with Peak() as peak:
        fill(op, outs if len(outs) > 1 else outs[0], i)
    assert peak.most < 1.25 * w.nbytes + sum(t.nbytes for t in outs)  # views are of all of w


@pytest.mark.parametrize("kind", ["rows", "columns", "blocks", "squares"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.no_interpreter
def test_numbers_come_back_in_little_memory(monkeypatch, kind, dtype, where):
    """With the bits and the strides of all at once."""
    M = 1000 if where == "cpu" else 32000
    w = torch.randn((64, 128, M) if kind == "columns" else (64, M, 128), device=where).bfloat16()
    if kind in ("rows", "columns"):
        x8, scale = quantize_rows(w.mT if kind == "columns" else w)
        x8 = x8.mT.contiguous().mT
    else:
        x8, scale = quantize_blocks(w, kind == "squares")
    with Peak() as peak:
        got = dequantize(x8, scale, dtype)
    assert peak.most < (1.25 if where == "cpu" else 1.75) * got.nbytes + x8.nbytes + scale.nbytes
    for part in ("PART", "GPU_PART"):
        monkeypatch.setattr(quantize.rows, part, 2**30)
    whole = dequantize(x8, scale, dtype)
    assert torch.equal(got, whole) and got.stride() == whole.stride() == x8.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_int8_of_millions_has_every_bit_of_the_reference(columns):
    """A product that is rounded once, not twice, differs in a few of a million."""
    x = torch.randn(2048, 4096, device="cuda").bfloat16()
    x = x.mT if columns else x
    got = quantize_rows(x, "int8")
    with use("torch"):
        expected = quantize_rows(x, "int8")
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("format", [*FORMATS, "int8"])
@pytest.mark.parametrize("shape", [(5, 0), (2, 3, 0), (0, 7), (0, 0), (2, 0, 7), (0, 3, 4)], ids=str)
def test_rows_of_nothing_have_the_scale_of_zeros(device, shape, format):
    for x in (torch.empty(shape, device=device), torch.empty(*shape[:-2], *shape[:-3:-1], device=device).mT):
        x8, scale = quantize_rows(x, format)
        assert x8.shape == shape and scale.shape == shape[:-1] and scale.eq(LEAST).all()
    if format != "int8":
        *rows, amax = quantize_rows_and_amax(x, format)
        assert same(rows, (x8, scale)) and amax.shape == (*shape[:-2], shape[-1]) and amax.eq(0).all()


def test_rows_that_are_no_tensor():
    with pytest.raises(TypeError, match="x must be a tensor, not list"):
        quantize_rows([[1.0, 2.0]])
    with pytest.raises(TypeError, match="x must be a tensor, not NoneType"):
        torch.ops.moe_aiter.quantize_rows(None, "e4m3")
