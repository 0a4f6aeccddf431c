"""The table that says which backend computes a product."""

import pytest
import torch

from moe_aiter.tuning import choice
from moe_aiter.tuning.choice import CHOICES, COLUMNS, ChoiceKey
from moe_aiter.tuning.store import cache_clear, find_row


def line(**cells):
    return ",".join(str(cells.get(column, "")) for column in COLUMNS)


def find(name, case):
    row = find_row(CHOICES, (name,), case)
    return "torch" if row is None else row.value


def table(folder, *rows, head=COLUMNS):
    path = folder / "x.csv"
    path.write_text("\n".join([",".join(head), *rows]) + "\n")
    return path


def test_the_first_row_that_matches_is_taken(tmp_path, monkeypatch):
    path = table(
        tmp_path,
        line(op="gemm", bits=16, layout="nt", epilogue="gelu", rows=16, n=64, k=32, backend="triton", us=1.5),
        line(op="gemm", bits=16, layout="nt", rows=16, backend="hopper"),
        line(op="bmm", bits=32, backend="triton"),
    )
    monkeypatch.setattr(CHOICES, "folder", path.parent)
    case = ChoiceKey("gemm", 16, "nt", "gelu", 16, 64, 32)
    changes = {"n": 65, "epilogue": "none", "rows": 8, "layout": "nn", "bits": 32}
    expected = {"n": "hopper", "epilogue": "hopper", "rows": "torch", "layout": "torch", "bits": "torch"}
    cache_clear()
    try:
        assert find("x", case) == "triton"
        for column, value in changes.items():
            assert find("x", case._replace(**{column: value})) == expected[column], column
        assert find("x", ChoiceKey("bmm", 32, "tt", "c", 1, 1, 1)) == "triton"
        assert find("no such GPU", case) == "torch"
    finally:
        cache_clear()


@pytest.mark.parametrize(
    "row, message",
    [
        (line(op="gemm", bits="half", backend="torch"), "line 2: bits is 'half'; it must be a whole number"),
        (line(op="gemm", backend="torch"), "line 2: bits is ''; it must be a whole number"),
        (line(op="gemm", bits=16, k="-1", backend="torch"), "line 2: k is '-1'"),
        (line(op="gemm", bits=16, backend="cublas"), "backend is 'cublas'; it takes hopper, triton, torch"),
        (line(bits=16, backend="torch"), "line 2: op is empty"),
        ("gemm,16", "line 2: a row has as many cells as there are columns"),
    ],
)
def test_a_mistake_is_named(row, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        CHOICES.read(table(tmp_path, row))
    with pytest.raises(ValueError, match="has other columns than op, bits"):
        CHOICES.read(table(tmp_path, row, head=COLUMNS[1:]))


def test_a_cpu_has_no_table():
    x = torch.ones(2, 3)
    assert choice.choose_backend("gemm", x, "nn", "none", 2, 3, 3) == "torch"
    assert ChoiceKey("gemm", 32, None, None, None, None, None).matches(
        ChoiceKey("gemm", 32, "nn", "none", 2, 3, 3)
    )


@pytest.mark.parametrize("path", sorted(CHOICES.folder.glob("*.csv")), ids=lambda path: path.stem)
def test_shipped_tables_read(path):
    assert CHOICES.read(path)
