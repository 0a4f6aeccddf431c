"""Lookups: which table speaks first, what a row matches, the rule; tables read, written and refused."""

import dataclasses
import itertools
import os

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.tuning.candidates import (
    FEW,
    FEW_ROWS,
    HOPPER_TILES,
    OPS,
    SHORT_GROUP,
    SHORT_K,
    candidates,
    is_legal,
    rule,
)
from moe_aiter.tuning.store import cache_clear, load
from moe_aiter.tuning.table import TILES, Key, find_tile

HEAD = "op,bits,rows,n,k,block_m,block_n,block_k,group_m,num_warps,num_stages,store_n\n"
WIDE = "128,256,64,1,8,3,0"
KEY = Key("gmm", 16, 2048, 4096, 1024)
NOTES = {"us": 90, "default_us": 100, "gpu": "G", "torch": "2", "triton": "3", "commit": "c", "date": "d"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of tables."""
    monkeypatch.setattr(TILES, "folder", tmp_path)
    cache_clear()
    yield tmp_path
    cache_clear()


def cells(key=KEY, config=None, **notes):
    config = config or candidates(key.op)[0]
    cells = key._asdict() | dataclasses.asdict(config) | NOTES | notes
    return {column: "" if value is None else value for column, value in cells.items()}


@pytest.mark.parametrize(
    "row, matches",
    [
        (KEY, True),
        (KEY._replace(rows=4096), False),  # measured with twice the rows, and so not for these
        (KEY._replace(rows=1024), False),
        (KEY._replace(k=2047), True),
        (KEY._replace(k=2048), False),
        (KEY._replace(k=1023), False),
        (KEY._replace(n=4095), False),
        (KEY._replace(bits=32), False),
        (KEY._replace(op="up"), False),
        (Key("gmm", 16, None, None, None), True),
        (Key("gmm", 16, 8192, None, None), True),
        (Key("gmm", 16, 64, None, None), False),
        (Key("gmm", 16, None, 4096, 9999), True),
    ],
)
def test_what_a_row_matches(row, matches):
    assert row.matches(KEY) is matches


def test_the_gpu_speaks_before_its_architecture_and_that_before_the_rule(folder):
    for name, stages in (("h200", 3), ("sm90", 4)):
        (folder / f"{name}.csv").write_text(f"{HEAD}gmm,16,,4096,,128,256,64,1,8,{stages},0\n")
    names = "h200", "sm90"
    assert find_tile(names, KEY).num_stages == 3
    assert find_tile(names[1:], KEY).num_stages == 4
    assert find_tile(("none", "sm90"), KEY).num_stages == 4
    with pytest.raises(LookupError, match=r"no row of h200 or sm90 matches .*n=8"):
        find_tile(names, KEY._replace(op="masked", n=8))
    hopper = KEY._replace(op="hopper_gmm")
    assert find_tile(names, hopper) == rule("hopper_gmm", hopper.n, hopper.k)
    few = Key("hopper_up", 16, 128, 2048, 4096)  # rows of a group count as well
    assert find_tile(names, few) == rule("hopper_up", 2048, 4096, 128) != rule("hopper_up", 2048, 4096)


def test_the_rule():
    """What was measured on an H200 and, of groups of few rows, on an H100: see NOTES-gpu.md."""
    up, gmm, tgmm = (rule(op, 2048, 4096) for op in ("hopper_up", "hopper_gmm", "hopper_tgmm"))
    assert (up.num_stages, up.store_n, up.group_m) == (4, 32, 1)
    assert (gmm.num_stages, gmm.store_n) == (3, 256) and (tgmm.num_stages, tgmm.store_n) == (4, 128)
    assert rule("hopper_gmm", 4096, 512).num_stages == 4 and rule("hopper_gmm", 4096, 576).num_stages == 3
    assert rule("hopper_up", 28672, 4096).group_m == 16 and rule("hopper_gmm", 4096, 4104).group_m == 16
    assert rule("hopper_up", 5760, 2880).group_m == 16  # gpt-oss-20b's: 31.6 MiB
    assert rule("hopper_down_grad", 2048, 7168).group_m == 1  # DeepSeek-V3's: 28 MiB
    up = [rule("hopper_up", 2048, 4096, rows) for rows in (64, 128, 256, None)]
    assert [(tile.num_stages, tile.store_n) for tile in up] == [(3, 64), (3, 64), (4, 32), (4, 32)]
    gmm = [rule("hopper_gmm", 4096, k, rows) for k in (512, 576) for rows in (64, 512, 1024)]
    assert [tile.num_stages for tile in gmm] == [3, 3, 4, 3, 3, 3]
    dz = [rule("hopper_down_grad", 1024, k, rows) for k in (1024, 4096) for rows in (256, 512)]
    assert [tile.block_k for tile in dz] == [64, 64, 64, 32]
    dense = [rule("hopper_gemm_act", n, k) for n in (512, 16384) for k in (64, 4096)]
    assert all(tile.turns and tile.group_m == 8 for tile in dense)
    assert not rule("hopper_gemm", 16384, 4096).turns and rule("hopper_gemm", 16384, 4096).group_m == 8
    few = [rule("hopper_few_rows", 4096, k) for k in (8192, 8200)]
    assert [(tile.block_k, tile.num_warps, tile.group_m) for tile in few] == [(64, 8, 1), (128, 8, 1)]
    assert rule("gmm", 1, 1) is None


def test_candidates_are_few_and_legal():
    for op in OPS:
        for arch in ("sm90", "gfx942"):
            found = candidates(op, arch=arch)
            assert 2 <= len(set(found)) == len(found) <= 8
            assert all(is_legal(op, config) for config in found)
    assert all(len(HOPPER_TILES[op]) > 1 for op in SHORT_K | SHORT_GROUP)
    assert candidates("up", FEW) == candidates("gmm", 1) == FEW_ROWS and len(set(FEW_ROWS)) == 8
    assert all(is_legal("gmm", config) for config in FEW_ROWS)
    assert candidates("gmm", FEW + 1) == candidates("gmm") and candidates("tgmm", 1) == candidates("tgmm")
    for op in HOPPER_TILES:
        sizes = itertools.product((64, 2**15), (64, 2**15), (1, 64, 2**15, None))
        assert {rule(op, n, k, rows) for n, k, rows in sizes} <= set(candidates(op))


@pytest.mark.parametrize("name", [path.stem for path in sorted(TILES.folder.glob("*.csv"))])
def test_shipped_tables_read(name):
    assert load(TILES, name)


@pytest.mark.parametrize(
    "gpu, name",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100_80gb_hbm3"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA", "unknown"),
        ("../x", "x"),
    ],
)
def test_the_table_of_a_gpu(gpu, name):
    assert tuning.gpu_table(gpu) == name


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "x.csv lacks the columns op, bits"),
        ("op,bits\n", "x.csv lacks the columns rows, n, k, block_m"),
        (f"{HEAD}gmm,16,,,,{WIDE}\ngmm,16,,,many,{WIDE}\n", "x.csv, line 3: k is 'many'; it must be a whole"),
        (f"{HEAD}gmm,16,,,-1,{WIDE}\n", "line 2: k is '-1'; it must be a whole"),
        (f"{HEAD}matmul,16,,,,{WIDE}\n", "line 2: op is 'matmul'; known: up, gmm"),
        (f"{HEAD}gmm,,,,,{WIDE}\n", "line 2: bits is ''; it must be at least 1"),
        (f"{HEAD}gmm,16,,,,0,256,64,1,8,3,0\n", "line 2: block_m is '0'; it must be at least 1"),
        (f"{HEAD}gmm,16,,,,128,256,64,0,8,3,0\n", "line 2: gmm has no tile 128x256x64, 3 stages, 8 w"),
        (f"{HEAD}gmm,16,,,,128,96,64,1,8,3,0\n", "line 2: gmm has no tile 128x96x64"),
        (f"{HEAD}gmm,16,,,,{WIDE[:-3]}0,0\n", "line 2: gmm has no tile 128x256x64, 0 stages"),
        (f"{HEAD}{200_000 * 'x'}\n", "x.csv is not a table: field larger than field limit"),
        (b"\xff\xfe" + HEAD.encode("utf-16-le"), "x.csv is not a table: 'utf-8' codec can't decode"),
        (f"{HEAD}gmm,16,,\n", "line 2: a row has as many cells as there are columns"),
        (f"{HEAD}gmm,16,,,,{WIDE},1\n", "line 2: a row has as many cells as there are columns"),
        (f"{HEAD}hopper_gmm,16,,,,128,256,64,1,4,5,256\n", "line 2: hopper_gmm has no tile 128x256x64, 5 st"),
    ],
)
def test_a_bad_table_is_refused_in_a_line(text, message, tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as error:
        TILES.read(path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_rows_are_merged_and_the_newer_replaces_the_older(folder):
    path, first, second = folder / "new" / "g.csv", *candidates("gmm")[:2]
    others = KEY._replace(k=512), Key("gmm", 16, None, None, 64)
    TILES.write(path, [cells(config=first), *map(cells, others)])
    TILES.write(path, [cells(config=second, date="later"), cells(KEY._replace(op="hopper_gmm"))])
    rows = TILES.read(path)
    assert [row.key for row in rows] == [
        KEY._replace(k=512),
        KEY,
        Key("gmm", 16, None, None, 64),
        KEY._replace(op="hopper_gmm"),
    ]
    assert rows[1].value == second and rows[1].cells["date"] == "later"
    assert tuple(rows[0].cells) == TILES.columns and [p.name for p in path.parent.iterdir()] == ["g.csv"]


def test_what_was_written_is_looked_up_at_once(folder):
    first, second = candidates("gmm")[:2]
    for config in (first, second):
        TILES.write(folder / "h200.csv", [cells(config=config)])
        assert find_tile(("h200",), KEY) == config


def test_a_table_with_other_columns_stays_as_it_is(tmp_path):
    path = tmp_path / "sm90.csv"
    path.write_text(f"{HEAD}gmm,16,,,,{WIDE}\n")
    with pytest.raises(ValueError, match=r"sm90.csv has other columns: op, bits"):
        TILES.write(path, [cells()])
    assert path.read_text() == f"{HEAD}gmm,16,,,,{WIDE}\n"


def test_choose_is_asked_first():
    asked, config = [], candidates("gmm")[0]
    with tuning.choose(lambda key: asked.append(key) or config):
        assert tuning.lookup("gmm", torch.bfloat16, 1000, 64, 32, 8) == config
    assert asked == [Key("gmm", 16, 128, 64, 32)]


def test_rows_of_processes_that_write_at_once_are_all_kept(folder):
    path, config = folder / "g.csv", candidates("gmm")[0]
    children = []
    for writer in range(4):
        if not (child := os.fork()):
            try:
                for number in range(10):
                    TILES.write(path, [cells(KEY._replace(n=64 * (10 * writer + number + 1)), config)])
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert {row.key.n for row in TILES.read(path)} == {64 * n for n in range(1, 41)}
    assert os.listdir(folder) == ["g.csv"]
