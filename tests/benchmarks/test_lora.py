"""`python -m benchmarks lora`: gradients of the adapters are checked, and what is wrong gets no figures."""

import csv

import pytest
import torch

from benchmarks import lora
from benchmarks.__main__ import main
from moe_aiter.bench.problem import SHAPES, Shape, new_problem

OURS = ["moe_aiter LoRAExperts"]
MORE = [f"{OURS[0]}, fp8", f"{OURS[0]}, {lora.SEVERAL} adapters"]


def run(*argv, shape="toy"):
    common = "--device", "cpu", "--dtype", "float32", "--reps", "2", "--shape", shape, "--rank", "3"
    return main(["lora", *common, *argv])


def test_rows(tmp_path):
    path = tmp_path / "lora.csv"
    assert run("--out", str(path)) == 0
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == lora.COMMAND.fields
    assert [r["contender"] for r in rows][:3] == OURS + MORE  # the rows of toy are too short for 4 bits
    assert all(float(r["step_ms"]) > 0 and r["rank"] == "3" for r in rows)
    assert all(float(r["error"]) < 1e-5 for r in rows if r["contender"] != MORE[0])  # which rounds its rows


def test_sizes_of_your_own(tmp_path):
    """With rows of whole blocks, all formats of 4 bits are measured."""
    path = tmp_path / "lora.csv"
    assert run("--only", "moe_aiter LoRAExperts", "--out", str(path), shape="16,64,128,4,2") == 0
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["contender"] for r in rows] == OURS + [f"{OURS[0]}, {f}" for f in lora.FOUR_BITS] + MORE
    assert {(r["shape"], r["tokens"], r["intermediate"]) for r in rows} == {("16,64,128,4,2", "16", "128")}


def test_peft_on_each_implementation(capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("peft", reason="PEFT is not installed")
    assert run("--only", "PEFT") == 0
    out = capsys.readouterr().out
    assert all(f"PEFT, {name} " in out for name in ("moe_aiter", "moe_aiter, whole weights", "eager"))


@pytest.mark.parametrize("format", lora.FOUR_BITS)
def test_peft_on_weights_that_are_dequantised_in_each_pass(format):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("peft", reason="PEFT is not installed")
    p = new_problem(Shape(16, 64, 64, 4, 2), torch.float32, torch.device("cpu"))
    adapters = lora.new_adapters(p, 3)
    contender = lora.peft_experts(p, adapters, "eager", format)
    assert max(found.error for found in lora.by_whole_weights(p, adapters)(contender)) < 1e-5


@pytest.mark.parametrize("format", lora.FOUR_BITS)
def test_four_bits_are_judged_by_their_own_weights(format):
    p = new_problem(Shape(16, 64, 64, 4, 2), torch.float32, torch.device("cpu"))
    adapters = lora.new_adapters(p, 3)
    contender = lora.lora_experts(p, adapters, format)
    assert contender.name in [c.name for c in lora.contenders(p, adapters)]
    judge = lora.by_whole_weights(p, adapters)
    assert max(found.error for found in judge(contender)) < 1e-5
    contender.name = OURS[0]  # whose weights are not rounded to 4 bits
    assert max(found.error for found in judge(contender)) > 1e-2


def test_eight_bits_are_near_their_own_weights():
    p = new_problem(Shape(64, 256, 136, 4, 2), torch.float32, torch.device("cpu"))
    adapters = lora.new_adapters(p, 3)
    contender = lora.lora_experts(p, adapters, lora.FP8)
    exact = lora.truth(p, adapters, torch.float64)
    found = lora.errors_of(contender.results(p), exact, None, lora.RESULTS)
    assert all(1e-4 < each.error < 0.1 for each in found)


@pytest.mark.parametrize("format", lora.FOUR_BITS)
def test_whole_weights_are_written_from_four_bits(format):
    weight = torch.randn(4, 64, 64, dtype=torch.bfloat16)
    expected = lora.quantized(weight, format).dequantize()
    write = lora.writer(weight, format)
    weight.zero_()
    write()
    assert torch.equal(weight, expected)


def test_the_truth_is_that_of_whole_weights():
    """All experts at once, as the definition has it."""
    p = new_problem(SHAPES["toy"], torch.float32, torch.device("cpu"))
    adapters = lora.new_adapters(p, 3)
    leaves = [
        t.double().requires_grad_() for t in (p.x.detach(), p.routing_weights.detach(), *adapters.factors)
    ]
    x, s, *factors = leaves
    gate_up, down = (
        w.detach().double() + adapters.scaling * b @ a
        for w, (a, b) in zip((p.gate_up, p.down), lora.pairs(factors), strict=True)
    )
    gate, up = torch.einsum("th,enh->ten", x, gate_up).chunk(2, -1)
    y = torch.einsum("ten,ehn->teh", torch.nn.functional.silu(gate) * up, down)
    dense = torch.zeros(len(x), len(down), dtype=torch.float64).scatter_add(1, p.expert_ids, s)
    out = torch.einsum("te,teh->th", dense, y)
    expected = [out, *torch.autograd.grad(out, leaves, p.dout.double())]
    for got, want in zip(lora.truth(p, adapters, torch.float64), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_a_wrong_gradient_is_refused(monkeypatch, capsys):
    plain = lora.lora_experts

    def wrong(*inputs, **options):
        contender = plain(*inputs, **options)
        right = contender.as_ours
        contender.as_ours = lambda gradients: (*right(gradients)[:-1], 2 * right(gradients)[-1])
        return contender

    monkeypatch.setattr(lora, "lora_experts", wrong)
    assert run("--only", *OURS) == 1
    assert "refused, the error of its dB of down is" in capsys.readouterr().out


def test_refusals(tmp_path, capsys, monkeypatch):
    path = tmp_path / "old.csv"
    path.write_text("case,us\n")
    assert run("--out", str(path)) == 2
    assert "old.csv has other columns: case, us" in capsys.readouterr().err
    for shape in ("gpt-oss", "models"):
        assert run(shape=shape) == 2
        assert "shape gpt-oss has biases or another activation" in capsys.readouterr().err
    assert run(shape="nonsense") == 2
    assert "there is no shape 'nonsense'" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["lora", "--device", "cuda"]) == 2
    assert "there is no GPU that torch can use" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, no_debug):
    path = tmp_path / "lora.csv"
    assert main(["lora", "--shape", "toy", "--reps", "3", "--out", str(path)]) == 0
