"""The command line: what it prints, and what it says to a mistake."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_aiter
from moe_aiter.cli import COMMANDS, main
from moe_aiter.config import VERSION, SettingError, Settings
from moe_aiter.op import BackendError, use


def test_info_names_versions_backends_and_every_setting(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    backends = out.partition("backends\n")[2].partition("settings\n")[0].splitlines()
    names = "hopper", "triton", "host (C++)", "torch"
    assert [line[:30].strip() for line in backends] == [*names, "first choice"]
    states = {line[:30].strip(): line[31:] for line in backends}
    assert states["first choice"] == next(name for name in names if states[name] == "ready")
    for field in Settings.__dataclass_fields__:
        assert f"  MOE_AITER_{field.upper()} " in out


@pytest.mark.parametrize("words", ["info", "tune --list"])
def test_a_reader_that_ends_early_is_no_mistake(words):
    """As `| head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "moe_aiter.cli", *words.split()]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize(
    "flag, starts", [("--help", "usage: moe-aiter"), ("--version", f"moe-aiter {VERSION}\n")]
)
def test_help_and_version_need_no_torch(flag, starts):
    script = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        f"from moe_aiter.cli import main; main(['{flag}'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert moe_aiter.__version__ == VERSION
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(starts)


@pytest.mark.parametrize("command", ["info", "train", "sample", "plot", "report", "bench", "tune", "convert"])
def test_help_of_a_command(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert "--" in out and f"Example: moe-aiter {command} " in out


def test_no_command_and_unknown_flags_are_errors(capsys):
    for argv in ([], ["paint"], ["train", "--no-such-flag"]):
        with pytest.raises(SystemExit, match="2"):
            main(argv)
    assert "--no-such-flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "sample runs",
        "plot runs",
        "report runs",
        "bench layer",
        "bench models",
        "tune",
        "convert a b",
    ],
)
def test_an_unknown_flag_is_refused_by_the_command_that_was_given_it(command, capsys):
    err = one_line(capsys, command, "--no-such-flag")
    name = f"moe-aiter {command.removesuffix(' runs').removesuffix(' a b')}"
    assert err.startswith(f"{name}: error: ") and err.endswith(f"see {name} --help\n")


@pytest.mark.parametrize("words", ["gmm --shape C-up --help", "parallel", "report --csv 'my file'"])
def test_a_benchmark_that_has_moved_says_where_it_is(words, tmp_path, monkeypatch, capsys):
    """It runs nothing from the folder at hand."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise AssertionError")
    err = one_line(capsys, "bench", *shlex.split(words))
    place = f"in the source tree, run python -m benchmarks {words}"
    assert err == f"moe-aiter bench {words.split()[0]}: error: it has moved out of the package: {place}\n"


def test_a_mistake_is_one_line_and_status_2(capsys, tmp_path):
    assert main(["train", "--preset", "test", "--data", str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-aiter train: error: --data") and err.count("\n") == 1
    assert main(["plot", str(tmp_path)]) == 2
    assert "neither a run folder nor a metrics file" in capsys.readouterr().err


def one_line(capsys, command: str, *words: str) -> str:
    """The error of a command that is refused."""
    try:
        status = main([*command.split(), *words])
    except SystemExit as stop:
        status = stop.code
    err = capsys.readouterr().err
    assert status == 2 and err.count("\n") == 1 and err.startswith(f"moe-aiter {command.split()[0]}"), err
    return err


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--lr nan", "--lr is nan; it must be above 0 and below inf"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'"),
        ("--beta1 2", "--beta1 is 2.0; it must be at least 0 and below 1"),
        ("--seed 99999999999999999999", "--seed is 99999999999999999999; it must be at least"),
        ("--shared-intermediate -4", "--shared-intermediate is -4; it must be at least 0"),
        ("--temperature nan", "--temperature is nan; it must be at least 0"),
        ("--clip -1", "--clip is -1.0; it must be above 0"),
        ("--sample-bytes -5", "--sample-bytes is -5; it must be at least 0"),
        (
            "--batch 99999999999999999999",
            "--batch is 99999999999999999999; it must be at least 1 and at most",
        ),
        (
            "--batch 2147483647 --sequence 128",
            "not enough memory to allocate 281474976579584 bytes: try",
        ),
        ("--device meta", "--device is 'meta'; it takes auto, cpu, cuda or cuda:N"),
        ("--out text.txt", "--out text.txt is a file; a run needs a folder"),
        ("--out text.txt/run", "text.txt/run: Not a directory"),
        ("--out=", "argument --out: the name is empty"),
        ("--data=", "argument --data: the name is empty"),
        ("--data empty", "no text file there"),
        ("--resume=", "argument --resume: the name is empty"),
        ("--resume nowhere", "nowhere is not a run folder"),
    ],
)
def test_train_refuses(flags, message, capsys, tmp_path, monkeypatch):
    for module in ("tqdm", "safetensors", "matplotlib"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text\n" * 1000)
    (tmp_path / "empty").mkdir()
    preset = [] if "--resume" in flags else ["--preset", "test", "--device", "cpu", "--data", "text.txt"]
    assert message in one_line(capsys, "train", *preset, *flags.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "text.txt"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("nowhere", "nowhere is neither a run folder nor a metrics file"),
        ("empty.jsonl", "empty.jsonl holds no step to draw"),
        ("good.jsonl empty.jsonl", "empty.jsonl holds no step to draw"),
        ("damaged.jsonl", "damaged.jsonl: line 1 is damaged"),
        ("good.jsonl --out x.zzz", "--out is x.zzz; its name must end with one of "),
        ("good.jsonl --out old.png", "old.png is there already: --force replaces it, --out names another"),
        ("good.jsonl --out old.png --force --out dir.png", "dir.png is there already: --out names another"),
        ("good.jsonl --out nowhere/x.png", "nowhere/x.png: No such file or directory"),
    ],
)
def test_plot_refuses(words, message, capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name, rows in {"good": '{"step": 1, "loss": 3}\n', "empty": "", "damaged": "x\ny\n"}.items():
        (tmp_path / f"{name}.jsonl").write_text(rows)
    (tmp_path / "old.png").write_text("mine")
    (tmp_path / "dir.png").mkdir()
    assert message in one_line(capsys, "plot", *words.split())
    assert (tmp_path / "old.png").read_text() == "mine"


def test_plot_draws_several_runs(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    rows = '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2, "val_loss": 2}\n'
    for name in ("moe", "dense"):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    out = tmp_path / "both.png"
    words = ["plot", str(tmp_path / "moe.jsonl"), str(tmp_path / "dense.jsonl"), "--out", str(out)]
    assert main(words) == 0
    assert out.stat().st_size > 5000 and capsys.readouterr().out.strip() == str(out)
    out.write_text("")
    assert main([*words, "--force"]) == 0 and out.stat().st_size > 5000


def test_a_missing_extra_says_how_to_install_it(tmp_path):
    """In a process of its own, where tqdm cannot be imported."""
    code = "import sys; sys.modules['tqdm'] = None; from moe_aiter.cli import main; sys.exit(main(['train']))"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install '.[train]'" in done.stderr


WRONG = [
    ("MOE_AITER_BACKEND", "foo", "MOE_AITER_BACKEND is 'foo'; it takes auto, hopper, triton, host, torch"),
    ("MOE_AITER_DEBUG", "yes", "MOE_AITER_DEBUG is 'yes'; it takes 0 or 1"),
    ("AITER_CACHE_SIZE", "1 GB", "AITER_CACHE_SIZE is '1 GB'; it takes a whole number"),
    ("AITER_DEFAULT_PRECISION", "FP7", "AITER_DEFAULT_PRECISION is 'FP7'; it takes FP16, BF16, TF32, FP32"),
    ("MOE_AITER_BAKCEND", "torch", "unknown settings MOE_AITER_BAKCEND; known: "),
]


PROGRAM, SCRIPT = ["-c", "import moe_aiter"], ["./moe-aiter", "info"]
MODULES = ["-m", "moe_aiter.cli", "info"], ["-m", "moe_aiter", "info"]


@pytest.mark.parametrize(
    "how, variable, text, message",
    [(how, *WRONG[-1]) for how in (*MODULES, SCRIPT)] + [(PROGRAM, *wrong) for wrong in WRONG],
)
def test_a_wrong_setting_is_one_line_and_status_2(how, variable, text, message, tmp_path):
    """By the command, as a module and as installed, and by a program that imports the package."""
    (tmp_path / "moe-aiter").write_text("import sys\nfrom moe_aiter.cli import main\nsys.exit(main())\n")
    root = Path(__file__).parents[1]
    env = os.environ | {variable: text, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, *how], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"moe-aiter: error: {message}")


def test_a_program_can_catch_a_wrong_setting(tmp_path):
    """As a ValueError; other uncaught exceptions keep their traceback then."""
    code = "try:\n    import moe_aiter\nexcept ValueError as error:\n    print(error)\n1 / 0\n"
    env = os.environ | {"AITER_DEFAULT_PRECISION": "FP7", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "AITER_DEFAULT_PRECISION is 'FP7'; it takes FP16, BF16, TF32, FP32\n"
    assert done.returncode == 1 and done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    "error", [SettingError("f.csv, line 2: us is 'nan'"), BackendError("gemm: no host backend")], ids=str
)
def test_a_mistake_in_a_file_of_a_setting_is_one_line(error, monkeypatch, capsys):
    def read_it(args):
        raise error

    monkeypatch.setattr("moe_aiter.bench.main", read_it)
    err = one_line(capsys, "bench layer")
    assert err == f"moe-aiter bench: error: {error}\n"


def test_a_forced_backend_that_cannot_run_it_is_one_line(capsys):
    with use("hopper"):
        err = one_line(capsys, "bench layer", "--shape", "toy", "--reps", "1", "--device", "cpu")
    assert err.startswith("moe-aiter bench: error: route: no hopper backend for torch.float32 on cpu")
    assert err.endswith("; use() forces hopper\n")
