"""`moe-aiter tune`: what it compares, what it keeps, and what it says where it cannot measure."""

import csv
import functools
import subprocess
import sys

import pytest
import torch

from moe_aiter import Experts, LoRAExperts, cli, make_plan, quantize, tuning
from moe_aiter.bench import tiles, tune
from moe_aiter.bench.problem import SHAPES, Shape
from moe_aiter.config import interpret
from moe_aiter.kernels import base, experts, grouped, hopper
from moe_aiter.kernels.experts.inputs import ExpertInputs
from moe_aiter.kernels.experts.mlp import expert_mlp
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import IMPLS, ORDER
from moe_aiter.tuning.candidates import candidates, rule
from moe_aiter.tuning.table import TILES, Key

from ..check import error

USUAL, *OTHERS = candidates("hopper_gmm")
KEY = Key("hopper_gmm", 16, 8, 64, 1024)  # whose default is USUAL
TOY = ("--shape", "toy")


def run(*argv):
    return cli.main(["tune", *map(str, argv)])


class Fake:
    """A product on the CPU that computes 1 under every configuration but `wrong`."""

    def __init__(self, wrong=None, nan=None, unfit=None):
        self.asked, self.wrong, self.nan, self.unfit = [], wrong, nan, unfit

    def __call__(self, out):
        from triton.runtime.errors import OutOfResources

        self.asked.append(tuning.lookup(KEY.op, torch.bfloat16, 64, KEY.n, KEY.k, 8))
        if self.asked[-1] == self.unfit:
            raise OutOfResources(300, 227, "shared memory")
        out.fill_(1 if self.asked[-1] != self.wrong else 1.01)
        if self.asked[-1] == self.nan:
            out[0] = float("nan")

    def product(self):
        return tiles.Product("down", self, torch.empty(64), 1000)


@pytest.fixture
def fake(monkeypatch):
    """A GPU by name, on which the product of `fake` is all that a step has, and the third candidate wins."""
    fake = Fake()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(tuning, "default", lambda key: rule(key.op, key.n, key.k, key.rows))
    monkeypatch.setattr(tuning, "tables", lambda device: ("none",))
    monkeypatch.setattr(tuning, "interpret", False)  # the interpreter has one tile for every key
    monkeypatch.setattr("triton.runtime.driver._active", FakeDriver())
    monkeypatch.setattr(tune, "step_products", lambda *_: [fake.product()])
    times = dict(zip(candidates(KEY.op), (120.0, 110, 50, 100, 99, 98), strict=True))
    monkeypatch.setattr(tune, "time_tiles", lambda product, configs, reps: {c: times[c] for c in configs})
    return fake


class FakeDriver:
    def get_current_device(self):
        return 0


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run() == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "moe-aiter tune: error: there is no GPU that torch can use\n")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--family nothing", "invalid choice: 'nothing'"),
        ("--op matmul", "invalid choice: 'matmul'"),
        ("--reps 0", "0 is less than 1"),
        ("--tokens 0", "0 is less than 1"),
    ],
)
def test_wrong_flags(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(*flags.split())
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--shape nowhere", "there is no shape 'nowhere'; shapes: A, B"),
        ("--family dense --shape nowhere", "there is no such case; there are, of dense: square-512"),
        ("--family dense --tokens 8", "--tokens is for layer and four_bit"),
        ("--family four_bit --shape 8,64,32,4,2", "four_bit needs H and I that are multiples of 64, not"),
        ("--family layer dense --shape A", "--shape names shapes of layer or of other families, not of both"),
    ],
)
def test_names_that_do_not_go_together(flags, message, capsys):
    assert run(*flags.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"moe-aiter tune: error: {message}") and err.count("\n") == 1


@pytest.mark.parametrize("text, message", [("op,bits\n1,2\n", "lacks the columns"), (None, "Is a directory")])
def test_a_bad_table_is_refused_before_anything_is_measured(text, message, fake, tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text(text) if text else path.mkdir()
    assert run("--out", path) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-aiter tune: error: ") and message in err and err.count("\n") == 1
    assert not fake.asked


def test_rows_and_what_is_printed(fake, tmp_path, capsys):
    path = tmp_path / "t.csv"
    for tokens in ((), ("--tokens", 8)):
        assert run(*TOY, *tokens, "--out", path) == 0
    out = capsys.readouterr().out
    assert "T, H, I, E, k = 8, 32, 24, 5, 2" in out and "6 configurations: about 0 s, and up to 9 s" in out
    assert f"50.0  {candidates(KEY.op)[2]}" in out
    assert set(fake.asked) == set(candidates(KEY.op))
    (row,) = TILES.read(path)  # both shapes have that key
    assert row.key == KEY and row.value == candidates(KEY.op)[2] and tuple(row.cells) == TILES.columns
    assert (row.cells["us"], row.cells["default_us"], row.cells["gpu"]) == ("50.0", "120.0", "NVIDIA Test")
    assert all(row.cells[column] for column in TILES.columns)


def test_the_time_of_every_tile(fake, tmp_path, capsys):
    path = tmp_path / "times.csv"
    for _ in range(2):
        assert run(*TOY, "--out", tmp_path / "t.csv", "--times", path) == 0
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["us"] for row in rows] == ["120", "110", "50", "100", "99", "98"] * 2
    assert rows[2]["op"] == KEY.op and rows[2]["gpu"] == "NVIDIA Test" and float(rows[2]["flops"]) == 1000
    assert [int(row["group_m"]) for row in rows[:6]] == [c.group_m for c in candidates(KEY.op)]
    fake.asked.clear()
    assert run(*TOY, "--out", tmp_path / "t.csv", "--times", tmp_path) == 2
    assert "Is a directory" in capsys.readouterr().err and not fake.asked


def test_of_shapes_with_the_same_key_the_first_speaks(fake, tmp_path, capsys, monkeypatch):
    first = tune.time_tiles
    times = iter([first, lambda product, configs, reps: {c: 1.0 + (c != OTHERS[0]) for c in configs}])
    monkeypatch.setattr(tune, "time_tiles", lambda *inputs: next(times)(*inputs))
    path = tmp_path / "t.csv"
    assert run("--shape", "toy", "toy-oai", "--out", path) == 0
    (row,) = TILES.read(path)
    assert row.value == candidates(KEY.op)[2] and row.cells["us"] == "50.0"
    assert "as for a shape above: down\n" in capsys.readouterr().out


@pytest.mark.parametrize("op, lines", [("hopper_gmm", 1), ("gmm", 0)])
def test_only_the_ops_asked_for(op, lines, fake, tmp_path, capsys):
    assert run(*TOY, "--op", op, "--out", tmp_path / "t.csv") == 0
    assert len(TILES.read(tmp_path / "t.csv")) == lines
    assert ("nothing here runs gmm\n" in capsys.readouterr().out) is (lines == 0)


def test_a_wrong_candidate_is_left_out_and_fails_the_command(fake, tmp_path, capsys):
    fake.wrong = OTHERS[0]
    assert run(*TOY, "--out", tmp_path / "t.csv") == 1
    assert f"WRONG, left out: hopper_gmm {fake.wrong}" in capsys.readouterr().out


def test_what_does_not_fit_is_left_out(fake):
    fake.unfit = OTHERS[0]
    good, bad = tiles.check_tiles(fake.product(), [USUAL, *OTHERS])
    assert good == [USUAL, *OTHERS[1:]] and not bad


@pytest.mark.parametrize("place", [0, 1])
def test_nan(place, fake):
    """In a candidate's result it is wrong; in the default's it ends the command."""
    fake.nan = (USUAL, *OTHERS)[place]
    if place:
        assert tiles.check_tiles(fake.product(), [USUAL, *OTHERS])[1] == [fake.nan]
    else:
        with pytest.raises(RuntimeError, match="down: NaN in the result of the default"):
            tiles.check_tiles(fake.product(), [USUAL, *OTHERS])


@pytest.mark.parametrize("us, choice", [(98, USUAL), (97, OTHERS[0]), (200, USUAL)])
def test_the_default_stays_unless_another_is_clearly_faster(us, choice):
    assert tiles.pick_tile(USUAL, {USUAL: 100, OTHERS[0]: us, OTHERS[1]: 99}) == choice


@pytest.mark.parametrize("op, rows", [("gmm", 8), ("gmm", 128), ("down_grad", 8)])
@pytest.mark.parametrize("rival", [40, 60, None])
def test_a_tile_of_few_rows_has_to_be_faster_than_the_hopper_kernel(op, rows, rival, monkeypatch, capsys):
    """Which a row with it would replace."""
    default, *others = every = candidates(op, rows)
    times = dict.fromkeys(others, 100.0) | {default: 50.0} | ({None: rival} if rival else {})
    monkeypatch.setattr(tuning, "to_try", lambda key: every)
    monkeypatch.setattr(tune, "check_tiles", lambda product, configs: (configs, []))
    monkeypatch.setattr(tune, "time_tiles", lambda product, configs, reps: times)
    saved = []
    run = tune.Run(None, 3, saved.append, None, lambda key: None, lambda rows: None)
    tune.tune_product(tiles.Product("down", None, torch.empty(64), 1000), Key(op, 16, rows, 64, 64), run)
    slower = (op, rows, rival) == ("gmm", 8, 40)
    assert (
        len(saved) == 1 - slower
        and (", no row (Hopper kernel: 40.0 us)" in capsys.readouterr().out) is slower
    )


def test_a_row_of_few_rows_goes_where_the_hopper_kernel_has_become_faster(fake, tmp_path, monkeypatch):
    path, times = tmp_path / "t.csv", dict.fromkeys(candidates("gmm", 8), 50.0)
    monkeypatch.setattr(tuning, "to_try", lambda key: candidates("gmm", 8))
    monkeypatch.setattr(tiles.Product, "key", lambda product: Key("gmm", 16, 8, 64, 64))
    monkeypatch.setattr(tune, "check_tiles", lambda product, configs: (configs, []))
    for rival, rows in ((60.0, 1), (40.0, 0)):
        monkeypatch.setattr(tune, "time_tiles", lambda *_, rival=rival: times | {None: rival})
        assert run(*TOY, "--out", path) == 0
        assert len(TILES.read(path)) == rows


@pytest.mark.parametrize("few", [False, True])
def test_only_the_kernel_that_runs_is_tuned_unless_an_op_is_asked_for(few, monkeypatch):
    """The portable one for few rows, though Hopper's could."""
    shape = SHAPES["toy"], torch.device("cpu"), torch.bfloat16
    first, *_ = tiles.step(*shape)
    monkeypatch.setattr(tiles, "step", lambda *_: [first])
    there = {name: lambda out, i: None for name in ("hopper", "triton", "torch")}
    there["hopper"].should_use = lambda i: not few
    monkeypatch.setitem(ORDER, "cpu", tuple(there))
    monkeypatch.setitem(IMPLS, "expert_up", there)
    for every, expected in ((False, ["triton" if few else "hopper"]), (True, ["hopper", "triton"])):
        found = [product.launch.args[0] for product in tiles.step_products(*shape, every)]
        assert found == [there[name] for name in expected]


@pytest.mark.interpret
@pytest.mark.skipif(not interpret, reason="portable kernels need a GPU or the interpreter")
def test_a_step_on_the_portable_tier():
    found = list(tiles.step_products(SHAPES["toy"], torch.device("cpu"), torch.float16, True))
    keys = [product.key() for product in found]
    assert [key.op for key in keys] == ["up", "gmm", "down_grad", "gmm", "tgmm", "tgmm"]
    assert [(key.n, key.k) for key in keys] == [(48, 32), (32, 24), (24, 32), (32, 48), (24, 32), (32, 48)]
    other = tuning.Config(32, 32, 16)
    for product in found:
        assert tiles.check_tiles(product, [tuning.TOY, other]) == ([tuning.TOY, other], [])


@pytest.mark.parametrize(
    "name, widths",
    [
        ("A", {4096: {1024, 2048}}),
        ("B", {768: {256}, 512: {512}}),
        ("30B-256", {1536: {256}, 1024: {256, 512}}),
    ],
)
def test_every_chunk_of_a_large_step_is_measured(name, widths, monkeypatch):
    """N, and the K for each, that `gmm` gets where the rows come in chunks; of tensors without memory."""
    (T, H, width, E, k), bf16, meta = SHAPES[name].sizes, torch.bfloat16, torch.device("meta")
    asked = set()

    monkeypatch.setattr(grouped.gmm, "pick", lambda *_: None)

    def note(impl, i):
        asked.add((i.rhs.shape[2], i.rhs.shape[1]))

    monkeypatch.setattr(grouped.gmm, "bound", note)
    sizes = (T, H), (E, 2 * width, H), (E, H, width), (T * k, width), (T * k, 2 * width)
    x, gate_up, down, a, dz = (torch.empty(n, dtype=bf16, device=meta, requires_grad=True) for n in sizes)
    plan = torch.empty(T * k, device=meta), torch.empty(T, k, device=meta), torch.empty(E, device=meta)
    inputs = ExpertInputs(x, gate_up, None, down, None, plan[1], *plan, "swiglu", False, True)
    for rows, w, most in zip(
        (a, dz), (down.mT, gate_up), experts.inputs.row_bytes(inputs, None), strict=True
    ):
        i = grouped.gmm.GmmUnpermuteInputs(rows, w, None, None, None, plan[1], None, most)
        grouped.gmm.bind_gmm_unpermute(i)
    assert asked == {(n, k) for n, sums in widths.items() for k in sums}
    measured = [
        (out, x, w) for _, op, _, out, (x, w, *_) in tiles.step(SHAPES[name], meta, bf16) if op == "gmm"
    ]
    assert sorted(asked) == sorted((out.shape[1], x.shape[1]) for out, x, _ in measured)
    assert all(out.is_contiguous() and w.shape[1:] == (x.shape[1], out.shape[1]) for out, x, w in measured)


@pytest.mark.interpret
@pytest.mark.skipif(not interpret, reason="portable kernels need a GPU or the interpreter")
def test_it_measures_what_a_step_looks_up(monkeypatch):
    """A step with the proportions of B, and so in as many chunks of columns."""
    for module in (experts.inputs, base.tile):
        monkeypatch.setattr(module, "BLOCK", 8)
    shape, device, asked = Shape(48, 48, 8, 8, 8), torch.device("cpu"), set()
    T, H, width, E, k = shape.sizes
    sizes = (T, H), (E, 2 * width, H), (E, H, width), (T, k)
    tensors = [torch.randn(n, dtype=torch.float16, requires_grad=True) for n in sizes]
    plan = sort_by_expert(torch.randint(E, (T, k)), E)
    with tuning.choose(asked.add):
        expert_mlp(*tensors, plan).sum().backward()
    assert {key.n for key in asked if key.op == "gmm"} == {24, 16}
    assert asked == {product.key() for product in tiles.step_products(shape, device, torch.float16, True)}


@pytest.mark.interpret
@pytest.mark.skipif(not interpret, reason="portable kernels need a GPU or the interpreter")
def test_it_measures_what_a_step_of_4_bits_looks_up():
    shape, device, asked = Shape(12, 64, 128, 3, 2), torch.device("cpu"), set()
    T, H, width, E, k = shape.sizes
    layer = LoRAExperts(quantize(Experts(E, H, width, dtype=torch.float16), "nf4"), rank=4)
    x = torch.randn(T, H, dtype=torch.float16, requires_grad=True)
    with tuning.choose(asked.add):
        layer(x, torch.rand(T, k), make_plan(torch.randint(E, (T, k)), E)).sum().backward()
    found = list(tiles.four_bit_products(shape, device, torch.float16))
    assert {key for key in asked if key.op == "four_bit"} == {product.key() for product in found}
    other = tuning.Config(32, 32, 32)
    for product in found:
        assert tiles.check_tiles(product, [tuning.TOY, other]) == ([tuning.TOY, other], [])


def test_products_of_8_bits(monkeypatch):
    """What a step under `fp8=` launches: the same products, of rows that were quantised along the sum."""
    launched, there = [], hopper.launcher
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)

    def launcher(*name):
        assert callable(there(*name))
        if name[1].startswith("bind_"):

            def launch(bound, out, *given):
                if name[0] == "tgmm":
                    return launched.append((name, given, {"out": out, "bound": bound[1:]}))
                given, scales = (given[:4], given[5:]) if name[0] == "gmm" else (tuple(given[0]), given[1])
                launched.append((name, given, {"out": out, "scales": scales}))

            return lambda *bound: functools.partial(launch, bound)
        return lambda out, *given, **how: launched.append((name, given, how | {"out": out}))

    monkeypatch.setattr(hopper, "launcher", launcher)
    T, H, width, E, k = 32, 256, 64, 4, 2
    step = tiles.step(Shape(T, H, width, E, k), torch.device("cpu"), torch.bfloat16)
    for _, op, _, out, inputs in step:
        tiles.launch_of_8_bits(op, inputs)(out)
    modules = [module for (module, _), *_ in launched]
    assert modules == ["up", "gmm", "down_grad", "gmm", "tgmm", "tgmm"]
    for (_, given, how), (name, *_, out, (x, y, *_, first)) in zip(launched[4:], step[4:], strict=True):
        (x8, y8, scale, _), (sizes, strides, accumulate) = given, how["bound"]
        assert how["out"] is out and sizes == (len(x8), E, y.shape[1], x.shape[1]), name
        assert strides == (out if first else out.mT).stride(), name
        assert x8.shape[1:] == (x.shape[1], 128) and y8.shape == (*scale.shape, 128) and not accumulate
    launched = launched[:4]
    R, same = T * k, [inputs for _, op, _, _, inputs in step if op != "tgmm"]
    by_columns = [False, True, True, True]
    for (_, given, how), inputs, columns in zip(launched, same, by_columns, strict=True):
        x_scale, w_scale = how["scales"]
        place = 2 if given[1] is inputs[1] else 1  # z comes before the weight
        w8, w = given[place], inputs[place]
        assert given[0].dtype == w8.dtype == torch.float8_e4m3fn and x_scale.shape == (R,)
        assert w8.shape == w.shape and given[place + 1 :] == inputs[place + 1 :]
        back = w8.float() * (w_scale[:, None] if columns else w_scale[..., None])
        assert error(back, w) < 0.05


def test_knows_the_ops_of_a_step():
    """In a process that has imported nothing else."""
    names = "expert_up", "expert_down_grad", "gmm", "tgmm", "four_bit_gmm"
    code = f"import moe_aiter.bench.tiles; from moe_aiter.op import IMPLS; assert set({names}) <= set(IMPLS)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_4_bits_on_a_gpu(tmp_path, capsys):
    path = tmp_path / "t.csv"
    flags = "--family", "four_bit", "--shape", "E", "--tokens", 256, "--reps", 3, "--out", path
    assert run(*flags) == 0
    op = "hopper_four_bit" if torch.cuda.get_device_capability() == (9, 0) else "four_bit"
    assert {row.key.op for row in TILES.read(path)} == {op}


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gmm", "hopper_gmm", "hopper_gmm_fp8", "hopper_tgmm"])
def test_on_a_gpu(op, tmp_path, capsys):
    if op.startswith("hopper") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    path = tmp_path / "t.csv"
    assert run("--shape", "E", "--tokens", 1024, "--op", op, "--reps", 3, "--out", path) == 0
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 and all(row["op"] == op and float(row["us"]) > 0 for row in rows)
