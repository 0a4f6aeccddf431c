"""`python -m benchmarks gemm` checks before it times, says which goals were met, and becomes a table."""

import csv
import dataclasses

import pytest
import torch

from benchmarks import dense, gemm, pages, products
from benchmarks.__main__ import main
from benchmarks.products import Compared, Comparison
from moe_aiter.bench.command import Asked
from moe_aiter.bench.measure import append

from .measured import measure

TOY = ("--device", "cpu", "--family", "dense", "--shape", "grouped-toy", "--reps", "1")


def run(*argv):
    return main(["gemm", *map(str, argv)])


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def square(x, contenders, plain=None, **named):
    """A case of x @ x, in float32."""
    made = Compared(contenders, lambda: x.double() @ x.double(), plain)
    sizes = {"flops": 2 * len(x) ** 3, "bytes": 8 * len(x) ** 2}
    return Comparison("square", "8x8x8", lambda **_: made, **sizes, dtypes=("float32",), **named)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(8, 8)


def test_rows_are_appended(tmp_path):
    path = tmp_path / "new" / "products.csv"
    for commit in ("one", "two"):
        assert run(*TOY, "--commit", commit, "--out", path) == 0
    rows = read(path)
    assert list(rows[0]) == gemm.COMMAND.fields and [r["commit"] for r in rows] == ["one"] * 2 + ["two"] * 2
    ours, loop = rows[:2]
    assert (ours["family"], ours["case"], ours["dtype"]) == ("dense", "grouped-toy", "float32")
    assert ours["contender"] == "moe_aiter" and ours["launch"] == "eager" and ours["goal"] == ""
    assert float(ours["ms"]) > 0 and float(ours["tflops"]) > 0 and float(ours["gb_per_s"]) > 0
    assert float(ours["error"]) < 1e-6 and float(ours["ratio"]) == 1
    assert loop["goal"] == ""
    assert float(loop["ratio"]) == pytest.approx(float(loop["ms"]) / float(ours["ms"]), rel=1e-3)


@pytest.mark.parametrize("devices", [(), ("cpu",)])
def test_a_cpu_is_judged_by_goals_for_a_cpu(devices, monkeypatch, capsys):
    toys = [dataclasses.replace(c, devices=devices) for c in dense.CASES if c.name == "grouped-toy"]
    monkeypatch.setitem(gemm.FAMILIES, "dense", toys)
    assert run(*TOY) == 0
    assert ("of 1 goals met" in capsys.readouterr().out) == bool(devices)


def test_what_is_wrong_gets_no_time(x, capsys):
    contenders = {
        "moe_aiter": lambda: 1.01 * (x @ x),
        "moe_aiter, forgetful": lambda: torch.full_like(x, float("nan")),
        "torch": lambda: x @ x,
        "peer": lambda: x @ x[:3],
    }
    rows, wrong = measure(square(x, contenders, goals={"torch": 0.97}), torch.float32)
    assert wrong and [row["contender"] for row in rows] == ["torch"] and "ratio" not in rows[0]
    printed = capsys.readouterr().out
    assert (
        "moe_aiter: refused, the error of its output is 1.0e-02" in printed
        and "forgetful: refused" in printed
    )
    assert "peer cannot run here: RuntimeError" in printed


def test_a_peer_that_is_wrong_is_not_our_fault(x):
    contenders = {"moe_aiter": lambda: x @ x, "peer": lambda: -x}
    rows, wrong = measure(square(x, contenders, plain=lambda: x @ x), torch.float32)
    assert not wrong and [row["contender"] for row in rows] == ["moe_aiter"]


def test_an_error_of_ours_is_not_swallowed(x):
    with pytest.raises(ValueError, match=r"an output is \(3, 8\) instead of \(8, 8\)"):
        measure(square(x, {"moe_aiter": lambda: x[:3] @ x}), torch.float32)


def test_the_copy_is_there_where_a_goal_names_it(x):
    rows, _ = measure(square(x, {"moe_aiter": lambda: x @ x}, goals={"copy": 0.85}), torch.float32)
    copy = rows[-1]
    assert copy["contender"] == "copy" and copy["goal"] == 0.85 and "tflops" not in copy
    assert copy["gb_per_s"] == pytest.approx(8 * 64 / copy["ms"] / 1e6)


def test_goals_in_words():
    rows = [
        {"contender": "moe_aiter", "ratio": 1.0, "goal": ""},
        {"contender": "torch", "ratio": 0.98, "goal": 0.97},
        {"contender": "copy", "ratio": 0.8, "goal": 0.85},
    ]
    asked = Asked("", {"family": "dense", "case": "a"}, None)
    (line,) = gemm.summed_up([(asked, rows)])
    assert line == "dense: 1 of 2 goals met; missed: a 0.80 of 0.85 x copy"
    assert list(gemm.summed_up([(asked, rows[:2])])) == ["dense: 1 of 1 goals met"]
    assert not list(gemm.summed_up([(asked, rows[:1])]))


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--device", "cuda"), "there is no GPU that torch can use"),
        (
            ("--device", "cpu", "--shape", "nothing", "--family", "dense"),
            "no such case; there are, of dense: square",
        ),
        (("--device", "cpu", "--dtype", "int3"), "--dtype is 'int3'; it takes bfloat16, float16, float32"),
        (("--out", "old.csv"), "old.csv has other columns: date"),
        (("--family", "nothing"), "invalid choice: 'nothing'"),
    ],
)
def test_refusals(flags, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.csv").write_text("date\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        status = run(*flags)
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("family", gemm.FAMILIES)
def test_names_and_goals_of_a_family(family):
    """No name comes twice, and what a goal names can be there."""
    cases = gemm.FAMILIES[family]
    names = [case.name for case in cases]
    assert len(names) == len(set(names))
    for case in cases:
        assert all(hasattr(torch, dtype) for dtype in case.dtypes), case.name
        assert products.COPY not in case.goals or case.bytes, case.name


@pytest.mark.parametrize("case", [c for c in dense.CASES if "toy" in c.name], ids=lambda case: case.name)
def test_toys_are_accurate_and_their_goals_name_contenders(case):
    for dtype in case.dtypes:
        rows, wrong = measure(case, getattr(torch, dtype))
        assert not wrong and case.goals.keys() <= {row["contender"] for row in rows}


def test_the_report_has_a_row_for_each_case(tmp_path):
    where = {"device": "Abacus", "torch": "2", "triton": "3", "date": "2026-01-01", "dtype": "bfloat16"}
    where |= {"family": "dense", "case": "gelu", "shape": "8x8x8"}
    path = tmp_path / pages.FAMILIES
    cells = [
        ("old", "torch, unfused", {"ms": "9", "ratio": "9", "goal": "1.15"}),
        ("old", "peer", {"ms": "9", "ratio": "9"}),
        ("new", "moe_aiter", {"ms": "0.5", "tflops": "612.3", "ratio": "1"}),
        ("new", "torch", {"ms": "0.6", "ratio": "1.2"}),
        ("new", "torch, unfused", {"ms": "0.55", "ratio": "1.1", "goal": "1.15"}),
    ]
    rows = [where | {"commit": commit, "contender": name} | more for commit, name, more in cells]
    append(path, rows, gemm.COMMAND.fields)
    text = pages.product_pages(tmp_path)["products.md"]
    assert "## Dense, bfloat16\n\n**Abacus** (torch 2, Triton 3" in text
    beside = "torch 1.20<br>torch, unfused 1.10 (goal 1.15: missed)"
    assert f"| gelu<br>(8x8x8) | 0.5 | 612 | {beside} |" in text


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, no_debug):
    path = tmp_path / "p.csv"
    assert run("--family", "dense", "--shape", "toy", "--reps", 2, "--out", path) == 0
    assert {row["launch"] for row in read(path) if row["contender"] == "moe_aiter"} == {"graph"}
