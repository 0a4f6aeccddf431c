"""The command line: what it prints, and what it says to a mistake."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_aiter.cli import COMMANDS, main
from moe_aiter.config import Settings


def test_info_names_versions_backends_and_every_setting(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out and "triton" in out and "host (C++)" in out
    for field in Settings.__dataclass_fields__:
        assert f"MOE_AITER_{field.upper()}" in out


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("command", ["train", "plot", "bench"])
def test_help_of_a_command(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "--" in capsys.readouterr().out


def test_no_command_and_unknown_flags_are_errors(capsys):
    for argv in ([], ["paint"], ["train", "--no-such-flag"]):
        with pytest.raises(SystemExit, match="2"):
            main(argv)
    assert "--no-such-flag" in capsys.readouterr().err


def test_a_mistake_is_one_line_and_status_2(capsys, tmp_path):
    assert main(["train", "--preset", "test", "--data", str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-aiter train: error: --data") and err.count("\n") == 1
    assert main(["plot", str(tmp_path)]) == 2
    assert "neither a run folder nor a metrics file" in capsys.readouterr().err


def test_plot_draws_several_runs(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    rows = '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2, "val_loss": 2}\n'
    for name in ("moe", "dense"):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    out = tmp_path / "both.png"
    assert main(["plot", str(tmp_path / "moe.jsonl"), str(tmp_path / "dense.jsonl"), "--out", str(out)]) == 0
    assert out.stat().st_size > 5000 and capsys.readouterr().out.strip() == str(out)


def test_a_missing_extra_says_how_to_install_it(tmp_path):
    """In a process of its own, where tqdm cannot be imported."""
    code = "import sys; sys.modules['tqdm'] = None; from moe_aiter.cli import main; sys.exit(main(['train']))"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install moe-aiter[train]" in done.stderr
