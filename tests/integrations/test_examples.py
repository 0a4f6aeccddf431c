"""The examples run, and what they train learns."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
SMALL = {"hidden": 64, "num-experts": 4, "top-k": 2, "layers": 1, "sequence": 32, "batch": 4, "steps": 24}


def run(*flags):
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    sizes = [f"--{name}={value}" for name, value in SMALL.items()]
    command = [sys.executable, ROOT / "examples" / "hf_finetune.py", *sizes, *flags]
    return subprocess.run(command, env=env, text=True, capture_output=True)


@pytest.mark.parametrize("experts", ["moe_aiter", "grouped_mm", "eager"])
def test_hf_finetune(experts):
    pytest.importorskip("transformers", reason="transformers is not installed")
    done = run("--experts", experts)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] - 0.5
    assert re.search(r"step 24: loss [\d.]+, [\d.]+ steps/s", done.stdout)


def test_hf_finetune_on_a_text(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    text = tmp_path / "text.txt"
    text.write_text("abc" * 100)
    assert run("--text", text).returncode == 0
    text.write_text("abc")
    done = run("--text", text)
    assert done.returncode and "the text has 3 bytes, but a sequence needs 33" in done.stderr


@pytest.mark.parametrize(
    "flag, said",
    [("--text=none.txt", "no file none.txt"), ("--top-k=9", "num-experts"), ("--steps=0", "step")],
)
def test_a_mistake_is_one_line(flag, said):
    pytest.importorskip("transformers", reason="transformers is not installed")
    done = run(flag)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
