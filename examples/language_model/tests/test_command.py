"""What `moe-aiter train` and `report` refuse, in one line and with status 2."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import one_line

from moe_aiter.cli import main

pytestmark = pytest.mark.full


def test_a_mistake_is_one_line_and_status_2(capsys, tmp_path):
    assert main(["train", "--preset", "test", "--data", str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-aiter train: error: --data") and err.count("\n") == 1
    assert main(["report", str(tmp_path)]) == 2
    assert "neither a run folder nor a metrics file" in capsys.readouterr().err


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
    for module in ("tqdm", "safetensors", "plotly"):
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
        ("good.jsonl --out old.html", "old.html is there already: --force replaces it, --out names another"),
        ("good.jsonl --out old.html --force --out dir", "dir is there already: --out names another"),
        ("good.jsonl --out nowhere/x.html", "nowhere/x.html: No such file or directory"),
    ],
)
def test_report_refuses(words, message, capsys, tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    for name, rows in {"good": '{"step": 1, "loss": 3}\n', "empty": "", "damaged": "x\ny\n"}.items():
        (tmp_path / f"{name}.jsonl").write_text(rows)
    (tmp_path / "old.html").write_text("mine")
    (tmp_path / "dir").mkdir()
    assert message in one_line(capsys, "report", *words.split())
    assert (tmp_path / "old.html").read_text() == "mine"


def test_plot_names_the_command_that_replaces_it(capsys):
    assert "moe-aiter report RUN [RUN ...] replaces it" in one_line(
        capsys, "plot", "a", "b", "--out", "c.png"
    )


def test_a_missing_extra_says_how_to_install_it(tmp_path):
    """In a process of its own, where tqdm cannot be imported."""
    code = "import sys; sys.modules['tqdm'] = None; from moe_aiter.cli import main; sys.exit(main(['train']))"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install '.[train]'" in done.stderr
