"""Products whose weights, or whose result, TMA copies in boxes, which are clipped where a matrix ends."""

import pytest
import torch
from check import assert_as_good_as_torch

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels.base import tile
from moe_aiter.kernels.experts.up import expert_up_op
from moe_aiter.kernels.grouped import gmm, tgmm
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import use

from ...references import expert_up_reference, gmm_reference, tgmm_reference

DTYPE = torch.float16 if interpret else torch.bfloat16
FULL, NARROW = tuning.Config(128, 256, 64, 8, 8, 3), tuning.Config(128, 128, 32, 8, 4, 4)


@pytest.fixture
def boxes(device, monkeypatch):
    """The device, and the descriptors that are made there."""
    if interpret:
        monkeypatch.setattr(tile, "has_tma", lambda unit, itemsize: itemsize == 2)
        monkeypatch.setattr(tgmm, "has_tma", tile.has_tma)
        monkeypatch.setattr(gmm, "unit_of", lambda *sizes: 8)
    elif device.type == "cpu" or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no TMA")
    made = []
    for module in (tile, tgmm):
        known = module.Descriptor
        monkeypatch.setattr(
            module, "Descriptor", lambda *args, known=known: made.append(args) or known(*args)
        )
    return device, made


def on(device, *shape):
    return torch.randn(shape).to(device, DTYPE)


def weights(device, columns, *shape):
    """By rows or by columns, with a poisoned expert behind them."""
    G, A, B = shape
    w = on(device, G + 1, B, A).mT if columns else on(device, G + 1, A, B)
    w[G] = float("nan")
    return w[:G] / 32


@pytest.mark.interpret
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("N", [8, 264, 520])
@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.pairwise
def test_gmm(boxes, G, N, columns):
    device, made = boxes
    sizes = torch.tensor([130, 0, 40][:G], device=device)
    x, w = on(device, 180, 2056), weights(device, columns, G, N, 2056).mT
    with use("triton"), tuning.choose(lambda key: FULL):
        assert_as_good_as_torch(gmm.gmm_op, gmm_reference, x, w, sizes, None)
    assert len(made) == 1


@pytest.mark.interpret
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("H, width", [(72, 8), (1000, 72), (64, 200)])
@pytest.mark.parametrize("E", [1, 3])
@pytest.mark.pairwise
def test_expert_up(boxes, E, H, width, columns, interleaved):
    device, made = boxes
    ids = torch.rand(150, E + 1).argsort(1)[:, :1].clamp(max=E - 1).to(device)
    order, rank, sizes = sort_by_expert(ids, E)
    w, bias = weights(device, columns, E, 2 * width, H), on(device, E, 2 * width)
    inputs = on(device, 150, H), w, bias, order, rank, sizes

    def up(x, *rest):
        return expert_up_op(x, *rest, "swiglu", interleaved, True, 0, None)

    def reference(*inputs):
        return expert_up_reference(*inputs, "swiglu", interleaved, True)

    with use("triton"), tuning.choose(lambda key: FULL):
        assert_as_good_as_torch(up, reference, *inputs)
    assert len(made) == (not columns or interleaved)  # pairs of columns would pass through registers


@pytest.mark.interpret
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("K, N", [(8, 136), (200, 72), (1032, 8)])
@pytest.mark.pairwise
def test_tgmm(boxes, K, N, gathered, columns_first):
    device, made = boxes
    sizes = torch.tensor([50, 0, 7], device=device)
    order = torch.randperm(64).int().to(device) if gathered else None
    x, y = on(device, 32 if gathered else 64, K), on(device, 64, N)
    with use("triton"), tuning.choose(lambda key: NARROW):
        args = x, y, sizes, order, 2 if gathered else 1, columns_first
        assert_as_good_as_torch(torch.ops.moe_aiter.tgmm, tgmm_reference, *args)
    assert made


@pytest.mark.interpret
def test_what_tma_refuses(boxes):
    """Strides of 1, or 0, or no multiples of 16 bytes; rows that overlap."""
    flat = on(boxes[0], 2**16)
    for shape, strides in (
        *(((4, 64, 64), (1, 64, 1)), ((1, 64, 64), (0, 1, 1)), ((4, 64, 64), (64, 0, 1))),
        *(((4, 64, 64), (0, 64, 1)), ((4, 64, 64), (1024, 8, 1)), ((4, 64, 64), (4096, 1, 8))),
        *(((4, 64, 64), (4096, 68, 1)), ((4, 64, 64), (4100, 64, 1)), ((4, 64, 64), (4096, 2, 64))),
    ):
        assert tile.boxes_of(flat.as_strided(shape, strides), 8) is None
    assert tile.boxes_of(flat[1:].as_strided((4, 64, 64), (4096, 64, 1)), 8) is None
    assert tile.boxes_of(flat.as_strided((4, 64, 64), (4096, 64, 1)), 8) == "rows"
    assert tile.boxes_of(flat.as_strided((1, 64, 64), (1, 1, 64)), 8) == "columns"
