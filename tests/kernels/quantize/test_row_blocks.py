"""Rows in row blocks, against loops over groups: the same places, the same bytes."""

import itertools

import pytest
import torch

from moe_aiter.kernels.base.fp8 import ROW_BLOCK
from moe_aiter.kernels.quantize.blocks import (
    plan_row_blocks,
    quantize_row_blocks,
    rows_of_blocks,
    transpose_row_blocks,
)
from moe_aiter.kernels.quantize.rows import FORMATS, dequantize_rows, quantize_rows

TOP_K = 2
SIZES = {  # of the groups, and how many rows there are
    "even": ([256, 256], 512),
    "ragged": ([1, 0, 127, 128, 129, 0, 31], 420),
    "all in one": ([0, 0, 300], 300),
    "rows in no group": ([77, 0, 5], 90),
    "more than there are": ([100, 2**31 - 1, 7], 260),
    "negative": ([100, -3, 60], 160),
    "no rows": ([0, 0], 0),
    "many": ([i * 37 % 90 for i in range(70)], 3000),
}
every_size = pytest.mark.parametrize("name", SIZES)
every_format = pytest.mark.parametrize("format", FORMATS)


def row_blocks_of(sizes: list[int], rows: int) -> list[list[range]]:
    """The rows of each row block of each group."""
    found, start = [], 0
    for size in sizes:
        end = min(start + max(size, 0), rows)
        found.append([range(first, min(first + ROW_BLOCK, end)) for first in range(start, end, ROW_BLOCK)])
        start = end
    return found


def draw(name, device, n=48):
    sizes, rows = SIZES[name]
    y = torch.randn(rows, n, device=device) * torch.logspace(-2, 2, n, device=device)
    order = torch.randperm(rows).to(device, torch.int32)
    order[sum(map(len, (r for of_group in row_blocks_of(sizes, rows) for r in of_group))) :] = -1
    return y, order, torch.tensor(sizes, device=device), sizes, rows


@every_size
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_plan(device, name, dtype):
    sizes, rows = SIZES[name]
    spans, row_blocks = plan_row_blocks(torch.tensor(sizes, device=device).to(dtype), rows)
    expected = row_blocks_of(sizes, rows)
    assert spans.dtype == row_blocks.dtype == torch.int32
    assert len(row_blocks) == rows // ROW_BLOCK + len(sizes)
    flat = [(part.start, of_group[-1].stop) for of_group in expected for part in of_group]
    assert row_blocks.tolist()[: len(flat)] == [list(pair) for pair in flat]
    assert (row_blocks[len(flat) :, 0] >= row_blocks[len(flat) :, 1]).all()
    lasts = torch.tensor([len(of_group) for of_group in expected]).cumsum(0).tolist()
    lengths = [sum(map(len, of_group)) for of_group in expected]
    by_size = sorted(range(len(sizes)), key=lambda g: (-lengths[g], g))
    assert spans.tolist() == [[g, lasts[g] - len(expected[g]), lasts[g]] for g in by_size]


@every_format
@every_size
def test_transpose(device, name, format):
    _, order, group_sizes, sizes, rows = draw(name, device)
    x8, _ = quantize_rows(torch.randn(rows // TOP_K, 20, device=device), format)
    _, row_blocks = plan_row_blocks(group_sizes, rows)
    got = transpose_row_blocks(x8, order, TOP_K, row_blocks)
    assert got.shape == (len(row_blocks), 20, ROW_BLOCK) and got.is_contiguous()
    for c, part in enumerate(part for of_group in row_blocks_of(sizes, rows) for part in of_group):
        expected = torch.zeros(20, ROW_BLOCK, dtype=torch.uint8, device=device)
        expected[:, : len(part)] = x8.view(torch.uint8)[order[part.start : part.stop].long() // TOP_K].T
        assert torch.equal(got[c].view(torch.uint8), expected)


def test_bytes_may_begin_anywhere(device):
    _, order, group_sizes, _, rows = draw("even", device)
    x8 = torch.randint(256, (rows // TOP_K * 20 + 1,), dtype=torch.uint8, device=device)[1:].view(-1, 20)
    x8, (_, row_blocks) = x8.view(FORMATS["e4m3"]), plan_row_blocks(group_sizes, rows)
    both = (transpose_row_blocks(x, order, TOP_K, row_blocks) for x in (x8, x8.clone()))
    got, expected = (result.view(torch.uint8) for result in both)
    used = rows // ROW_BLOCK
    assert torch.equal(got[:used], expected[:used])


def test_one_token_may_have_any_stride(device):
    order, sizes = torch.zeros(1, dtype=torch.int32, device=device), torch.ones(1, device=device).int()
    x8 = torch.arange(8, dtype=torch.uint8, device=device).view(8, 1).T
    got = transpose_row_blocks(x8.view(FORMATS["e4m3"]), order, 1, plan_row_blocks(sizes, 1)[1])
    assert torch.equal(got.view(torch.uint8)[0, :, 0], x8[0])


@pytest.mark.no_interpreter
@every_format
@every_size
def test_quantize(device, name, format):
    """Each column of a row block as `quantize_rows` has it, once its rows are multiplied."""
    y, order, group_sizes, sizes, rows = draw(name, device)
    factor = torch.rand(rows // TOP_K, device=device) + 0.1
    _, row_blocks = plan_row_blocks(group_sizes, rows)
    got, scale = quantize_row_blocks(y, factor, order, TOP_K, row_blocks, format)
    assert got.dtype == FORMATS[format] and got.shape == (len(row_blocks), 48, ROW_BLOCK)
    for c, part in enumerate(part for of_group in row_blocks_of(sizes, rows) for part in of_group):
        m = slice(part.start, part.stop)
        expected, expected_scale = quantize_rows((y[m] * factor[order[m].long() // TOP_K][:, None]).T, format)
        assert torch.equal(scale[c], expected_scale)
        assert torch.equal(got[c, :, : len(part)].float(), expected.float())
        assert not got[c, :, len(part) :].float().any()


@pytest.mark.no_interpreter
def test_what_is_not_finite_stays_in_its_column(device):
    y, order, group_sizes, _, rows = draw("ragged", device)
    y[200, 3], y[201, 5] = float("inf"), float("nan")
    _, row_blocks = plan_row_blocks(group_sizes, rows)
    _, scale = quantize_row_blocks(y, y.new_ones(rows // TOP_K), order, TOP_K, row_blocks)
    spoilt = scale[:4].isnan().nonzero().tolist()
    assert spoilt == [[2, 3], [2, 5]]


@pytest.mark.no_interpreter
@every_size
def test_there_and_back(device, name):
    y, order, group_sizes, sizes, rows = draw(name, device)
    _, row_blocks = plan_row_blocks(group_sizes, rows)
    y8, scale = quantize_row_blocks(y, y.new_ones(rows // TOP_K), order, TOP_K, row_blocks)
    used = row_blocks[:, :1] < row_blocks[:, 1:]
    numbers = dequantize_rows(y8, scale, torch.float32).where(used[..., None], 0)
    back = rows_of_blocks(numbers, row_blocks, rows)
    live = sum(map(len, itertools.chain.from_iterable(row_blocks_of(sizes, rows))))
    assert torch.allclose(back[:live], y[:live], rtol=2**-4, atol=0.05)
    assert not back[live:].any()


def test_refuses(device):
    y, order, group_sizes, _, rows = draw("even", device)
    _, row_blocks = plan_row_blocks(group_sizes, rows)
    factor = y.new_ones(rows // TOP_K)
    with pytest.raises(ValueError, match="unknown format 'e3m4'; known: e4m3, e5m2"):
        quantize_row_blocks(y, factor, order, TOP_K, row_blocks, "e3m4")
    with pytest.raises(ValueError, match=r"y is \(M=510, N\) but order is \(M=512,\)"):
        quantize_row_blocks(y[:-2], factor, order, TOP_K, row_blocks)
    with pytest.raises(TypeError, match=r"x8 must be of 8-bit floats, not torch.float32"):
        transpose_row_blocks(y[: rows // TOP_K], order, TOP_K, row_blocks)
