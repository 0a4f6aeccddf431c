"""AITER's tuned_gemm: its names, its files, and the page's patch as it is printed."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tuned import HEAD, rows_for, tuned_files

from moe_aiter.compat.aiter import tuned_gemm as door
from moe_aiter.compat.aiter.ops.shuffle import shuffle_weight
from moe_aiter.compat.aiter.tuned_gemm import TunedGemm, gemm_a16w16, get_GEMM_A16W16_config, tgemm
from moe_aiter.switches import set_default_precision
from moe_aiter.tuning import aiter_csv
from moe_aiter.tuning.aiter_csv import Device, this_device

files = pytest.fixture(tuned_files)
CSV = """cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw
304,64,4096,4096,0,bf16,bf16,0,0,ASM,0,0,10.2,asm_kernel,0.001,180.5,1200
304,128,4096,4096,0,bf16,bf16,0,0,hipBLASLt,3,0,18.1,hipblaslt_kernel,0.001,385.2,2100
"""  # noqa: E501


@pytest.fixture
def as_mi300(monkeypatch):
    """Rows are looked up as on the GPU of the page."""
    device = Device("gfx942", 304)
    monkeypatch.setattr("moe_aiter.kernels.dense.tuned_gemm.this_device", lambda _: device)


# the page


PATCH = """
from moe_aiter.compat.aiter.tuned_gemm import gemm_a16w16
import torch.nn as nn
import torch.nn.functional as F

_original_linear_forward = nn.Linear.forward

def _patched_forward(self, x):
    if x.dtype in (torch.bfloat16, torch.float16) and self.weight.dtype == x.dtype:
        try:
            return gemm_a16w16(x, self.weight, bias=self.bias, otype=x.dtype)
        except Exception:
            pass
    return _original_linear_forward(self, x)

nn.Linear.forward = _patched_forward
"""


def run(code, **names):
    names = {"torch": torch, "nn": nn, "F": F} | names
    exec(code, names)
    return names


def test_the_page_s_patch(device, monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)  # put back at the end
    one = nn.Linear(64, 32, device=device, dtype=torch.bfloat16)
    x = torch.randn(5, 64, device=device).bfloat16().requires_grad_()
    expected = one(x)
    expected.sum().backward()
    want, x.grad, one.weight.grad = (x.grad, one.weight.grad), None, None
    run(PATCH)
    out = one(x)
    out.sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close((x.grad, one.weight.grad), want)


def test_the_page_s_file_is_followed(files, as_mi300, caplog):
    files(CSV)
    files.set_to("log_tuned_config", True)
    expected = {"libtype": "asm", "solidx": 0, "splitK": 0, "us": 10.2, "kernelName": "asm_kernel"}
    config = get_GEMM_A16W16_config(64, 4096, 4096, False, torch.bfloat16, torch.bfloat16)
    assert config.items() >= expected.items()
    assert get_GEMM_A16W16_config(128, 4096, 4096, 0, "torch.bfloat16", "bf16")["libtype"] == "hipblaslt"
    # 50 rows are padded to 64
    assert get_GEMM_A16W16_config(50, 4096, 4096, False, "bf16", "bf16")["kernelName"] == "asm_kernel"
    with caplog.at_level("INFO", "moe_aiter"):
        gemm_a16w16(torch.zeros(64, 4096).bfloat16(), torch.zeros(4096, 4096).bfloat16())
    assert any("the row of M=64 says asm, torch multiplies" in message for message in caplog.messages)


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"AITER_CONFIG_GEMM_BF16": "{0}"}, marks=pytest.mark.full),
        {"MOE_AITER_CONFIG_GEMM_BF16": "{0}", "AITER_CONFIG_GEMM_BF16": "nowhere.csv:else.csv"},
    ],
)
def test_the_environment_names_the_files(tmp_path, variables):
    path = tmp_path / "tuned.csv"
    path.write_text(HEAD + rows_for(torch.device("cpu"), "torch", M=5))
    code = (
        "import torch; from moe_aiter.compat.aiter.tuned_gemm import *\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        "print(get_GEMM_A16W16_config(5, 16, 32, False, torch.float32, torch.float32)['kernelName'])\n"
        "gemm_a16w16(torch.ones(5, 32), torch.ones(16, 32))"
    )
    env = os.environ | {name: text.format(path) for name, text in variables.items()}
    env |= {"AITER_LOG_TUNED_CONFIG": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "kernel\n", done.stderr
    assert "the row of M=5 says torch, torch multiplies" in done.stderr


# the names


def test_get_config_is_the_callers_own_and_cached(files):
    device = aiter_csv.current_device()
    files(rows_for(device, "triton", M=5))
    first = get_GEMM_A16W16_config(5, 16, 32, False, torch.float32, torch.float32)
    first["libtype"] = "mine"
    assert get_GEMM_A16W16_config(5, 16, 32, False, torch.float32, torch.float32)["libtype"] == "triton"
    assert get_GEMM_A16W16_config.cache_info().hits == 1
    default = get_GEMM_A16W16_config(5, 16, 32, False, torch.float32, torch.float32, True, True)
    usual = "torch" if device.type == "cpu" else "triton"  # of a shuffled weight
    assert default == {"libtype": usual, "solidx": 0, "splitK": 0, "kernelName": ""}
    assert this_device(device).units >= 1


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="otype is 'bf17'; it takes bfloat16"):
        get_GEMM_A16W16_config(5, 16, 32, False, "bf16", "bf17")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("otype", [None, torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m, n, k", [(128, 32, 512), (64, 256, 320), (3, 1, 1024), (16, 40, 256)])
@pytest.mark.pairwise
def test_aiters_own_cases(device, files, dtype, otype, bias, m, n, k):
    files("")
    x, w = torch.randn(m, k).to(device, dtype), torch.randn(n, k).to(device, dtype)
    b = torch.rand(n).to(device, dtype) if bias else None
    out = gemm_a16w16(x, w, b, otype)
    assert out.dtype == (otype or dtype)
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2 * k**0.5)


def test_mm_is_the_same(files):
    files("")
    x, w, b = torch.randn(5, 32), torch.randn(16, 32), torch.randn(16)
    assert isinstance(tgemm, TunedGemm) and tgemm is door.tgemm
    for args in ((x, w), (x, w, b), (x, w, b, torch.float64), (x, w, b, None, torch.tensor(2.0), None, None)):
        assert torch.equal(tgemm.mm(*args), gemm_a16w16(*args))
    scaled = gemm_a16w16(
        x, w, b, scale_a=torch.tensor([2.0]), scale_b=torch.tensor(0.5), scale_c=torch.tensor(3.0)
    )
    torch.testing.assert_close(scaled, 3 * F.linear(x, w, b))


def test_a_shuffled_weight_says_so_or_the_caller_does(files):
    files("")
    x, w = torch.randn(5, 64), torch.randn(32, 64)
    s = shuffle_weight(w)
    torch.testing.assert_close(gemm_a16w16(x, s), F.linear(x, w))
    torch.testing.assert_close(gemm_a16w16(x, s.clone(), is_shuffled=True), F.linear(x, w))


def test_the_default_precision_counts(files):
    files("")
    x, w = torch.randn(5, 64), torch.randn(32, 64)
    set_default_precision("BF16")
    try:
        out = gemm_a16w16(x, w)
    finally:
        set_default_precision(None)
    assert torch.equal(out, F.linear(x.bfloat16(), w.bfloat16()).float())


def test_all_of_its_names_are_at_aiters_path():
    module = importlib.import_module("moe_aiter.compat.aiter.tuned_gemm")
    names = {"TunedGemm", "gemm_a16w16", "gemm_a8w8", "get_GEMM_A16W16_config", "tgemm"}
    assert set(module.__all__) == names and all(hasattr(module, name) for name in names)
    assert module.gemm_a8w8 is importlib.import_module("moe_aiter.compat.aiter").gemm_a8w8


@pytest.mark.gpu
def test_it_is_captured_in_a_cuda_graph(files, no_debug):
    files("")
    x, w = (torch.randn(*s, device="cuda").bfloat16() for s in ((64, 256), (128, 256)))
    gemm_a16w16(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemm_a16w16(x, w)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(out, F.linear(x, w), rtol=2e-2, atol=2e-2)
