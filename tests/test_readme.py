"""The documents run as printed, and what docs/settings.md says is what they are."""

import dataclasses
import importlib
import os
import pathlib
import pkgutil
import re
import shlex
import subprocess
import sys

import forked
import pytest
import torch
from forked import environment

import moe_aiter
from benchmarks import __main__ as benchmarks
from moe_aiter.bench.command import Command
from moe_aiter.cli import COMMANDS, main
from moe_aiter.config import PREFIX, Settings

ROOT = pathlib.Path(__file__).parent.parent
STUBS = ROOT / "tests" / "upstream" / "stubs"
SETTINGS = ROOT / "docs" / "settings.md"
DOCUMENTS = ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))
ALONE = [d for d in DOCUMENTS if not d.name.startswith("tutorial_")]  # others: test_tutorials.py
BLOCKS = [b for d in ALONE for b in re.findall(r"^```(\w*)\n(.*?)^```", d.read_text(), re.S | re.M)]
PAGES = *DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"
SCRIPTS = sorted([*ROOT.glob("examples/*.py"), ROOT / "docs" / "screenshots.py"])
INDENTED = r"^    ((?:moe-aiter|make|python) .*)"
INLINE = r"`((?:moe-aiter|python -m benchmarks) [^`]*--[^`]*|make [^`]*)`"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"


def blocks(language):
    found = [code for name, code in BLOCKS if name == language]
    return pytest.mark.parametrize("code", found, ids=[code.strip().splitlines()[-1] for code in found])


def test_every_block_is_run():
    assert {language for language, _ in BLOCKS} == {"python", "bash"}


@blocks("python")
def test_python(code, tmp_path):
    if "import transformers" in code or "from transformers" in code:
        pytest.importorskip("transformers", reason="transformers is not installed")
    if "DistributedConfig" in code and torch.accelerator.current_accelerator() is not None:
        pytest.skip("transformers uses the accelerator, with one rank on each")
    if "LiveTable" in code:
        pytest.importorskip("rich", reason="rich is not installed")
    if "from peft" in code:
        pytest.importorskip("peft", reason="PEFT is not installed")
    for stub in STUBS.iterdir():  # of a package that few have installed: found before that
        if re.search(rf"^(from|import) {stub.stem}\b", code, re.M):
            (tmp_path / stub.name).symlink_to(stub)
    block = tmp_path / "block.py"
    block.write_text(code)
    if "init_process_group" in code:  # on CPUs: there may be a single GPU
        done = forked.run(block, cwd=tmp_path, ranks=2, CUDA_VISIBLE_DEVICES="")
    else:
        done = forked.run(block, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("end, status", [("", 0), ("raise SystemExit", 0), ("exit(3)", 3), ("1 / 0", 1)])
def test_a_rank_ends_before_its_objects_are_freed(end, status, tmp_path):
    """Else the block with DistributedDataParallel hangs now and then: see forked.become."""
    block = tmp_path / "block.py"
    block.write_text("import weakref\nmodel = {1}\nweakref.finalize(model, print, 'freed')\n" + end)
    done = forked.run(block, cwd=tmp_path, ranks=1)
    assert (done.returncode, done.stdout) == (status, "")


@blocks("bash")
def test_bash(code, tmp_path):
    """Each line.  But `make` only says what it would do: CI runs `make test`, `make train` takes minutes.

    What `make train` runs is tested in examples/language_model/tests.
    """
    command = tmp_path / "moe-aiter"  # what installing the package puts on the path
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m moe_aiter.cli "$@"\n')
    command.chmod(0o755)
    env = environment() | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    for line in code.splitlines():
        is_make = line.startswith("make ")
        line = line.replace("make ", "make --dry-run ", 1) if is_make else line
        cwd = ROOT if is_make else tmp_path
        done = subprocess.run(["bash", "-c", line], cwd=cwd, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def commands():
    """Those outside of blocks: in indented lines, in sentences, and in the help of both programs."""
    found = [f"moe-aiter {name}{example}" for name, (_, _, example) in COMMANDS.items() if example]
    found += [f"python -m benchmarks {name}{text}" for name, (*_, text) in benchmarks.COMMANDS.items()]
    for path in (*PAGES, *SCRIPTS):
        found += re.findall(INDENTED, path.read_text(), re.M)
    for path in PAGES:
        found += re.findall(INLINE, path.read_text())
    return sorted({" ".join(shlex.split(command, comments=True)) for command in found})


@pytest.mark.parametrize("command", commands())
def test_a_command_has_the_arguments_of_its_program(command, monkeypatch):
    program, *words = command.split()
    if program == "moe-aiter":
        module = importlib.import_module(COMMANDS[words[0]][0])
        monkeypatch.setattr(module, "main", lambda args: 0)
        assert main(words) == 0
    elif words[:2] == ["-m", "benchmarks"]:
        found = pkgutil.resolve_name(benchmarks.COMMANDS[words[2]][0])
        monkeypatch.setattr(Command if isinstance(found, Command) else found, "main", lambda *_: 0)
        assert benchmarks.main(words[2:]) == 0
    elif program == "make":
        command = ["make", "--dry-run", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    else:
        source = (ROOT / words[0]).read_text()
        assert all(f'"{word}"' in source for word in words if word.startswith("--"))


def test_screenshots_need_a_browser():
    script = ROOT / "docs" / "screenshots.py"
    done = subprocess.run([sys.executable, script], env={"PATH": ""}, text=True, capture_output=True)
    assert done.returncode == 2 and "no browser on PATH: install one of chromium" in done.stderr


def test_make_passes_the_flags_on():
    line = 'make --dry-run train ARGS="--steps 10 --resume"'
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment(), text=True, capture_output=True)
    assert "-m moe_aiter.cli train --steps 10 --resume\n" in done.stdout
    launched = "-m torch.distributed.run --standalone --nproc-per-node 4 -m -- moe_aiter.cli train \n"
    for number in ("", "1", "4"):
        command = ["make", "--dry-run", "train", f"NPROC={number}"]
        done = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True)
        assert (launched in done.stdout) == (number == "4") and "moe_aiter.cli train \n" in done.stdout


def test_make_without_an_environment_installs_nothing():
    command = ["make", "--dry-run", "test-gpu", "VENV=", "PYTHON=python-at-hand"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True)
    assert "python-at-hand setup.py -q build_ext --inplace" in done.stdout
    assert "python-at-hand -m pytest" in done.stdout
    assert "pip" not in done.stdout and "venv" not in done.stdout


def settings_table():
    """From the fields of Settings and the comments behind them."""
    source = (ROOT / "moe_aiter" / "config.py").read_text()
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(Settings):
        meaning = re.search(rf"^    {field.name}: .*  # (.*)$", source, re.M)[1]
        default = int(field.default) if field.type is bool else field.default
        default = "none" if default == "" else f"`{default}`"
        lines.append(f"| `{PREFIX}{field.name.upper()}` | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def test_the_settings_table_is_that_of_settings():
    text = SETTINGS.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == settings_table()


def test_documents_are_short_and_link_to_what_is_there():
    for path in (ROOT / "CONTRIBUTING.md", *DOCUMENTS):
        text, cap = path.read_text(), 150 if path.parent == ROOT else 250
        written = re.sub(r"<!-- bench: begin -->.*<!-- bench: end -->", "", text, flags=re.DOTALL)
        assert len(written.splitlines()) <= cap, f"{path.name}, without the tables, which a command writes"
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_every_public_name_is_in_the_reference():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(r"^::: moe_aiter\.(\w+)$", pages, re.M)
    assert sorted(named) == sorted(set(moe_aiter.__all__) - {"__version__"})


@pytest.mark.parametrize(
    "path", ["moe_aiter/config.py", "moe_aiter/op.py", "tests/shapes.py", "tests/check.py"]
)
def test_contributing_names_what_is_there(path):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert (ROOT / path).exists() and path.removeprefix("moe_aiter/") in text
