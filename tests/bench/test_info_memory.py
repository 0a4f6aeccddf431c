"""`moe-aiter info --memory`: its figures are those of the layer, held and peak."""

import csv
import json
import re
from pathlib import Path

import pytest
import torch

from moe_aiter import MoE, cli, expert_mlp, use
from moe_aiter.bench import memory
from moe_aiter.bench.memory import MIB, RECIPES, Step
from moe_aiter.bench.models import models
from moe_aiter.bench.problem import Shape
from moe_aiter.config import interpret
from moe_aiter.kernels.grouped import tgmm
from moe_aiter.routing.plan import make_plan

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "layer.csv"
SIZES = "tokens", "hidden", "intermediate", "experts", "top_k"
LAYER = re.compile(r"layer: moe_aiter MoE(?:, FP8 \((\w+)\))?")
ARGUMENTS = ["info", "--memory", "32768", "2048", "768", "128", "8"]


def newest_rows():
    """By shape and recipe, the newest row that was measured on a Hopper GPU."""
    found = {}
    with open(RESULTS, newline="") as file:
        for row in csv.DictReader(file):
            layer = LAYER.fullmatch(row["contender"])
            if layer and row["device"].startswith("NVIDIA H") and row["peak_mib"]:
                key, old = (row["shape"], layer[1]), found.get((row["shape"], layer[1]))
                if old is None or old["date"] <= row["date"]:
                    found[key] = row
    return found


ROWS = newest_rows()


@pytest.mark.parametrize("shape, recipe", ROWS, ids=str)
def test_figures_are_within_one_percent_of_measured_ones(shape, recipe):
    row = ROWS[shape, recipe]
    step = Step(Shape(*(int(row[size]) for size in SIZES)), getattr(torch, row["dtype"]), fp8=recipe)
    assert step.held() / MIB == pytest.approx(float(row["held_mib"]), rel=0.01)
    assert max(step.peaks()) / MIB == pytest.approx(float(row["peak_mib"]), rel=0.01)


def newest_models():
    """By model and tier, the newest row of each model's experts, which get the routing as their input."""
    found = {}
    with open(RESULTS.with_name("models.csv"), newline="") as file:
        for row in csv.DictReader(file):
            name, _, tier = row["contender"].partition(", ")
            if name == "moe_aiter experts" and row["peak_mib"] and row["model"] in MODELS:
                old = found.get((row["model"], tier))
                if old is None or old["date"] <= row["date"]:
                    found[row["model"], tier] = row
    return found


MODELS = models()
MODEL_ROWS = newest_models()


@pytest.mark.parametrize("model, tier", MODEL_ROWS, ids=str)
def test_figures_of_models_are_within_one_percent_of_measured_ones(model, tier):
    row, portable = MODEL_ROWS[model, tier], "" if tier == "hopper" else "the portable tier was measured"
    step = Step(MODELS[model].shape, getattr(torch, row["dtype"]), portable=portable)
    assert step.held() / MIB == pytest.approx(float(row["held_mib"]), rel=0.01)
    assert max(step.peaks()) / MIB == pytest.approx(float(row["peak_mib"]), rel=0.01)


def newest_ranks():
    """By ranks and shape, the newest row of experts that all ranks share through symmetric memory."""
    found = {}
    with open(RESULTS.with_name("parallel.csv"), newline="") as file:
        for row in csv.DictReader(file):
            if row["contender"] == "moe_aiter, symmetric" and row["held_mib"] and row["ep"] == row["ranks"]:
                old = found.get((row["ranks"], row["shape"]))
                if old is None or old["date"] <= row["date"]:
                    found[row["ranks"], row["shape"]] = row
    return found


RANK_ROWS = newest_ranks()


@pytest.mark.parametrize("ranks, name", RANK_ROWS, ids=str)
def test_figures_of_ranks_are_within_one_percent_of_measured_ones(ranks, name, capsys):
    row = RANK_ROWS[ranks, name]
    assert cli.main(["info", "--memory", *(row[size] for size in SIZES), "--ranks", ranks]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = dict(line.rsplit(maxsplit=1) for line in lines[lines.index("") + 1 :] if line[-1:].isdigit())
    assert float(found["held"]) == pytest.approx(float(row["held_mib"]), rel=0.01)
    assert float(found["buffer of all layers"]) == pytest.approx(float(row["pool_mib"]), rel=0.01)
    H, inner, E = (int(row[size]) for size in SIZES[1:4])
    assert float(found["weights"]) == pytest.approx(2 * (3 * E * H * inner / int(ranks) + E * H) / MIB, abs=1)


def test_results_have_two_and_four_ranks():
    assert {ranks for ranks, _ in RANK_ROWS} == {"2", "4"}


def test_results_have_both_tiers():
    assert {tier for _, tier in MODEL_ROWS} == {"hopper", "triton"} and len(MODEL_ROWS) > 2 * len(
        MODELS
    ) * 0.9


def test_results_have_every_recipe():
    assert {recipe for _, recipe in ROWS} == {None, *RECIPES}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "fp8, recompute", [(None, "z"), *((fp8, how) for fp8 in RECIPES for how in ("none", "z"))]
)
@pytest.mark.parametrize("sizes", [(1024, 256, 128, 16, 4), (300, 512, 64, 8, 2), (512, 256, 64, 64, 1)])
def test_held_is_what_autograd_saves(sizes, fp8, recompute, dtype):
    T, H, inner, E, k = sizes
    moe = MoE(H, inner, E, k, fp8=fp8, recompute=recompute, device="meta", dtype=dtype)
    kept, weights = {}, {p.untyped_storage()._cdata for p in moe.parameters()}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        moe(torch.empty(T, H, device="meta", dtype=dtype, requires_grad=True))
    held = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in weights)
    assert Step(Shape(*sizes), dtype, fp8=fp8, recompute=recompute).held() == held


def allocated(run):
    """The result, and what torch's CPU allocator has given out since: now, and at most."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        result = run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return result, now, most


@pytest.mark.interpret
@pytest.mark.skipif(not interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("options", [{}, {"recompute": "z"}, {"row_chunks": 1}, {"row_chunks": 4}], ids=str)
@pytest.mark.parametrize("sizes", [(2048, 1024, 256, 8, 4), (2048, 1024, 64, 16, 4), (1024, 1024, 512, 8, 2)])
def test_launchers_allocate_what_is_said(sizes, options, monkeypatch):
    from triton.runtime.interpreter import GridExecutor

    T, H, inner, E, k = sizes
    gate_up, down = torch.empty(E, 2 * inner, H), torch.empty(E, H, inner)
    leaves = torch.empty(T, H), gate_up, down, torch.empty(T, k)
    x, gate_up, down, weights = (t.requires_grad_() for t in leaves)
    with use("torch"):
        plan = make_plan(torch.rand(T, E).topk(k).indices, E)
    monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **options: None)  # kernels allocate nothing
    out, held, forward = allocated(lambda: expert_mlp(x, gate_up, down, weights, plan, **options))
    leaves, dout = (x, gate_up, down, weights), torch.empty_like(out)
    *_, backward = allocated(lambda: torch.autograd.grad(out, leaves, dout))
    step = Step(Shape(*sizes), torch.float32, **options)
    most_forward, most_backward = step.peaks()
    assert held == step.held() - step.routing
    assert forward == most_forward - step.routing - step.scores
    # the routing weights' gradient in parts is not counted
    assert held + backward == pytest.approx(most_backward - step.routing, rel=2e-3)


def test_table(capsys):
    assert cli.main(ARGUMENTS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "MoE on sm_90, bfloat16, MiB: T, H, I, E, k = 32768, 2048, 768, 128, 8; swiglu"
    numbers = {line.rsplit(maxsplit=3)[0]: line.split()[-3:] for line in lines[6:-2]}
    assert [*numbers] == [
        "default", "recompute='z'", "row_chunks=2", "row_chunks=4", *(f"fp8={fp8!r}" for fp8 in RECIPES)
    ]  # fmt: skip
    assert numbers["default"] == ["901", "2325", "2437"] and numbers["recompute='z'"][0] == "133"
    assert [line.split()[-1] for line in lines[1:4]] == ["1152", "1152", "2305"]


def test_the_page_shows_what_the_command_prints(capsys):
    assert cli.main(ARGUMENTS) == 0
    lines = capsys.readouterr().out.splitlines()[6:-2]
    page = (RESULTS.parents[2] / "docs" / "memory.md").read_text()
    table = page.partition("<!-- memory: begin -->\n")[2].partition("<!-- memory: end -->")[0].splitlines()
    assert table[2:] == [f"| {' | '.join(line.rsplit(maxsplit=3))} |" for line in lines]


@pytest.mark.parametrize("sizes", [(4096, 2048, 1536, 8), (65536, 2880, 5760, 32), (300, 64, 96, 16)])
def test_rows_are_gathered_as_the_kernel_does(sizes, monkeypatch):
    """Of as many columns of x at a time."""
    M, K, N, groups = sizes
    x, y = (torch.empty(M, n, dtype=torch.bfloat16, device="meta") for n in (K, N))
    counts, order = (torch.empty(n, dtype=torch.int32, device="meta") for n in (groups, M))

    def stop(*asked):
        raise StopIteration(asked)

    expected = memory.gathered(x, y, groups)
    monkeypatch.setattr(tgmm, "column_slices", stop)
    with pytest.raises(StopIteration) as stopped:
        tgmm.bind_gathered(x, y, counts, order, 1, (K * N, N, 1))
    assert expected == memory.widest(*stopped.value.value) > 0


def test_portable_kernels_gather_rows(capsys):
    backward = []
    for target in ("sm_90", "sm_80"):
        assert cli.main([*ARGUMENTS, "--target", target]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"MoE on {target}, ") and ("fp8=" in lines[-3]) == (target == "sm_90")
        backward.append(next(int(line.split()[-1]) for line in lines if line.startswith("row_chunks=4")))
    assert backward[0] < backward[1]


@pytest.mark.parametrize("change", [["--dtype", "float32"], ["32768", "2048", "770", "128", "8"]])
def test_recipes_without_kernels_are_left_out(change, capsys):
    assert cli.main([*(ARGUMENTS if change[0] == "--dtype" else ARGUMENTS[:2]), *change]) == 0
    out = capsys.readouterr().out
    assert "row_chunks=4" in out and "fp8=" not in out and "no rows of fp8: " in out


def test_sizes_of_a_model(tmp_path, capsys):
    config = {"model_type": "qwen3_moe", "num_experts": 128, "moe_intermediate_size": 768}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"hidden_size": 2048, "num_experts_per_tok": 8}))
    assert cli.main(["info", "--model", str(path), "--tokens", "32768", "--memory"]) == 0
    of_model = capsys.readouterr().out.splitlines()
    assert cli.main(ARGUMENTS) == 0
    assert of_model[1:] == capsys.readouterr().out.splitlines()[1:]
    assert cli.main(["info", "--memory", "--model", "openai/gpt-oss-20b"]) == 0
    assert "swiglu_oai" in capsys.readouterr().out.splitlines()[0]


FIVE = "--memory takes 5 sizes, T H I E k: tokens, hidden, intermediate, experts, top-k"


@pytest.mark.parametrize(
    "words, message",
    [
        ("--memory", FIVE),
        ("--memory 1 2 3", FIVE),
        ("--memory 1 2 3 4 4 --tokens 9", "--tokens needs --model: T is the first size of --memory"),
        ("--memory 4 4 4 4 2 --ranks 5", "MoE: 5 ranks cannot share 4 experts"),
        ("--memory 4 4 4 4 5", "MoE: a token cannot go to 5 of 4 experts"),
        ("--memory 2000000000 4 4 8 8", "MoE: 2000000000 tokens with 8 experts each are"),
        ("--memory 1 2 3 4 4 --model config.json", "--memory takes its sizes from --model: leave the"),
        ("--model config.json --dtype float32", "--dtype, --ranks and --layers need --memory"),
        ("--model config.json --layers 2", "--dtype, --ranks and --layers need --memory"),
        ("--dtype float32", "--target needs --model or --memory, --tokens needs --model; --dtype"),
        ("--layers 2", "--target needs --model or --memory, --tokens needs --model; --dtype"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words, message, capsys):
    assert cli.main(["info", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"moe-aiter info: error: {message}")


@pytest.mark.parametrize("words", ["--memory 0 1 1 1 1", "--memory 3 x 3 3 3", "--memory 1 1 1 1 -1"])
def test_sizes_are_whole_numbers(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["info", *words.split()])
    assert stopped.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((8, 2, 2**31 - 1, 2**30, 8), f"{2**30} experts of 2 x {2**31 - 1} are too large"),
        ((10**8, 2, 2**31 - 1, 128, 8), f"{10**8} tokens of such experts are too many"),
    ],
)
def test_tensors_larger_than_torch_counts_are_refused(sizes, message, capsys):
    assert cli.main(["info", "--memory", *map(str, sizes), "--dtype", "float32"]) == 2
    assert message in capsys.readouterr().err


def test_layers_add_up(capsys):
    """Each has its weights, gradients, states and what it holds; one is in backward, and x is there."""
    shape = Shape(1024, 256, 512, 16, 4)
    step, weights = Step(shape, torch.bfloat16), 2 * 16 * 256 * (3 * 512 + 1)
    held, peak = step.held(), step.peaks()[1]
    for layers in (1, 7):
        assert cli.main(["info", "--memory", *map(str, shape.sizes), "--layers", str(layers)]) == 0
        lines = capsys.readouterr().out.partition(f"forward and backward of {layers} layers")[2].splitlines()
        total = layers * (4 * weights + held) + peak - weights - held + 1024 * 256 * 2
        assert lines[1].split() == ["default", f"{total / 2**20:.0f}"]
        assert len(lines) == 1 + 4 + 3  # the head, options, recipes
