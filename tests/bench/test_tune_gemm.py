"""`moe-aiter tune gemm`: rows that AITER's reader and ours take, none of them lost."""

import csv
import json

import pytest
import torch
import torch.nn.functional as F
from tuned import tuned_files

from moe_aiter import cli
from moe_aiter.bench import tune_gemm
from moe_aiter.bench.tune_gemm import Implementation, choice, implementations, model_sizes
from moe_aiter.compat.aiter.tuned_gemm import get_GEMM_A16W16_config
from moe_aiter.config import interpret
from moe_aiter.kernels import hopper
from moe_aiter.kernels.dense.gemm import bind_gemm
from moe_aiter.kernels.dense.tuned_gemm import named_tile, tile_option, tuned_gemm
from moe_aiter.tuning.aiter_csv import UNTUNED, GemmKey, add_rows, read, this_device
from moe_aiter.tuning.candidates import candidates

files = pytest.fixture(tuned_files)
BF16, F32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def run(*argv):
    return cli.main(["tune", "gemm", "--device", "cpu", "--reps", "2", *map(str, argv)])


def rows(path):
    return {row.problem: row for row in read(path)}


def test_sizes_become_rows_that_are_followed(tmp_path, capsys, files, caplog):
    path = tmp_path / "tuned.csv"
    assert run("5x16x32", "8x16x32", "--out", path, "--commit", "abc") == 0
    found = rows(path)
    assert list(found) == [GemmKey(M, 16, 32, False, BF16, BF16) for M in (5, 8)]
    one = found[GemmKey(5, 16, 32, False, BF16, BF16)]
    assert one.device == this_device(CPU) and one.us > 0 and 0 < float(one.cells["err_ratio"]) < 1e-2
    assert all(
        word in one.cells["provenance"] for word in ("date 20", "commit abc", f"torch {torch.__version__}")
    )
    out = capsys.readouterr().out
    assert "5x16x32 bfloat16" in out and "us -> torch" in out
    files.set_to("config_gemm_bf16", str(path))
    files.set_to("log_tuned_config", True)
    with caplog.at_level("INFO", "moe_aiter"):
        tuned_gemm(torch.randn(5, 32).bfloat16(), torch.randn(16, 32).bfloat16())
    assert "the row of M=5 says torch" in caplog.messages[0]


def test_aiters_reader_would_take_it(tmp_path):
    """Columns by name, a key spelt as Python prints it, and one column more, which is the last."""
    path = tmp_path / "tuned.csv"
    run("5x16x32", "--bias", "--out", path)
    with open(path) as file:
        (cells,) = csv.DictReader(file)
    key = [cells[c] for c in ("M", "N", "K", "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle")]
    assert key == ["5", "16", "32", "True", "torch.bfloat16", "torch.bfloat16", "False", "False"]
    assert next(iter(cells)) == "gfx" and list(cells)[-1] == "provenance"
    assert float(cells["tflops"]) >= 0 and float(cells["bw"]) >= 0 and cells["solidx"] == "0"


def test_a_row_that_is_there_stays_unless_it_is_to_be_replaced(tmp_path, capsys):
    path = tmp_path / "tuned.csv"
    run("5x16x32", "6x16x32", "--out", path)
    text = path.read_text()
    assert run("5x16x32", "--out", path) == 0
    assert path.read_text() == text and "has a row" in capsys.readouterr().out
    other = text.replace(this_device(CPU).gfx, "gfx942")
    path.write_text(text + "".join(other.splitlines(True)[1:]))
    assert run("5x16x32", "--out", path, "--replace") == 0
    assert "replaces" in capsys.readouterr().out
    lines = path.read_text().splitlines()
    assert len(lines) == 5 and sum("gfx942" in line for line in lines) == 2
    assert lines[1] == text.splitlines()[2], "the others stay as they were"


def test_sizes_that_were_noted_in_training(tmp_path):
    noted, path = tmp_path / "untuned.csv", tmp_path / "tuned.csv"
    problems = [GemmKey(3, 16, 32, True, F32, F32), GemmKey(4, 16, 32, False, BF16, F32)]
    skipped = [GemmKey(4, 16, 32, False, BF16, BF16, True), GemmKey(4, 16, 32, False, torch.int8, BF16)]
    add_rows(noted, [p.cells() for p in problems + skipped], UNTUNED)
    assert run("--untuned", noted, "--out", path) == 0
    assert list(rows(path)) == problems


def test_the_products_of_a_model(tmp_path):
    config = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    sizes = [(128, 64), (64, 64), (32, 64), (192, 64), (96, 64), (64, 96)]
    assert model_sizes(tmp_path) == model_sizes(tmp_path / "config.json") == sizes
    path = tmp_path / "tuned.csv"
    assert run("--model", tmp_path, "--rows", 1, 4, "--out", path) == 0
    assert len(rows(path)) == 12


def test_shuffled_weights_have_rows_of_their_own(tmp_path):
    path = tmp_path / "tuned.csv"
    assert run("5x16x32", "--shuffled", "--out", path) == 0
    assert [problem.shuffled for problem in rows(path)] == [False, True]


@pytest.mark.parametrize(
    "argv, message",
    [
        ((), "give sizes as MxNxK, --untuned or --model"),
        (("5x16",), "'5x16' is not MxNxK"),
        (("0x16x32",), "'0x16x32' is not MxNxK"),
        (("--untuned", "gone.csv"), "gone.csv"),
        (("--model", "gone.json"), "gone.json"),
        (("5x16x32", "--device", "cuda"), "there is no GPU that torch can use"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        status = run(*argv)
    except SystemExit as stop:
        status = stop.code
    err = capsys.readouterr().err
    assert status == 2 and message in err and err.count("\n") == 1


def test_another_file_s_columns_are_refused_before_anything_is_measured(tmp_path, capsys):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    assert run("5x16x32", "--out", path) == 2
    assert "there are no columns cu_num" in capsys.readouterr().err and path.read_text() == "a,b\n1,2\n"


def test_a_model_s_file_without_sizes_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert run("--model", tmp_path, "--out", tmp_path / "t.csv") == 2
    assert "config.json has no 'hidden_size'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": None}, "hidden_size is None; it must be a whole number, 1 or more"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; it must be"),
        (None, "config.json is not a JSON object"),
    ],
)
def test_a_model_s_sizes_that_are_no_numbers_are_refused(change, message, tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps([] if change is None else sizes | change))
    assert run("--model", tmp_path, "--out", tmp_path / "t.csv") == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_what_is_wrong_is_left_out_and_fails_the_command(tmp_path, monkeypatch, capsys):
    problem = GemmKey(5, 16, 32, False, BF16, BF16)
    good = tune_gemm.implementations

    def also_wrong(problem, x, weight, bias):
        yield from good(problem, x, weight, bias)
        yield Implementation("triton", "", lambda: 1.1 * F.linear(x, weight))

    monkeypatch.setattr(tune_gemm, "implementations", also_wrong)
    path = tmp_path / "tuned.csv"
    assert run("5x16x32", "--out", path) == 1
    assert "WRONG, left out: triton" in capsys.readouterr().out
    assert rows(path)[problem].libtype == "torch"


@pytest.mark.parametrize("us, expected", [(98.0, "torch"), (96.0, "triton")])
def test_only_what_is_clearly_faster_than_torch_wins(us, expected):
    found = [Implementation("torch", "", int, us=100.0), Implementation("triton", "", int, us=us)]
    assert choice(found).libtype == expected


def test_a_row_s_tile_is_the_one_that_runs():
    """Names of kernels as AITER's own files have them say nothing here."""
    tile = str(candidates("gemm")[1])
    assert named_tile("gemm", tile) == candidates("gemm")[1]
    assert named_tile("gmm", tile) is None and named_tile("gemm", "asm") is None
    assert tile_option(bind_gemm, tile) == {"config": candidates("gemm")[1]}
    for launch, name in ((bind_gemm, "asm"), (bind_gemm, ""), (hopper.bind_gemm, tile), (print, tile)):
        assert tile_option(launch, name) == {}


@pytest.mark.skipif(interpret, reason="the interpreter has one tile")
def test_on_a_cpu_torch_is_alone():
    problem = GemmKey(5, 16, 32, False, BF16, BF16)
    found = implementations(problem, torch.randn(5, 32).bfloat16(), torch.randn(16, 32).bfloat16(), None)
    assert [(one.libtype, one.kernel) for one in found] == [("torch", "")]


@pytest.mark.gpu
def test_on_a_gpu_every_tile_is_measured_and_the_winner_runs(tmp_path, files):
    path = tmp_path / "tuned.csv"
    argv = ["64x512x512", "--reps", "3", "--out", str(path)]
    assert cli.main(["tune", "gemm", *argv, "--bias"]) == 0
    assert cli.main(["tune", "gemm", *argv, "--shuffled"]) == 0
    assert len(rows(path)) == 3
    files.set_to("config_gemm_bf16", str(path))
    x, w, b = (torch.randn(*s, device="cuda").bfloat16() for s in ((64, 512), (512, 512), (512,)))
    torch.testing.assert_close(tuned_gemm(x, w, b), F.linear(x, w, b), rtol=2e-2, atol=1e-1)
    assert get_GEMM_A16W16_config(64, 512, 512, True, BF16, BF16)["us"] > 0
