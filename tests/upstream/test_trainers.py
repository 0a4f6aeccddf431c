"""trainers.py with its stubs: each trainer's own way to our experts, beside eager ones; and its table."""

import csv
import functools
import importlib
import json
import pathlib
import subprocess
import tempfile

import forked
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from upstream import trainers

SCRIPT = pathlib.Path(trainers.__file__)
TRAINERS = ["axolotl", "ms_swift", "verl", "trl", "llamafactory", "lightning", "accelerate", "deepspeed"]
TRAINERS += ["prime_rl"]


@functools.cache
def rows():
    """What is printed and what is written."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "results.csv")
        how = ["--stubs", "--json", "--out", out, "--why", "newest", "--commit", "abc"]
        done = forked.run(SCRIPT, *TRAINERS, *how)
        assert done.returncode in (0, 1), done.stderr
        return json.loads(done.stdout), list(csv.DictReader(out.read_text().splitlines()))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trains_as_with_eager_experts(trainer):
    found = rows()[0][TRAINERS.index(trainer)]
    assert float(found["float32"]) < 1e-5 and 0 < float(found["bfloat16"]) < 1e-3
    assert found["result"] == "equal" and found["scenario"]


def test_the_rows_are_written():
    printed, written = rows()
    assert printed == written
    assert list(written[0]) == trainers.FIELDS
    assert {(row["why"], row["commit"]) for row in written} == {("newest", "abc")}
    versions = {row["package"]: row["version"] for row in written}
    assert versions["ms-swift"] == "stub" and versions["accelerate"] != "stub"  # which has none


def failing(folder):
    raise KeyError("a name\nand more")


@pytest.mark.parametrize(
    "run, result, good",
    [
        (lambda how, folder: {"float32": 1e-6, "bfloat16": 1e-4}, "equal", True),
        (lambda how, folder: {"float32": 1e-6, "bfloat16": 2e-3}, "differs", False),
        (lambda how, folder: failing(folder), "could not run: KeyError: 'a name\\nand more'", False),
        (lambda how, folder: {"result": "7 passed, 2 deselected"}, "7 passed, 2 deselected", True),
        (lambda how, folder: {"result": "1 failed, 7 passed"}, "1 failed, 7 passed", False),
    ],
)
def test_results(run, result, good, monkeypatch):
    monkeypatch.setitem(trainers.RUNS, "trl", (run, None))
    assert trainers.result_of("trl")["result"] == result
    assert trainers.is_good(result) == good


@pytest.mark.parametrize(
    "text, result",
    [
        ("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip()", "1 passed, 1 skipped"),
        ("def test_a(): assert 0", "1 failed"),
        ("import no_such_package", "1 error"),
    ],
)
def test_tests_are_counted(text, result, tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text(text)
    assert trainers.run_tests([str(path)], "") == {"result": result}


def row(**cells):
    return dict.fromkeys(trainers.FIELDS, "") | {"package": "trl", "why": "newest", "result": "equal"} | cells


def test_a_newer_row_replaces_one_with_the_same_reason():
    found = [row(package="peft"), row(version="1.0"), row(version="0.9", why="oldest"), row(version="1.1")]
    lines = trainers.table_of(found).splitlines()
    assert [line.split(" | ")[:4] for line in lines[2:]] == [
        ["| trl", "1.1", "newest", "equal"],
        ["| trl", "0.9", "oldest", "equal"],
        ["| peft", "–", "newest", "equal"],
    ]


def test_the_page_has_the_table_of_the_csv():
    text = trainers.PAGE.read_text()
    assert trainers.page(text, trainers.CSV) == text, "run `tests/upstream/environments.py --page`"


@pytest.mark.parametrize("script", ["trainers", "environments"])
def test_a_name_that_is_unknown_is_an_error(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    module = importlib.import_module(script)
    monkeypatch.setattr("sys.argv", [script, "pefft"])
    with pytest.raises(SystemExit) as error:
        module.main()
    assert error.value.code == 2 and "unknown package 'pefft'; known: axolotl," in capsys.readouterr().err
    assert module.known("ms-swift") == "ms_swift"


WANTED = ["transformers==5.7.0", "prime-rl@git+https://host/repository@0123456789abcdef"]


@pytest.mark.parametrize(
    "ends, error, result",
    [
        ([0, 1], "WARNING: a\nERROR: Ignored the following\nERROR: no\nERROR: see help\n", "no"),
        ([0, 0, 1], "Traceback\nImportError: no such name\n", "ImportError: no such name"),
    ],
    ids=["pip fails", "an import fails"],
)
def test_what_cannot_be_run_has_a_row(ends, error, result, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    environments = importlib.import_module("environments")
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, ends[len(commands) - 1], "", error)

    monkeypatch.setattr(environments.subprocess, "run", run)
    out = tmp_path / "results.csv"
    assert environments.run(["prime_rl"], "main branch", WANTED, out, "abc") == (len(ends) == 3)
    (found,) = csv.DictReader(out.read_text().splitlines())
    assert commands[1][-2:] == WANTED and len(commands) == len(ends)
    assert (found["package"], found["version"], found["commit"]) == ("prime-rl", "0123456789ab", "abc")
    assert found["result"] == f"could not run: {result}"
