"""The script that runs other projects' tests, on a checkout that is written here."""

import pathlib
import subprocess
import sys

RUN = pathlib.Path(__file__).parent / "run.py"
TESTS = """
import pytest
import torch
import scattermoe
from scattermoe.mlp import MLP

scattermoe.kernels.ops.ALLOW_TF32 = False

@pytest.mark.parametrize("size", [8, 10**9])
def test_layer(size):
    layer = MLP(size, 16, 4, 2, activation=torch.nn.ReLU()).cuda()
    x = torch.randn(5, size, device="cuda")
    ids, weights = torch.randint(4, (5, 2)), torch.rand(5, 2)
    rows = []
    for t in range(5):
        rows.append(sum(
            weights[t, j] * (layer.output_experts.weight[e] @ (layer.experts.weight[e] @ x[t]).relu())
            for j, e in enumerate(ids[t].tolist())
        ))
    torch.testing.assert_close(layer(x, weights.cuda(), ids.cuda()), torch.stack(rows))

def test_wrong():
    assert torch.ones(2, device="cuda").sum() == 3, "no"

def test_skipped():
    pytest.skip("a reason")
"""


def run(*arguments):
    done = subprocess.run([sys.executable, RUN, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_checkout_is_counted(tmp_path):
    tests = tmp_path / "tests/test_mlp.py"
    tests.parent.mkdir()
    tests.write_text(TESTS)
    status, out, err = run(f"scattermoe={tmp_path}")
    assert status == 1, err
    assert "| scattermoe | tests/test_mlp.py | 1 | 1 | 2 | 0 |" in out.splitlines()
    assert "* tests/test_mlp.py: 1 skipped: a reason" in out
    assert "* tests/test_mlp.py: 1 failed: AssertionError: no" in out


def test_a_checkout_without_the_tests_fails(tmp_path):
    status, out, _ = run(f"grouped_gemm={tmp_path}")
    assert status == 1 and "the checkout has no such file" in out


def test_a_name_that_is_unknown_is_refused(tmp_path):
    status, _, err = run(f"unknown={tmp_path}")
    assert status == 2 and "NAME=PATH" in err and "Traceback" not in err
