"""Which kernel attention takes: it says so, and refuses what the one that is asked for cannot do."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from moe_aiter.layers.attention import attention, attention_backend, logged, simple
from moe_aiter.switches import enable_fusion, enable_tensor_cores

from ..check import assert_as_good_as_torch, with_gradients

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
gpu = pytest.mark.gpu


def make(B=2, Hq=4, Hk=4, Sq=5, Sk=5, D=8, Dv=None, dtype=F32, device="cpu"):
    shapes = (B, Hq, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv or D)
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def test_on_a_cpu_torch_chooses_and_it_is_said_what():
    q, k, v = make()
    assert attention_backend(q, k, v) == "sdpa: flash"
    assert attention_backend(q, k, v, is_causal=True) == "sdpa: flash"
    assert attention_backend(q, k, v, dropout_p=0.1) == "sdpa: math"
    assert attention_backend(*make(Dv=12)) == "sdpa: math"
    assert attention_backend(q, k, v, backend="math") == "math"
    assert attention_backend(q, k, v, backend="flash") == "flash"
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_backend(q, k, v) == "sdpa: math"


def test_flash_on_a_cpu_is_torchs():
    q, k, v = make(Hk=2, Sq=3, Sk=7)
    mask = torch.rand(2, 7) > 0.3
    for options in ({}, {"is_causal": True}, {"window": (2, 1)}, {"mask": mask}):
        assert attention_backend(q, k, v, backend="flash", **options) == "flash"
        expected = attention(q, k, v, backend="math", **options)
        torch.testing.assert_close(attention(q, k, v, backend="flash", **options), expected)
    for wrong in ({"dropout_p": 0.5}, {"mask": torch.randn(2, 4, 3, 7, requires_grad=True)}):
        with pytest.raises(ValueError, match="backend 'flash' has on a CPU no dropout"):
            attention(q, k, v, backend="flash", **wrong)
    with pytest.raises(ValueError, match="no v of another head size"):
        attention(*make(Dv=12), backend="flash")


def test_without_fusion_or_tensor_cores_it_is_separate_steps():
    q, k, v = make()
    for switch in (enable_fusion, enable_tensor_cores):
        try:
            switch(False)
            assert attention_backend(q, k, v) == "math"
            assert attention_backend(q, k, v, backend="sdpa") == "sdpa: flash"
        finally:
            switch(True)
        assert attention_backend(q, k, v) == "sdpa: flash"


def test_a_call_that_is_known_is_torchs_as_it_comes():
    q, k, v = make(Hk=2)
    for options in ({}, {"is_causal": True}, {"window": [9, 9]}):
        first = attention(q, k, v, scale=0.5, **options)
        again = attention(q, k, v, scale=0.5, **options)
        assert torch.equal(first, again)
        assert not torch.equal(again, attention(q, k, v, scale=0.7, **options))
        assert simple
    with pytest.raises(ValueError, match="dropout_p"):
        attention(q, k, v, dropout_p=-1.0)
    with pytest.raises(TypeError, match=r"q is torch.float32 but v is torch.float16"):
        attention(q, k, v.half())
    with torch.autocast("cpu", BF16):
        assert attention(q, k, v).dtype == BF16
    try:
        enable_fusion(False)
        steps = attention(q, k, v, scale=0.5)
    finally:
        enable_fusion(True)
    torch.testing.assert_close(steps, attention(q, k, v, scale=0.5))


def test_the_log_names_the_kernel_of_a_call_once(caplog):
    q, k, v = make(Sq=11, Sk=13)
    logged.clear()
    with caplog.at_level(logging.INFO, "moe_aiter"):
        attention(q, k, v)
        attention(q, k, v)
        attention(q, k, v, window=(3, 3))
        attention(q, k, v, backend="math")
    lines = [record.message.rpartition(": ")[2] for record in caplog.records]
    assert lines == ["flash", "flash", "math"]
    assert "q (2, 4, 11, 8), k (2, 4, 13, 8), torch.float32 on cpu: sdpa: flash" in caplog.text


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"backend": "cudnn"}, ValueError, "unknown backend 'cudnn'; known: auto, flash, sdpa, math"),
        ({"q": torch.zeros(5, 8)}, ValueError, r"q must be \(B, Hq, Sq, D\)"),
        ({"k": torch.zeros(3, 4, 5, 8)}, ValueError, r"q is \(B=2, Hq, Sq, D\) but k is \(B=3, Hk, Sk, D\)"),
        ({"k": torch.zeros(2, 4, 5, 9)}, ValueError, r"q is \(B, Hq, Sq, D=8\) but k is \(B, Hk, Sk, D=9\)"),
        (
            {"v": torch.zeros(2, 4, 6, 8)},
            ValueError,
            r"k is \(B, Hk, Sk=5, D\) but v is \(B, Hk, Sk=6, Dv\)",
        ),
        ({"q": torch.zeros(2, 6, 5, 8)}, ValueError, "q has 6 heads, which 4 of k do not divide"),
        ({"k": torch.zeros(2, 4, 5, 8).half()}, TypeError, "q is torch.float32 but k is torch.float16"),
        ({"q": torch.zeros(2, 4, 5, 8).int()}, TypeError, "q must be float16, bfloat16"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p must be from 0 to below 1, not 1.5"),
        ({"window": (-2, 0)}, ValueError, r"window is \(-2, 0\)"),
        ({"mask": torch.ones(5)}, ValueError, r"mask must be a tensor \(B, Sk\)"),
        ({"mask": [True]}, ValueError, "but it is list"),
        ({"mask": torch.ones(2, 6)}, ValueError, r"mask is \(2, 6\) but q and k are \(B=2, Sk=5\)"),
        ({"mask": torch.ones(5, 5)}, ValueError, r"mask is \(5, 5\) but q and k are \(B=2, Sk=5\)"),
        ({"mask": torch.ones(2, 3, 5, 5)}, ValueError, r"\(B=2, Hq=4, Sq=5, Sk=5\)"),
        ({"mask": torch.ones(2, 5) * 1j}, TypeError, "mask must be of bool, integers or floats"),
        ({"mask": torch.ones(2, 5, device="meta")}, ValueError, "q is on cpu but mask is on meta"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused(change, error, message):
    arguments = dict(zip("qkv", make(), strict=True)) | change
    for function in (attention, attention_backend):
        with pytest.raises(error, match=message):
            function(**arguments)


# on a GPU


def cuda(**sizes):
    return make(**sizes, device="cuda")


def behind(Sq, Sk):
    return torch.arange(Sk, device="cuda") - torch.arange(Sk - Sq, Sk, device="cuda")[:, None]


@gpu
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("D", [64, 80, 100, 128, 256])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"window": (100, 7)}, {"is_causal": True, "window": (60, 0)}]
)
@pytest.mark.parametrize("lengths", [(130, 515), (257, 257), (300, 100), (1, 700)])
@pytest.mark.pairwise
def test_flash_on_a_gpu(dtype, D, heads, options, lengths):
    Sq, Sk = lengths
    q, k, v = cuda(B=2, Hq=heads[0], Hk=heads[1], Sq=Sq, Sk=Sk, D=D, dtype=dtype)
    left, right = options.get("window", (-1, -1))
    right = 0 if options.get("is_causal") else right
    off = behind(Sq, Sk)
    shown = ((left < 0) | (-off <= left)) & ((right < 0) | (off <= right))

    def torchs(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True)
        return out.masked_fill(~shown.any(1)[:, None], 0)

    def ours(q, k, v):
        return attention(q, k, v, backend="flash", **options)

    assert_as_good_as_torch(with_gradients(ours), with_gradients(torchs), q, k, v, floor=2e-6)


@gpu
def test_auto_takes_flash_for_what_torch_would_want_a_mask_of_all_pairs_for():
    for dtype in (F16, BF16):
        q, k, v = cuda(Hk=2, Sq=64, Sk=128, D=64, dtype=dtype)
        assert attention_backend(q, k, v, is_causal=True) == "flash"
        assert attention_backend(q, q, q, window=(9, 0)) == "flash"
        assert attention_backend(q, k, v, is_causal=True, mask=torch.ones(2, 128).cuda()).startswith("sdpa")
        assert attention_backend(q, q, q, is_causal=True).startswith("sdpa: ")
    assert attention_backend(*cuda(Sq=64, Sk=128), is_causal=True).startswith("sdpa")


@gpu
@pytest.mark.parametrize(
    "sizes, options, message",
    [
        ({}, {}, "takes float16 and bfloat16 on a GPU, not torch.float32"),
        ({"dtype": F16, "D": 264}, {}, "takes head sizes .* at most 256, not 264 and 264"),
        ({"dtype": F16, "Dv": 16}, {}, "takes head sizes that are equal and .*, not 8 and 16"),
        ({"dtype": F16}, {"mask": True}, "takes no mask on a GPU"),
    ],
)
def test_flash_refuses_on_a_gpu_what_it_cannot_do(sizes, options, message):
    if options:
        options = {"mask": torch.ones(2, 5, device="cuda")}
    with pytest.raises(ValueError, match=f"backend 'flash' {message}"):
        attention(*cuda(**sizes), backend="flash", **options)


@gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_decoding_with_shared_heads_repeats_none(dtype):
    """The keys and values of 32 query heads would be 4 times as much memory as those of 8."""
    q, k, v = cuda(B=4, Hq=32, Hk=8, Sq=1, Sk=8192, D=64, dtype=dtype)
    for mask in (None, torch.rand(4, 8192, device="cuda") > 0.5):
        attention(q, k, v, mask, is_causal=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attention(q, k, v, mask, is_causal=True)
        assert torch.cuda.max_memory_allocated() - before < k.nbytes
        best = attention(q.double(), k.double(), v.double(), mask, is_causal=True, backend="math")
        torch.testing.assert_close(out.double(), best, rtol=1e-2, atol=1e-3)


@gpu
def test_it_is_captured_in_a_cuda_graph():
    q, k, v = cuda(Hk=2, Sq=64, Sk=128, D=64, dtype=BF16)
    for options in ({}, {"is_causal": True}, {"window": (9, 3)}, {"mask": torch.ones(2, 128, device="cuda")}):
        attention(q, k, v, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(q, k, v, **options)
        q.normal_()
        graph.replay()
        torch.testing.assert_close(out, attention(q, k, v, **options))
