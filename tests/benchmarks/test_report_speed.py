"""docs/speed.md: which runs its table and its sentences take."""

import csv

import pytest

from benchmarks import speed, tables
from benchmarks.speed import FP8, GRAPH, HF_LAYER, LAYER
from moe_aiter.bench import layer, measure
from moe_aiter.bench.problem import SHAPES

TORCH = "torch grouped_mm, compiled"


def rows(shape, device="NVIDIA H100 80GB", commit="one", **steps):
    """One run of `bench layer`, from (contender, GPU's ms of a step, host's ms)."""
    names = {
        "ours": LAYER,
        "graph": GRAPH,
        "hf": HF_LAYER,
        "torch": TORCH,
        "fp8": FP8,
        "sonic": "layer: SonicMoE 1",
    }
    sizes = {size: str(n) for size, n in layer.shape_cells(shape, SHAPES[shape]).items()}
    where = {"device": device, "commit": commit, "date": "2026-11-27", "torch": "2", "triton": "3"}
    for name, (gpu, host) in steps.items():
        row = (
            dict.fromkeys(layer.COMMAND.fields, "")
            | where
            | sizes
            | {"dtype": "bfloat16", "contender": names[name]}
        )
        yield row | {
            "step_ms": str(gpu),
            "step_host_ms": str(host),
            "peak_mib": "" if name == "graph" else 1000 * gpu,
        }


def table(rows, whole=()):
    lines = speed.speed_table(speed.gains_of_layers(rows), [list(whole)]).splitlines()
    table = [line for line in lines if line.startswith("|")]
    return table[2:], " ".join(line for line in lines if line not in table)


def test_a_row_is_of_one_run():
    old = rows("C", ours=(9, 1), hf=(30, 2), torch=(4, 1))
    (line,), note = table([*old, *rows("C", commit="two", ours=(2, 1), torch=(1, 1))])
    assert line == "| Qwen3-30B-A3B | H100 | layer, 32768 | 9 | 30 | 4 compiled | 3.3 | 9.4 / 31.5 | – |"
    assert "commit one, 2026-11-27." in note


def test_other_dtypes_are_of_no_row():
    """Not even of a row of the same run, nor as a newer run."""
    usual = list(rows("C", ours=(9, 1), hf=(30, 2)))
    other = [row | {"dtype": "float32"} for row in rows("C", ours=(90, 1), hf=(300, 2), torch=(1, 1))]
    newer = [row | {"commit": "two"} for row in other]
    assert table([*usual, *other, *newer]) == table(usual)


def test_the_longer_time_counts_and_the_gpu_s_is_in_brackets():
    (line,), _ = table(list(rows("E", ours=(1, 2), hf=(3, 5), torch=(1, 4))))
    assert "| 2 (1) | 5 (3) | 4 (1) compiled | 2.5 |" in line


def test_without_hugging_face_there_is_a_dash_and_a_sentence():
    lines, note = table(list(rows("D", graph=(8, 1), sonic=(9, 1))))
    assert lines == ["| Mixtral 8x7B | H100 | layer, graph, 16384 | 8 | – | 9 SonicMoE | – | – / – | – |"]
    assert note.startswith("On one H100, Hugging Face's code has not been measured beside ours")
    assert note.endswith("SonicMoE 1 ran on torch 2 with QuACK 0.4.1.")
    lines, _ = table([*rows("D", ours=(8, 1)), *rows("D", commit="two", graph=(8, 1), sonic=(9, 1))])
    assert [line.split(" | ")[2] for line in lines] == ["layer, 16384", "layer, graph, 16384"]


def test_other_shapes_and_routings_are_no_models():
    skewed = [row | {"routing": "zipf"} for row in rows("C", ours=(1, 1), hf=(2, 1))]
    assert not speed.gains_of_layers([*rows("A", ours=(1, 1), hf=(2, 1)), *skewed])


def test_a_whole_model_stands_in_one_row_of_the_model():
    """In that of its experts, if there is one."""
    (gain,) = speed.gains_of_layers(list(rows("C", ours=(1, 1), hf=(2, 1))))
    whole = [{"model": "Qwen3-30B-A3B", "device": gain.device, "tokens_per_s": n} for n in ("50", "40")]
    experts = speed.Gain(gain.model, "experts", gain.ours, gain.theirs, None)
    for gains in ([gain], [experts], [gain, experts]):
        lines = speed.speed_table(gains, [[whole]]).splitlines()
        (line,) = (line for line in lines if "| 50 / 40 |" in line)
        assert ("experts" in line) == (experts in gains)


def test_the_table_of_whole_models_has_the_last_run_of_each_device(tmp_path):
    fields = [*speed.SETTING, "training", "model", "contender", "tokens_per_s", "peak_gib", "torch", "triton"]
    cells = {
        "dtype": "bfloat16",
        "layers": 4,
        "tokens": 64,
        "training": "full",
        "model": "one",
        "peak_gib": 3,
    }
    for device, commit, times in (("H7", "old", 2), ("H7", "new", 3), ("H8", "new", 4)):
        for contender, speed_of in ((speed.OURS, 10 * times), ("grouped_mm", 10)):
            row = cells | {"device": device, "commit": commit, "date": "2026-01-01", "contender": contender}
            measure.append(tmp_path / "whole_model.csv", [row | {"tokens_per_s": speed_of}], fields)
    text = speed.whole_table(tmp_path / "whole_model.csv")
    assert "one H7" in text and "one H8" in text and "| 3.00 |" in text and "| 4.00 |" in text
    assert "| 2.00 |" not in text and text.count(speed.GAIN_LESS) == 1


def test_what_is_slower():
    few = rows("A", ours=(1, 5), torch=(2, 3), graph=(1, 0.5))
    fp8 = [*rows("B", ours=(2, 1), fp8=(3, 1)), *rows("C", ours=(9, 1), fp8=(6, 1))]
    text = speed.slower([*few, *fp8], [])
    assert (
        f"takes 5 ms (the GPU 1 ms) with ours and 3 ms (the GPU 2 ms) with {TORCH}. "
        "In a CUDA graph, ours takes 1 ms." in text
    )
    assert (
        "On one H100, a step takes in FP8 3 ms, in bfloat16 2 ms, with T, H, I, E, k = 24576, 1536," in text
    )
    assert "faster for 1 of 2 shapes, up to 1.50 times; their experts are at least 768 wide" in text
    assert "CPU." not in text
    assert not speed.slower(list(rows("A", ours=(1, 1), torch=(2, 3), graph=(1, 1), fp8=(1, 1))), [])
    cpu = rows("cpu", device="Abacus, 2 threads", ours=(10, 1), hf=(30, 1))
    assert "On Abacus, 2 threads, a step takes 10 ms with ours and 30 ms with" in speed.slower(list(cpu), [])


def test_the_answer_is_the_line_of_the_command():
    found = speed.example(speed.gains_of_layers(list(rows("C", ours=(2, 3), hf=(9, 1)))))
    line = "C: 3.0 times as fast as Hugging Face Qwen3-MoE, grouped_mm (3 instead of 9 ms a step)"
    assert f"\n    {line}, peak memory 2.1 instead of 9.4 GB\n" in found
    assert speed.example([]) == ""


def test_a_wide_table_becomes_several():
    text = tables.narrow(
        [["name", "a", "b", "none"], ["x", 40 * "a", 40 * "b", "–"], ["y", "–", "1", "–"]], 60
    )
    assert text == (
        f"| name | a |\n| --- | --- |\n| x | {40 * 'a'} |\n\n"
        f"| name | b |\n| --- | --- |\n| x | {40 * 'b'} |\n| y | 1 |\n"
    )


def price_rows(shape="A", device="H200", commit="one", dtype="bfloat16", kinds=("inference", "step")):
    """A run that took a tenth longer with batch invariance."""
    where = {"date": "2026-12-01", "commit": commit, "device": device, "torch": "2", "triton": "3"}
    for kind in kinds:
        what = {"dtype": dtype, "shape": shape, "kernel": f"layer in a CUDA graph, {kind}, ms"}
        yield where | what | {"variant": "as it comes", "value": 10}
        yield where | what | {"variant": "batch invariant", "value": 11}


def price_of(folder, *runs):
    source = folder / speed.TRIALS
    rows = [row for run in runs for row in run]
    with open(source, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return speed.price(source)


def test_a_price_is_of_one_run(tmp_path):
    first = list(price_rows())
    (line,) = price_of(tmp_path, first).splitlines()[4:]
    assert line == "| A | 10.0 | 10.0 |"
    half = [row | {"value": 99} for row in price_rows(commit="two", kinds=["step"])]
    assert price_of(tmp_path, first, half) == price_of(tmp_path, first)
    assert price_of(tmp_path, half) == ""
    newer = list(price_rows(commit="two"))
    newer[-1] |= {"value": 12}
    assert "| A | 10.0 | 20.0 |" in (text := price_of(tmp_path, first, newer)) and "one" not in text


def test_a_price_is_of_one_device_and_dtype(tmp_path):
    others = price_rows(device="H100"), price_rows(dtype="float16")
    text = price_of(tmp_path, price_rows(), price_rows("8,2,2,4,1"), *others)
    heads = [line.partition(" (")[0] for line in text.splitlines() if "commit" in line]
    assert heads == ["H200, bfloat16", "H100, bfloat16", "H200, float16"]
    assert text.count("| A | 10.0 | 10.0 |") == 3 and text.count("| 8, 2, 2, 4, 1 | 10.0 | 10.0 |") == 1


def test_the_command_writes_the_rows_of_a_price(tmp_path):
    """`bench layer --invariant --out layer.csv`, whose rows come after those of trials."""
    about = dict.fromkeys(layer.COMMAND.fields, "") | next(price_rows(commit="two"))
    names = {LAYER: 1, f"{LAYER}{layer.INVARIANT}": 9, GRAPH: 10, f"{GRAPH}{layer.INVARIANT}": 11}
    with open(tmp_path / speed.LAYERS, "w", newline="") as file:
        writer = csv.DictWriter(file, layer.COMMAND.fields, extrasaction="ignore")
        writer.writeheader()
        for routing, factor in (("normal", 2), ("zipf", 3)):
            for name, ms in names.items():
                times = {"inference_ms": ms, "step_ms": factor * ms + 10}
                writer.writerow(about | times | {"contender": name, "routing": routing})
    text = price_of(tmp_path, price_rows(commit="one"), price_rows("B", commit="one"))
    assert "| A | 10.0 | 6.7 |" in text and "| B | 10.0 | 10.0 |" in text and "commit one, two" in text
    (tmp_path / speed.LAYERS).write_text("contender,dtype\nx,bfloat16\n")
    with pytest.raises(tables.Damaged, match=speed.LAYERS):
        price_of(tmp_path, price_rows())


def test_a_damaged_price_names_its_file(tmp_path):
    with pytest.raises(tables.Damaged, match=speed.TRIALS):
        price_of(tmp_path, [row | {"value": "x"} for row in price_rows()])
