"""`moe-aiter tune --family`: tiles of dense, 8-bit and sparse products, and who computes them."""

import pytest
import torch
import torch.nn.functional as F

from moe_aiter import cli, tuning
from moe_aiter.bench import cases, tiles, tune
from moe_aiter.bench.cases import Case, Tunable
from moe_aiter.bench.tiles import Kernel
from moe_aiter.config import interpret
from moe_aiter.kernels.grouped.scaled_gemm import scaled_gemm
from moe_aiter.op import poison, use
from moe_aiter.tuning.candidates import candidates, rule
from moe_aiter.tuning.choice import CHOICES, ChoiceKey
from moe_aiter.tuning.store import PROVENANCE
from moe_aiter.tuning.table import TILES, Key

CPU = torch.device("cpu")
KEY = Key("hopper_gemm", 16, 8, 64, 1024)
USUAL, *OTHERS = candidates(KEY.op)
ASKED = ChoiceKey("gemm", 16, "nt", "none", 8, 64, 1024)


class FakeDriver:
    def get_current_device(self):
        return 0


class Fake:
    """A kernel that is always 1, or under the `wrong` tile 1.01."""

    def __init__(self, wrong=()):
        self.wrong, self.ran = wrong, []

    def launch(self, outs):
        config = tuning.lookup(KEY.op, torch.bfloat16, 8, KEY.n, KEY.k, 1)
        self.ran.append(config)
        outs[0].fill_(1.01 if config in self.wrong else 1)

    def kernel(self, torch_s=1.0, name="none"):
        launches = {
            "hopper": self.launch,
            "torch": lambda outs: outs[0].fill_(torch_s),
        }
        outs = torch.empty(64, dtype=torch.bfloat16), torch.empty(0)
        return Kernel(
            name, outs, launches, 1000, lambda dtype: torch.ones(8, 8, dtype=dtype), plain=False, case=ASKED
        )


@pytest.fixture
def gpu(monkeypatch):
    """A GPU by name; `gpu(kernels, us)` lets them be those of a case, each tile and backend with its time."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(tuning, "default", lambda key: rule(key.op, key.n, key.k, key.rows))
    monkeypatch.setattr(tuning, "tables", lambda device: ("none",))
    monkeypatch.setattr(tuning, "interpret", False)
    monkeypatch.setattr("triton.runtime.driver._active", FakeDriver())

    def become(kernels, backends, **us):
        case = Case("one", "8x1024x64", lambda **_: Tunable((), None, lambda: kernels))
        monkeypatch.setitem(cases.FAMILIES, "dense", [case])
        times = {USUAL: 100.0, **dict.fromkeys(OTHERS, 99.0), OTHERS[1]: 80.0}
        monkeypatch.setattr(tune, "time_tiles", lambda product, configs, reps: {c: times[c] for c in configs})
        monkeypatch.setattr(tiles, "time_graphs", lambda runs, reps: backends[: len(runs)])

    return become


def run(*argv):
    return cli.main(["tune", "--family", "dense", *map(str, argv)])


def test_tiles_and_the_choice_become_rows(gpu, tmp_path, capsys):
    fake = Fake()
    gpu([fake.kernel(), fake.kernel(name="bias")], [80.0, 90.0])
    path = tmp_path / "t.csv"
    assert run("--out", path) == 0
    out = capsys.readouterr().out
    assert "dense, one (8x1024x64), bfloat16" in out and "as for a shape above: bias" in out
    assert "hopper 80.0, torch 90.0 us -> hopper" in out
    ((key, tile, cells),) = TILES.read(path)
    assert key == KEY and tile == OTHERS[1] and (cells["us"], cells["default_us"]) == ("80.0", "100.0")
    ((key, backend, cells),) = CHOICES.read(tmp_path / "choice" / "t.csv")
    assert key == ASKED and backend == "hopper"
    assert (cells["us"], cells["torch_us"], cells["gpu"]) == ("80.0", "90.0", "NVIDIA Test")
    assert all(cells.values()), "where it comes from is there as well"
    assert fake.ran[-1] == OTHERS[1], "the choice is between torch and the tile that won"


@pytest.mark.parametrize("us, expected", [(98.9, "hopper"), (99.1, "torch"), (120.0, "torch")])
def test_only_what_is_clearly_faster_than_torch_is_chosen(us, expected):
    assert tiles.fastest({"hopper": us, "triton": 130.0, "torch": 100.0}) == (expected, us)


def test_a_tile_that_is_wrong_has_no_row_and_fails_the_command(gpu, tmp_path, capsys):
    gpu([Fake(wrong=OTHERS[:2]).kernel()], [99.0, 100.0])
    path = tmp_path / "t.csv"
    assert run("--out", path) == 1
    (row,) = TILES.read(path)
    assert row.value == USUAL and capsys.readouterr().out.count("WRONG, left out: hopper_gemm") == 2


def test_where_the_default_is_wrong_nothing_is_chosen(gpu, tmp_path, capsys):
    gpu([Fake(wrong=[USUAL]).kernel()], [99.0, 100.0])
    path = tmp_path / "t.csv"
    assert run("--out", path) == 1
    assert not TILES.read(path) and not (tmp_path / "choice").exists()
    assert "WRONG, left out: none by hopper" in capsys.readouterr().out


def test_a_torch_that_is_wrong_is_not_chosen_either(gpu, tmp_path):
    gpu([Fake().kernel(torch_s=1.1)], [99.0, 100.0])
    assert run("--out", tmp_path / "t.csv") == 1
    assert not (tmp_path / "choice").exists()


def test_with_ops_there_are_tiles_alone(gpu, tmp_path, capsys):
    gpu([Fake().kernel()], [80.0, 90.0])
    assert run("--op", "gemm", "hopper_gemm", "--out", tmp_path / "t.csv") == 0
    assert "nothing here runs gemm\n" in capsys.readouterr().out
    assert len(TILES.read(tmp_path / "t.csv")) == 1 and not (tmp_path / "choice").exists()


def test_a_table_of_choices_that_is_damaged_is_refused_first(gpu, tmp_path, capsys):
    fake = Fake()
    gpu([fake.kernel()], [80.0, 90.0])
    (tmp_path / "choice").mkdir()
    (tmp_path / "choice" / "t.csv").write_text("op\n")
    assert run("--out", tmp_path / "t.csv") == 2
    assert "has other columns than op, bits" in capsys.readouterr().err and not fake.ran


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("--shape", "decode-toy") == 2
    assert capsys.readouterr().err == "moe-aiter tune: error: there is no GPU that torch can use\n"


def test_choices_are_merged_and_what_is_special_comes_first(tmp_path):
    path, notes = tmp_path / "x" / "t.csv", dict.fromkeys(("us", "torch_us", *PROVENANCE), "1")
    general = ASKED._replace(rows=None, n=None)
    for case, backend in (
        (general, "torch"),
        (ASKED, "torch"),
        (ASKED._replace(n=8), "triton"),
        (ASKED, "hopper"),
    ):
        cells = {name: "" if cell is None else cell for name, cell in case._asdict().items()}
        CHOICES.write(path, [cells | notes | {"backend": backend}])
    found = [(row.key, row.value) for row in CHOICES.read(path)]
    assert found == [(ASKED, "hopper"), (ASKED._replace(n=8), "triton"), (general, "torch")]


def test_the_shipped_choices_stay_as_they_are_when_nothing_is_added(tmp_path):
    """So that a run changes the rows that it measured, and no others."""
    path = tmp_path / "h200.csv"
    text = (CHOICES.folder / "h200.csv").read_text()
    path.write_text(text)
    CHOICES.write(path, [])
    assert path.read_text() == text


def kernels(family, name, dtype):
    (case,) = (case for case in cases.FAMILIES[family] if case.name == name)
    return {kernel.name: kernel for kernel in case.make(*case.sizes, device=CPU, dtype=dtype).kernels()}


TOYS = [
    ("dense", "linear-toy", torch.float16, {"none": "gemm", "none, by columns": "gemm", "bias": "gemm",
     "relu": "gemm_full", "gelu": "gemm_full", "gelu_tanh": "gemm_full", "silu": "gemm_full"}),
    ("dense", "decode-toy", torch.float32, {"none": "gemm"}),
    ("dense", "cutlass-toy", torch.float16, {"c": "gemm_full"}),
    ("dense", "batched-toy", torch.float16, {"batches": "gemm"}),
    ("scaled", "int8-toy", torch.int8, {"scales": "scaled_int8"}),
    ("sparse", "block-toy", torch.float32, {"forward": "sparse_blocks"}),
    ("sparse", "block-toy-step", torch.float32, {"gradient": "sparse_blocks_grad"}),
]  # fmt: skip


@pytest.mark.interpret
@pytest.mark.skipif(not interpret, reason="portable kernels need a GPU or the interpreter")
@pytest.mark.parametrize("family, name, dtype, ops", TOYS, ids=[name for _, name, *_ in TOYS])
def test_toys_on_the_portable_tier(family, name, dtype, ops):
    """The kernels of a case look up these tiles, are right under others, and refused where not."""
    found = kernels(family, name, dtype)
    assert found.keys() == ops.keys()
    other = tuning.Config(32, 16, 32)
    for name, kernel in found.items():
        product = kernel.products()["triton"]
        assert product.key().op == ops[name]
        assert tiles.check_tiles(product, [tuning.TOY, other]) == ([tuning.TOY, other], []), name
        product.outs()[0][:] = product.outs()[0] * 1.1 + 0.1
        assert not product.accept(product.outs()), name


@pytest.mark.parametrize("family, name, dtype, ops", TOYS, ids=[name for _, name, *_ in TOYS])
def test_torch_s_own_of_a_toy_is_right_and_its_case_is_the_one_that_is_asked(
    family, name, dtype, ops, monkeypatch
):
    for kernel in kernels(family, name, dtype).values():
        outs = kernel.outs if isinstance(kernel.outs, tuple) else (kernel.outs,)
        poison(outs)
        assert not kernel.judge()(outs)
        if "torch" in kernel.launches:
            kernel.launches["torch"](kernel.outs)
            assert kernel.judge()(outs), kernel.name
            assert (
                kernel.case.rows >= 1
                and kernel.case.layout in ("nn", "nt")
                and kernel.case.op in ("gemm", "bmm")
            )


def test_the_shipped_rows_have_cases_that_would_be_measured():
    """By name, those of the documented command: every choice that is shipped for an H200 comes from one."""
    asked = set()
    for case in cases.DENSE:
        words = case.shape.split("x")
        if len(words) == 3:
            m, k, n = map(int, words)
            asked.add((tuning.bucket(m), n, k))
    rows = [row for row in CHOICES.read(CHOICES.folder / "h200.csv") if row.key.op.startswith("gemm")]
    assert rows and {(row.key.rows, row.key.n, row.key.k) for row in rows} <= asked


@pytest.mark.gpu
@pytest.mark.parametrize(
    "words, ops",
    [
        ("dense --shape square-512", {"gemm"}),
        ("dense --shape decode-4096-4", {"gemm"}),
        ("scaled --shape int8-page", {"scaled_int8"}),
        ("sparse --shape block32-90 --op sparse_blocks", {"sparse_blocks"}),
    ],
)
def test_on_a_gpu(words, ops, tmp_path):
    path = tmp_path / "t.csv"
    assert cli.main(["tune", "--family", *words.split(), "--reps", "3", "--out", str(path)]) == 0
    found = TILES.read(path)
    assert ops <= {row.key.op for row in found} and all(float(row.cells["us"]) > 0 for row in found)
    if "dense" in words:
        rows = CHOICES.read(tmp_path / "choice" / "t.csv")
        assert rows


@pytest.mark.gpu
def test_what_is_measured_is_what_a_user_gets(device="cuda"):
    """The scaled product looks up the key that its case is tuned for."""
    x, w = (
        torch.ones(64, 128, device=device, dtype=torch.int8),
        torch.ones(32, 128, device=device, dtype=torch.int8),
    )
    keys = []
    with use("triton"), tuning.choose(keys.append):
        out = scaled_gemm(x, w.mT, 1.0, 1.0, out_dtype=torch.bfloat16)
    assert keys[0].op == "scaled_int8"
    torch.testing.assert_close(out, F.linear(x.bfloat16(), w.bfloat16()))
