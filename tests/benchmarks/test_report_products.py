"""The pages of figures have the tables of the products whose CSV is there."""

from benchmarks import gmm, lora, muon, pages, segment
from moe_aiter.bench.measure import append

WHERE = {"device": "Abacus", "torch": "2", "triton": "3", "dtype": "bfloat16", "date": "2026-01-01"}


def row(fields, **cells):
    return dict.fromkeys(fields, "") | WHERE | {"commit": "new"} | cells


def test_a_table_for_each_op_and_the_last_row_of_each_contender(tmp_path):
    sizes = {"layout": "plain", "m": "5", "k": "6", "n": "7", "g": "2"}
    a, b = sizes | {"shape": "A-up"}, sizes | {"shape": "odd"}
    rows = [
        row(gmm.COMMAND.fields, op="gmm", contender="torch", tflops="1.25", **a | {"commit": "older"}),
        row(gmm.COMMAND.fields, op="gmm", contender="torch", tflops="3.21", **a | {"commit": "old"}),
        row(gmm.COMMAND.fields, op="gmm", contender="moe_aiter gmm", tflops="99.6", **a),
        row(gmm.COMMAND.fields, op="gmm", contender="moe_aiter gmm", tflops="12.4", **b),
        row(gmm.COMMAND.fields, op="ptgmm", contender="torch", tflops="8", **a),
    ]
    append(tmp_path / "gmm.csv", rows, gmm.COMMAND.fields)
    text = pages.product_pages(tmp_path)["grouped.md"]
    assert "## Grouped products" in text and "## Segments" not in text
    assert "**Abacus**, bfloat16, gmm, plain (torch 2, Triton 3, commit new, old, 2026-01-01)" in text
    assert "| TFLOP/s, of shape (m, k, n, g) | moe_aiter gmm | torch |" in text
    assert r"| A-up (5, 6, 7, 2) | 100 | 3.2 \* |" in text and "| odd (5, 6, 7, 2) | 12 | – |" in text
    assert r"\* measured in an earlier run" in text and "| A-up (5, 6, 7, 2) | 8 |" in text


def test_tiles_are_no_contenders_of_their_own(tmp_path):
    fields = [*segment.COMMAND.fields, "tile"]
    cells = {"case": "dense", "segments": "2", "contender": "moe_aiter", "us": "50", "host_us": "20"}
    rows = [row(fields, **cells), row(fields, **cells | {"us": "40"}, tile="16x64x128")]
    append(tmp_path / "segment.csv", rows, fields)
    assert "| dense (2) | 50 / 20 |" in pages.product_pages(tmp_path)["grouped.md"]


def test_steps_of_muon(tmp_path):
    cells = {"shape": "C", "tokens": "8", "hidden": "6", "intermediate": "5", "experts": "4", "ms": "25"}
    rows = [
        row(muon.COMMAND.fields, contender=muon.LOOP, **cells | {"ms": "75"}),  # with --only: no share
        row(muon.COMMAND.fields, contender=muon.OURS, matmul_percent="68.2", **cells),
    ]
    append(tmp_path / "muon.csv", rows, muon.COMMAND.fields)
    text = pages.product_pages(tmp_path)["muon.md"]
    assert f"(hidden, intermediate, experts) | {muon.OURS} | {muon.LOOP} |" in text
    assert "| C (6, 5, 4) | 25 / 68 | 75 |" in text


def test_contenders_stand_in_rows_where_there_are_many(tmp_path):
    cells = {
        "shape": "C",
        "tokens": "8",
        "experts": "4",
        "inference_ms": "1",
        "forward_ms": "2",
        "step_ms": "30",
    }
    rows = [
        row(lora.COMMAND.fields, contender=name, **cells) for name in ("PEFT, eager", "moe_aiter LoRAExperts")
    ]
    append(tmp_path / "lora.csv", rows, lora.COMMAND.fields)
    text = pages.product_pages(tmp_path)["adapters.md"]
    assert "| C (8, 4) |\n" in text
    assert "| moe_aiter LoRAExperts | 1 / 2 / 30 |\n| PEFT, eager | 1 / 2 / 30 |\n" in text
