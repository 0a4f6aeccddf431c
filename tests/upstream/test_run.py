"""The script that runs other projects' tests, on a checkout that is written here."""

import pathlib
import subprocess
import sys

import pytest
from check import few

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

WHAT_SHIMS_HAVE = {  # a test file of each project, written here
    "grouped_gemm": (
        "grouped_gemm/ops_test.py",
        """
import torch
from grouped_gemm import ops

def test_transposed_into():
    out = torch.full((2, 3, 4), 7.0)
    ops.backend.gmm(torch.ones(5, 3), torch.ones(5, 4), torch.tensor([0, 5]), trans_a=True, c=out)
    assert (out[0] == 0).all() and (out[1] == 5).all()
""",
    ),
    "aiter": (
        "op_tests/triton_tests/test_gmm.py",
        """
import torch
from aiter.ops.triton.gmm import gmm
from aiter.ops.triton.utils.gmm_common import gen_gmm_tensors

def test_tensors_of_the_helpers():
    lhs, rhs, (sizes,), out, _ = gen_gmm_tensors(3, 2, 4, 2, 1, unif_group_sizes=True)
    assert gmm(lhs, rhs, sizes, existing_out=out) is out and sizes.tolist() == [2, 1]
""",
    ),
    "flashinfer": (
        "tests/gemm/test_group_gemm.py",
        """
import flashinfer
import pytest
import torch
from flashinfer.utils import determine_gemm_backend

@pytest.mark.parametrize("batch_size", [2])
@pytest.mark.parametrize("num_rows_per_batch", [3])
@pytest.mark.parametrize("d_in, d_out", [(8, 4), (1024, 1024)])
@pytest.mark.parametrize("use_weight_indices", [True])
def test_segment_gemm(batch_size, num_rows_per_batch, d_in, d_out, use_weight_indices):
    backend = determine_gemm_backend(torch.device("cuda:0"))
    gemm = flashinfer.gemm.SegmentGEMMWrapper(torch.empty(0, dtype=torch.int8, device="cuda:0"), backend)
    x, weight = torch.ones(6, d_in), torch.ones(1, d_in, d_out).expand(1024, -1, -1)
    lengths, numbers = torch.tensor([3, 3]), torch.tensor([0, 1023])
    assert (gemm.run(x, weight, 2, False, seg_lens=lengths, weight_indices=numbers) == d_in).all()
""",
    ),
}
# what a checkout of AITER has beside its tests: an import that is not followed
BESIDE = {
    "op_tests/__init__.py": "",
    "op_tests/triton_tests/__init__.py": "import aiter.no_such_module",
}


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


@pytest.mark.parametrize("suite", few(WHAT_SHIMS_HAVE, "flashinfer"))
def test_a_shim_has_what_the_tests_use(tmp_path, suite):
    name, text = WHAT_SHIMS_HAVE[suite]
    for path, content in {**BESIDE, name: text}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    _, out, err = run(f"{suite}={tmp_path}")
    large = int(suite == "flashinfer")
    assert f"| {suite} | {name} | 1 | 0 | {large} | 0 |" in out.splitlines(), out + err


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "counts"),
    [("import no_such_package", "0 | 0 | 1 | 0"), ("import scattermoe.no", "0 | 1 | 0 | 0")],
)
def test_only_a_package_that_is_not_installed_is_a_reason_to_skip(tmp_path, line, counts):
    tests = tmp_path / "tests/test_mlp.py"
    tests.parent.mkdir()
    tests.write_text(line)
    status, out, err = run(f"scattermoe={tmp_path}")
    assert status == int(counts.startswith("0 | 1")), err
    assert f"| scattermoe | tests/test_mlp.py | {counts} |" in out.splitlines()
    assert f"the file cannot be imported: ModuleNotFoundError: No module named '{line.split()[1]}'" in out


def test_a_checkout_without_the_tests_fails(tmp_path):
    status, out, _ = run(f"grouped_gemm={tmp_path}")
    assert status == 1 and "the checkout has no such file" in out


def test_a_name_that_is_unknown_is_refused(tmp_path):
    status, _, err = run(f"unknown={tmp_path}")
    assert status == 2 and "NAME=PATH" in err and "Traceback" not in err
