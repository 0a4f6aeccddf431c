"""Which tile is whose on Hopper: the kernels' own arithmetic, run on NumPy, beside a loop over the groups."""

import dataclasses
import importlib.util
import pathlib
import re
import sys
import types

import numpy as np
import pytest

from moe_aiter.kernels import hopper

pytestmark = pytest.mark.no_interpreter
PROGRAMS = 5
SIZES = {
    "ragged": [129, 0, 1, 64, 63, 300, 128, 255, 0, 60],
    "some rows in no group": [100, 0, 5, 333],
    "one group": [1000],
    "one of no rows": [0],
    "no rows in a group": [0, 0, 0],
    "the first and the last are empty": [0, 0, 128, 128, 0],
    "as many as a warp has lanes": [31] * 32,
    "many": [3] * 256,
    "most": [0, 1, 2] * 341 + [0],
    "negative": [-5, 200, -1, 300],
    "more rows than there are": [600, 0, 600, 50],
    "more than 32 bits hold": [2**31 - 1] * 40 + [2**62] * 3,
}


class Array(np.ndarray):
    """A tensor, or a buffer in shared memory."""

    def to(self, dtype):
        return self.astype(dtype)

    def index(self, i):
        return self[i]

    def load(self, layout):
        return self

    def store(self, values):
        self[...] = values


@dataclasses.dataclass
class Pointer:
    values: list
    at: object = 0

    def __add__(self, offset):
        return Pointer(self.values, self.at + offset)


def load(pointer, mask=None, other=0):
    if mask is None:
        return np.array(pointer.values[int(pointer.at)]).view(Array)
    padded = np.full(mask.shape, other, np.int64)
    padded[mask] = np.asarray(pointer.values, np.int64)[pointer.at[mask]]
    return padded.view(Array)


def allocate(dtype, shape, layout):
    return np.full(shape, -1, dtype).view(Array)


def as_is(x):
    return x


GL = types.SimpleNamespace(
    constexpr=as_is, tensor=None, shared_memory_descriptor=None, int32=np.int32, int64=np.int64,
    BlockedLayout=lambda *_: None, SwizzledSharedLayout=lambda *_: None,
    program_id=lambda axis: GL.program, arange=lambda a, b, layout: np.arange(a, b).view(Array),
    load=load, where=lambda *args: np.where(*args).view(Array), allocate_shared_memory=allocate,
    associative_scan=lambda x, axis, combine: np.cumsum(x, axis), cdiv=lambda a, b: (a + b - 1) // b,
    minimum=np.minimum, maximum=np.maximum, min=np.min, max=np.max, sum=np.sum,
)  # fmt: skip
GLUON = types.SimpleNamespace(
    gl=GL, gluon=types.SimpleNamespace(jit=as_is, constexpr_function=as_is), mbarrier=None, Number=None,
    aggregate=dataclasses.dataclass, as_tile=lambda buffer, shape, layout: buffer.reshape(shape),
)  # fmt: skip


@pytest.fixture
def schedule(monkeypatch):
    """`schedule.py`, with NumPy in the place of Gluon."""
    package = "moe_aiter.kernels.hopper"
    monkeypatch.setitem(sys.modules, f"{package}.gluon", GLUON)
    monkeypatch.setitem(sys.modules, f"{package}.pipeline", types.SimpleNamespace(make_barriers=None))
    path = pathlib.Path(hopper.__file__).parent / "schedule.py"
    spec = importlib.util.spec_from_file_location(f"{package}.schedule_on_numpy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row_tiles(sizes, M, block_m):
    """Group, first row and end row of every row tile, in order; those of rows in no group come last."""
    first, out = 0, []
    for group, size in enumerate([*sizes, M]):
        end = min(first + max(size, 0), M)
        out += [(group, row, end) for row in range(first, end, block_m)]
        first = end
    return out


@pytest.mark.parametrize("group_m", [1, 4])
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("M", [1, 128, 1000, 1025])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.pairwise
def test_each_tile_is_found_once(schedule, sizes, M, columns, group_m):
    sizes, found = SIZES[sizes], {}
    block_g = max(1 << (len(sizes) - 1).bit_length(), 32)
    groups, rows = schedule.find_groups(Pointer(sizes), M, len(sizes), block_g, 128)
    tiles = schedule.Tiles(rows, columns, len(sizes), group_m, PROGRAMS)
    expected = row_tiles(sizes, M, 128)
    assert rows == len(expected)
    for GL.program in range(PROGRAMS):
        assert tiles.mine() == len(range(GL.program, rows * columns, PROGRAMS))
        for n in range(tiles.mine()):
            found[GL.program + n * PROGRAMS] = tuple(map(int, groups.find(tiles, n)))
        # who looks ahead finds the last there is
        assert groups.find(tiles, tiles.mine())[:3] == groups.find(tiles, tiles.mine() + 1)[:3]
    walk = [found[tile] for tile in range(rows * columns)]
    assert sorted(walk) == sorted((*tile, n) for tile in expected for n in range(columns))
    for first in range(0, rows, group_m):  # so many row tiles walk the columns together
        together = walk[first * columns : (first + group_m) * columns]
        assert together == [(*tile, n) for n in range(columns) for tile in expected[first : first + group_m]]


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("M", [128, 200, 1024])
@pytest.mark.parametrize("sizes", [*SIZES, None])
@pytest.mark.pairwise
def test_each_tile_of_masked_groups_is_found_once(schedule, sizes, M, columns):
    """Groups lie M rows apart, whatever they hold; without sizes they hold all."""
    given = [M] * 7 if sizes is None else SIZES[sizes]
    block_g = max(1 << (len(given) - 1).bit_length(), 32)
    pointer = None if sizes is None else Pointer(given)
    groups, rows = schedule.find_masked_groups(pointer, M, len(given), block_g, 128)
    tiles = schedule.Tiles(rows, columns, len(given), 4, PROGRAMS)
    expected = []
    for g, size in enumerate(given):
        end = g * M + min(max(size, 0), M)
        expected += [(g, row, end) for row in range(g * M, end, 128)]
    assert rows == len(expected)
    found = []
    for GL.program in range(PROGRAMS):
        found += [tuple(map(int, groups.find(tiles, n))) for n in range(tiles.mine())]
    assert sorted(found) == sorted((*tile, n) for tile in expected for n in range(columns))


@pytest.mark.parametrize("sizes", SIZES)
def test_what_is_used_of_a_tile(schedule, sizes):
    G = len(SIZES[sizes])
    tiles = schedule.Tiles(1, 1, G, 1, PROGRAMS)
    assert tiles.used(G - 1, 64) == 64 and tiles.used(G, 64) == 0


def test_a_group_without_weight_has_nothing_to_sum_over(schedule):
    """Or an infinity in its rows, times the zeros that TMA finds before the first weight, would be NaN."""
    tiles = schedule.Tiles(1, 1, 5, 1, PROGRAMS)
    numbers = [2, -1, 0, 3, 2**40]
    seen = [tiles.weight_of(group, Pointer(numbers), 3) for group in range(5)]
    assert [int(weight) for weight, _ in seen[::2]][:2] == [2, 0]
    assert [int(tiles.used(group, 64)) for _, group in seen] == [64, 0, 64, 0, 0]
    # their rows become zeros, those in no group, which stay, do not
    assert tiles.G not in [int(group) for _, group in seen]
    assert int(tiles.weight_of(5, Pointer(numbers), 3)[1]) == tiles.G
    assert tiles.weight_of(4, None, None) == (4, 4)


def test_every_launcher_is_there():
    """Launchers are imported by name, at their first use on a Hopper GPU."""
    source = pathlib.Path(hopper.__file__).read_text()
    names = re.findall(r'implementation\("(\w+)", "(\w+)"', source)
    assert len(names) == source.count("= implementation(") + source.count("(implementation(")
    assert all(callable(hopper.launcher(*name)) for name in names)
