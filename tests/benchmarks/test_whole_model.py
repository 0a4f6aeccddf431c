"""`python -m benchmarks whole_model`: ours train as transformers' do, and the report shows the figures."""

import argparse
import csv
import pathlib

import pytest
import torch
from check import few

pytest.importorskip("transformers", reason="transformers is not installed")

from benchmarks import pages, report, speed, whole_model
from benchmarks.__main__ import main
from moe_aiter.bench.measure import append
from moe_aiter.integrations.transformers import check

ROOT = pathlib.Path(__file__).parent.parent.parent
TINY = "--device", "cpu", "--dtype", "float32", "--layers", 1, "--divide", 16, "--vocabulary", 4096
TINY = *TINY, "--tokens", 64, "--sequence", 32
SHORT = "--warmup", 1, "--steps", 2


def run(*argv):
    return main(["whole_model", *map(str, argv)])


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def losses(row):
    return [float(row[f"loss_{i}"]) for i in (1, 2, 3)]


@pytest.mark.parametrize("name", few(whole_model.MODELS, "gpt-oss-20b"))
def test_losses_are_those_of_transformers(name, tmp_path):
    """The second and third follow from the gradients."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    path = tmp_path / "whole.csv"
    hows = ["full", "full+checkpointing", "lora", "lora+checkpointing"]
    argv = "--model", name, "--training", *hows, "--out", path
    assert run(*TINY, *SHORT, *argv) == 0
    rows, names = rows_of(path), ("moe_aiter", "grouped_mm")
    assert [(r["training"], r["contender"]) for r in rows] == [(how, n) for how in hows for n in names]
    assert all(r["model"] == f"{name}, widths / 16" and float(r["tokens_per_s"]) > 0 for r in rows)
    for how in hows:
        ours, theirs = (losses(r) for r in rows if r["training"] == how)
        assert ours[0] - 1e-3 > ours[1] > ours[2]
        assert theirs == pytest.approx(ours, abs=3e-4)


@pytest.mark.parametrize("name", whole_model.MODELS)
def test_our_experts_run_fused_at_the_published_widths(name):
    parser = argparse.ArgumentParser()
    whole_model.add_arguments(parser)
    args = parser.parse_args(["--device", "cpu"])
    args.device = "meta"
    model = whole_model.build(name, "full", "moe_aiter", args)
    paths = check(model)
    assert len(paths) == 4 and {path.path for path in paths.values()} == {"fused"}
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.full
def test_compiled_layers(monkeypatch, tmp_path):
    """Without a graph break."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda m: compile(m, backend="aot_eager", fullgraph=True))
    hows = "full", "full+checkpointing+compile", "lora", "lora+compile"
    argv = "--model", "gpt-oss-20b", "--contender", "moe_aiter", "--training", *hows
    assert run(*TINY, *SHORT, *argv, "--out", tmp_path / "whole.csv") == 0
    rows = [losses(row) for row in rows_of(tmp_path / "whole.csv")]
    assert rows[1] == pytest.approx(rows[0], abs=3e-4) and rows[3] == pytest.approx(rows[2], abs=3e-4)


def test_a_contender_that_cannot_run_has_its_reason(monkeypatch, tmp_path, capsys):
    path, original = tmp_path / "whole.csv", whole_model.measure

    def measure(name, how, contender, args):
        if contender == "moe_aiter":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 | 3 GiB.\nmore")
        return original(name, how, contender, args)

    monkeypatch.setattr(whole_model, "measure", measure)
    argv = *TINY, *SHORT, "--model", "OLMoE-1B-7B", "--training", "full", "--out", path
    assert run(*argv, "--contender", "moe_aiter", "sonicmoe", "hub", "grouped_mm") == 1
    reasons = [r["note"] for r in rows_of(path)]
    assert reasons[0] == "OutOfMemoryError: CUDA out of memory" and all(reasons[:3]) and not reasons[3]
    assert reasons[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--training", "half"], "half is not full or lora, with"),
        (["--training", "full+speed"], "full+speed is not full or lora, with"),
        (["--tokens", 100, "--sequence", 32], "--tokens 100 must be a multiple of --sequence 32"),
        (["--out", "old.csv"], "old.csv has other columns: shape, us"),
    ],
)
def test_refusals(argv, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.csv").write_text("shape,us\n")
    try:
        status = run("--device", "cpu", *argv)
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and message in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    path = tmp_path / "whole.csv"
    argv = "--divide", 8, "--layers", 1, "--tokens", 256, "--sequence", 128, *SHORT, "--out", path
    hows = "full", "full+checkpointing", "full+compile", "lora"
    assert run(*argv, "--model", "Qwen3-30B-A3B", "gpt-oss-20b", "--training", *hows) == 0
    for row in rows_of(path):
        assert float(row["peak_gib"]) > 0 and float(row["host_ms"]) > 0


def figures(contender, **cells):
    where = {"date": "2026-01-01", "commit": "new", "device": "Abacus", "torch": "2", "triton": "3"}
    where |= {
        "dtype": "bfloat16",
        "transformers": "5",
        "model": "OLMoE-1B-7B",
        "layers": "4",
        "tokens": "8192",
    }
    where |= {"training": "full", "sequence": "4096", "vocabulary": "9", "attention": "sdpa"}
    cells = {"tokens_per_s": 1000, "peak_gib": 30.25} | cells
    return dict.fromkeys(whole_model.FIELDS, "") | where | {"contender": contender} | cells


def test_the_report_has_a_table_and_the_readme_the_last_run(tmp_path):
    path = tmp_path / speed.WHOLE
    append(
        path,
        [
            figures("moe_aiter", commit="old", tokens_per_s=9),
            figures("grouped_mm", commit="old", tokens_per_s=8),
            figures("moe_aiter", tokens_per_s=122912),
            figures("grouped_mm", tokens_per_s=88500, peak_gib=41.0),
            figures("batched_mm", tokens_per_s="", peak_gib="", note="OutOfMemoryError: CUDA out of memory"),
            figures("moe_aiter", model="alone"),
            figures("moe_aiter", training="lora", tokens_per_s=7),
            figures("grouped_mm", training="lora", tokens_per_s=6),
            figures("moe_aiter", commit="later", device="a CPU", peak_gib=""),
            figures("grouped_mm", commit="later", device="a CPU", peak_gib=""),
        ],
        whole_model.FIELDS,
    )
    text = pages.product_pages(tmp_path)["whole_models.md"]
    assert "## Whole models" in text
    where = "layers 4, tokens 8192, full (torch 2, Triton 3, transformers 5, commit new, 2026-01-01)"
    assert f"**Abacus**, bfloat16, {where}" in text
    assert "| 122912 / 30 | 88500 / 41 | OutOfMemoryError: CUDA out of memory |" in text
    assert "| 7 / 30 | 6 / 30 |" in text
    table = speed.whole_table(path)
    assert "4 layers" in table and "one Abacus, bfloat16 (torch 2, " in table and "commit new" in table
    assert [line for line in table.splitlines() if line.startswith("|")][2:] == [
        "| OLMoE-1B-7B | 122912 | 88500 | 1.39 | 30 | 41 |"
    ]


def test_the_readme_has_the_whole_models(tmp_path, capsys):
    document = tmp_path / "README.md"
    document.write_text(f"{report.BEGIN}\n{report.END}\n")
    layer = (ROOT / "benchmarks" / "results" / "layer.csv").read_text()
    (tmp_path / "layer.csv").write_text(layer)
    argv = ["report", "--csv", str(tmp_path / "layer.csv"), "--readme", str(document)]
    assert main(argv) == 0 and "|" not in document.read_text()
    append(tmp_path / speed.WHOLE, [figures("moe_aiter"), figures("grouped_mm")], whole_model.FIELDS)
    assert main(argv) == 0 and speed.whole_table(tmp_path / speed.WHOLE) in document.read_text()
    append(tmp_path / speed.WHOLE, [figures("moe_aiter", tokens_per_s="many")], whole_model.FIELDS)
    assert main(argv) == 2 and "whole_model.csv is damaged: ValueError" in capsys.readouterr().err
