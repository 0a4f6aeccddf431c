"""Tiles of few rows, with weights as the left operand or the right one, and when they replace Hopper's."""

import csv

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.kernels import hopper
from moe_aiter.kernels.base.tile import cdiv, is_transposed, row_tiles
from moe_aiter.kernels.experts import up
from moe_aiter.kernels.experts.up import UpInputs, expert_up_op
from moe_aiter.kernels.grouped import gmm
from moe_aiter.kernels.grouped.gmm import GroupedInputs, gmm_op
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import use
from moe_aiter.tuning import Config, table
from moe_aiter.tuning.candidates import FEW_ROWS
from moe_aiter.tuning.store import cache_clear
from moe_aiter.tuning.table import Key

from ...check import assert_as_good_as_torch, of_groups
from ...references import expert_up_reference, gmm_reference
from ...shapes import CAPPED, GROUP_SIZES, LIMITED, spread, transposed

DTYPES = [torch.float32, torch.float16] if interpret else [torch.float32, torch.bfloat16, torch.float16]
TILES = [Config(rows, 64, 32, walk, 4, 3) for rows, walk in ((16, 1), (32, 8))]
ACTIVATIONS = [("swiglu", False), ("swiglu_oai", True), (LIMITED, True), (CAPPED, False), ("relu2", False)]


@pytest.fixture(params=TILES, ids=str)
def tile(request, device):
    """A tile for every launch of the portable kernels."""
    if device.type == "cpu" and not interpret:
        pytest.skip("portable kernels need a GPU or the interpreter")
    with use("triton"), tuning.choose(lambda key: request.param):
        yield request.param


@pytest.fixture(params=[False, True], ids=["weights right", "weights left"])
def side(request, monkeypatch):
    for module in (gmm, up):
        monkeypatch.setattr(module, "is_transposed", lambda config, x: request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
@pytest.mark.parametrize("K, N", [(64, 72), (40, 130)])  # whole steps, and half a step more
@pytest.mark.parametrize("layout", [torch.clone, transposed, spread])
@pytest.mark.pairwise
def test_gmm(device, tile, side, sizes, dtype, K, N, layout):
    x, w = torch.randn(sum(sizes) + 3, K), torch.randn(len(sizes), K, N) / K**0.5
    x, w, bias = (t.to(device, dtype) for t in (x, w, torch.randn(len(sizes), N)))
    group_sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
    for b in (bias, None):
        assert_as_good_as_torch(gmm_op, gmm_reference, x, layout(w), group_sizes, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation, interleaved", ACTIVATIONS)
@pytest.mark.parametrize("T, H", [(1, 64), (13, 40), (70, 64)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.pairwise
def test_expert_up(device, tile, side, dtype, activation, interleaved, T, H, biased):
    E, k, width = 5, 2, 2 * 45
    x, w = torch.randn(T, H).to(device, dtype), (torch.randn(E, width, H) / H**0.5).to(device, dtype)
    bias = torch.randn(E, width).to(device, dtype) if biased else None
    plan = sort_by_expert(torch.rand(T, E, device=device).argsort(1)[:, :k] % 4, E)  # the last has no rows
    for save_z in (True, False):
        inputs = x, w, bias, *plan, activation, interleaved, save_z, 0, None
        both = [of_groups(fn, plan[2]) for fn in (expert_up_op, expert_up_reference)]
        assert_as_good_as_torch(*both, *inputs)


@pytest.mark.parametrize("dtype", [torch.float32])
def test_in_place_of_hoppers_kernel_a_bias_is_added_last(device, tile, side, dtype, monkeypatch):
    """The same bits as a sum without a bias, and then the bias, as Hopper's kernels compute."""
    monkeypatch.setattr(hopper, "stands_in", lambda impl, i: True)
    monkeypatch.setattr(hopper, "launcher", lambda module, name: lambda act: act.triton_fns)
    E, H, width = 3, 40, 90
    x, w, bias = (torch.randn(*shape, dtype=dtype) for shape in ((9, H), (E, width, H), (E, width)))
    x, w, bias = x.to(device), w.to(device), bias.to(device)
    order, rank, group_sizes = sort_by_expert(torch.arange(9, device=device)[:, None] % E, E)
    of_rows = bias.repeat_interleave(group_sizes.long(), 0)
    for b, add in ((bias, 0), (None, of_rows)):
        y = gmm_op(x, w.mT, group_sizes, b) + add
        z, _ = expert_up_op(x, w, b, order, rank, group_sizes, "swiglu", False, True, 0, None)
        found = torch.stack([y, z + add])
        if b is not None:
            first = found
    assert first.equal(found)


def test_which_tiles_have_weights_on_the_left():
    x = torch.empty(1, dtype=torch.bfloat16)
    assert [is_transposed(tile, x) for tile in FEW_ROWS] == [tile.block_m < 64 for tile in FEW_ROWS]
    assert not is_transposed(Config(16, 32, 64), x) and not is_transposed(FEW_ROWS[0], x.float())


@pytest.mark.parametrize("tail", [0, 1, 40])
@pytest.mark.parametrize("sizes", [*GROUP_SIZES.values(), [1] * 20, [17] * 3], ids=str)
def test_no_row_tile_is_missing(sizes, tail):
    for block_m in (16, 32, 128):
        tiles = sum(cdiv(size, block_m) for size in (*sizes, tail))
        assert tiles <= row_tiles(sum(sizes) + tail, len(sizes), block_m)
    assert row_tiles(8, 128, 16) == 8 and row_tiles(0, 128, 16) == 0


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Write a row of this GPU's table: `write(key, block_m)`."""
    monkeypatch.setattr(table.TILES, "folder", tmp_path)
    monkeypatch.setattr(tuning, "tables", lambda device: ("gpu", "arch"))
    monkeypatch.setattr("triton.runtime.driver._active", FakeDriver())
    tile = dict.fromkeys(table.TILES.columns, 1) | {"block_m": 16, "block_n": 64, "block_k": 128}

    def write(name, *key):
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, table.TILES.columns)
            writer.writeheader()
            writer.writerow(tile | dict(zip(Key._fields, key, strict=True)))
        cache_clear()

    yield write
    cache_clear()


class FakeDriver:
    def get_current_device(self):
        return 0


@pytest.mark.no_interpreter
def test_a_row_for_few_rows_replaces_hoppers_kernel(tables):
    x, w = torch.empty(100, 256, dtype=torch.bfloat16), torch.empty(8, 256, 512, dtype=torch.bfloat16)
    of_up = UpInputs(x, w.mT, None, torch.empty(60), None, None, "silu", False, True, 0, None)
    by_hopper = {
        "gmm": lambda: hopper.bind_gmm.should_use(GroupedInputs(x, w, None, None)),
        "up": lambda: hopper.bind_expert_up.should_use(of_up),
    }
    for op, rows in (("gmm", 16), ("up", 8)):
        ask = by_hopper[op]
        assert ask(), "there is no table"
        tables("arch", op, 16, "", "", "")
        assert ask(), "a row for any number of rows is for those whom Hopper's kernel does not serve"
        tables("arch", op, 16, 64, "", "")
        assert ask(), "a row for many rows as well"
        tables("arch", op, 16, 32, "", "")
        assert not ask()
        tables("arch", op, 16, "", "", "")
        tables("gpu", op, 16, 2 * rows, 512, 256)
        assert ask(), "a row is for its number of rows"
        tables("gpu", op, 16, rows, 512, 256)
        assert not ask()
        tables("gpu", op, 16, "", "", "")
    tables("gpu", "up", 16, 128, 512, 256)
    assert by_hopper["up"](), "many rows are Hopper's"
