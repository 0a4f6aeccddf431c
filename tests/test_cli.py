"""The command line: what it prints, and what it says to a mistake."""

import email.message
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from check import few

import moe_aiter
from moe_aiter import cli
from moe_aiter.cli import COMMANDS, main
from moe_aiter.config import VERSION, SettingError, Settings
from moe_aiter.op import BackendError, use

ROOT = Path(__file__).parents[1]


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


@pytest.mark.parametrize("words", few(["info", "tune --list"], "info"))
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


def one_line(capsys, command: str, *words: str) -> str:
    """The error of a command that is refused."""
    try:
        status = main([*command.split(), *words])
    except SystemExit as stop:
        status = stop.code
    err = capsys.readouterr().err
    assert status == 2 and err.count("\n") == 1 and err.startswith(f"moe-aiter {command.split()[0]}"), err
    return err


EXAMPLE = ["train", "sample", "plot", "report"]


def run_in(folder: Path, path: list[Path], *words: str) -> subprocess.CompletedProcess:
    """Run Python in a folder, with packages from `path`."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)


@pytest.fixture
def strangers(tmp_path):
    """A folder with examples of the same names, which write a file if they are imported."""
    for name in ("examples", "examples/language_model", "language_model"):
        (tmp_path / name).mkdir()
        for module in ("__init__", "command", "sample", "plots", "report"):
            (tmp_path / name / f"{module}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n")
    return tmp_path


def test_no_example_but_the_packages_own_is_imported(strangers):
    """Neither that of the working directory nor one on sys.path."""
    modules = [COMMANDS[name][0] for name in EXAMPLE]
    code = f"from moe_aiter.cli import imported\nfor m in {modules}: print(imported(m).__file__)"
    done = run_in(strangers, [strangers / "examples", strangers, ROOT], "-c", code)
    own = [f"{ROOT / 'examples'}/{module.replace('.', '/')}.py" for module in modules]
    assert done.stdout.splitlines() == own and not (strangers / "mark").exists()


@pytest.mark.parametrize("project", [None, "", '[project]\nname = "another"\n'], ids=str)
def test_an_installed_package_says_where_the_example_is(strangers, project):
    """A folder `examples` beside it belongs to others, such as a project with a copy of the package."""
    if project is not None:
        (strangers / "pyproject.toml").write_text(project)
    (strangers / "moe_aiter").mkdir()
    for path in (ROOT / "moe_aiter").glob("*.py"):
        shutil.copy(path, strangers / "moe_aiter")
    program = "-m", "moe_aiter.cli"
    for name in EXAMPLE:
        done = run_in(strangers, [strangers], *program, name, *(["--help"] if name == "train" else []))
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"moe-aiter {name}: error: an installed package does not contain this")
        assert "examples/language_model/" in done.stderr and "pip install -e '.[train]'" in done.stderr
    old = run_in(strangers, [strangers], "-c", "import moe_aiter.training")
    assert "ImportError: an installed package does not contain this example" in old.stderr
    listed = run_in(strangers, [strangers], *program, "--help").stdout
    assert all(name in listed for name in EXAMPLE) and not (strangers / "mark").exists()


@pytest.mark.parametrize("urls", [[], ["Changelog, https://x", "Source, https://example.org/moe_aiter"]])
def test_the_address_of_the_source(urls, monkeypatch):
    found = email.message.Message()
    for url in urls:
        found["Project-URL"] = url
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: found)
    assert cli.repository() == ("https://example.org/moe_aiter" if urls else "its repository")


def test_the_former_module_of_the_trainer_is_deprecated(strangers):
    """It leaves the name `language_model` to others."""
    code = "from moe_aiter.training.report import OF_LAYERS; import language_model, moe_aiter.training as t\n"
    code += "print(OF_LAYERS['entropy'], language_model.__file__, t.UsageError.__module__)"
    done = run_in(strangers, [strangers, ROOT], "-c", code)
    own = f"{strangers}/language_model/__init__.py moe_aiter.training"
    assert done.stdout == f"entropy of the load, over log E {own}\n"
    assert "moe_aiter.training is deprecated: use examples/language_model/" in done.stderr


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
    env = os.environ | {variable: text, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *how], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"moe-aiter: error: {message}")


def test_a_program_can_catch_a_wrong_setting(tmp_path):
    """As a ValueError; other uncaught exceptions keep their traceback then."""
    code = "try:\n    import moe_aiter\nexcept ValueError as error:\n    print(error)\n1 / 0\n"
    env = os.environ | {"AITER_DEFAULT_PRECISION": "FP7", "PYTHONPATH": str(ROOT)}
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


EVIL = "\x1b[31mEVIL\x1b]0;owned\x07\nmoe-aiter: ok"


@pytest.mark.parametrize(
    "words",
    [
        "report PATH", "report FOLDER", "sample PATH", "sample FOLDER", "train --preset PATH",
        "train --resume PATH", "train --resume FOLDER", "train --data PATH", "convert PATH new",
        "convert FOLDER new", "info --model PATH", "info --model FOLDER", "tune gemm --model PATH --out new",
        "tune gemm --model FOLDER --out new", "tune gemm --untuned FOLDER/untuned.csv --out new",
        "tune gemm 1x1x1 --out FOLDER/untuned.csv", "PATH",
    ],
)  # fmt: skip
def test_strangers_names_are_shown_without_commands_to_the_terminal(words, tmp_path, monkeypatch, capsys):
    """Of paths, and in files; `summary` does not take a line of a name for the error."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    config = {"model_type": EVIL, "hidden_size": EVIL, "data": [], EVIL: 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": EVIL}))
    (folder / "untuned.csv").write_text(f'"{EVIL}",M\n1,2\n')
    try:
        status = main([word.replace("FOLDER", "folder").replace("PATH", EVIL) for word in words.split()])
    except SystemExit as ended:
        status = ended.code
    err = capsys.readouterr().err
    (line,) = err.splitlines()
    assert status == 2 and line.startswith("moe-aiter") and line.isprintable(), err
    assert "moe-aiter: ok" not in line.split("EVIL")[0]


def test_a_summary_begins_as_the_error_does():
    assert cli.summary(ValueError(f"a.st has an unknown {EVIL}")) == (
        "ValueError: a.st has an unknown \\x1b[31mEVIL\\x1b]0;owned\\x07 ... moe-aiter: ok"
    )
    assert cli.summary(RuntimeError("first\n  second\n\n  third\n")) == "RuntimeError: first ... third"
    assert cli.summary(OSError(2, "No such file", f"a{EVIL}")).isprintable()
