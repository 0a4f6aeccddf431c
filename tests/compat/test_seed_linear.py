"""The examples of the page on linear layers on ROCm, but for the import and the device.

Two of them are not kept to the letter: the patched forward swallowed every exception, and the decoding
example's `is_causal=True` lets a query see the first key alone.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from moe_aiter.compat.aiter.ops.shuffle import shuffle_weight
from moe_aiter.compat.aiter.tuned_gemm import gemm_a16w16
from moe_aiter.layers.attention import attention

from .seeds import near

BF16 = torch.bfloat16
CSV = """\
cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw
304,64,4096,4096,0,bf16,bf16,0,0,ASM,0,0,10.2,asm_kernel,0.001,180.5,1200
304,128,4096,4096,0,bf16,bf16,0,0,hipBLASLt,3,0,18.1,hipblaslt_kernel,0.001,385.2,2100
"""


def test_tuned_gemm(device):
    weight = torch.randn(48, 64, device=device, dtype=BF16)
    bias = torch.randn(48, device=device, dtype=BF16)
    for shape in ((64,), (10, 64), (2, 5, 64), (0, 64)):
        x = torch.randn(shape, device=device, dtype=BF16)
        # x: [*, K] input, weight: [N, K] (nn.Linear layout)
        output = gemm_a16w16(x, weight, bias=None, otype=x.dtype)
        near(output, x.double() @ weight.double().T)
        output = gemm_a16w16(x, weight, bias=bias, otype=torch.float32)
        near(output, x.double() @ weight.double().T + bias.double())


PROGRAM = """
import torch
from moe_aiter.compat.aiter.tuned_gemm import gemm_a16w16

x, weight = (torch.randn(n, 4096, dtype=torch.bfloat16) for n in (64, 4096))
output = gemm_a16w16(x, weight, bias=None, otype=x.dtype)
exact = x.double() @ weight.double().T
assert (output.double() - exact).norm() < 1e-2 * exact.norm()
"""


def test_the_pages_table_is_taken_as_it_is(tmp_path):
    """Appended to a list of files, of which one is not there; none is written to."""
    table = tmp_path / "your" / "tuned_gemm.csv"
    table.parent.mkdir()
    table.write_text(CSV)
    paths = os.pathsep.join([str(tmp_path / "missing.csv"), str(table)])
    env = os.environ | {"AITER_CONFIG_GEMM_BF16": paths}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert table.read_text() == CSV


def test_monkey_patch(monkeypatch, device):
    _original_linear_forward = nn.Linear.forward
    routed = []

    def _patched_forward(self, x):
        if x.dtype in (torch.bfloat16, torch.float16) and self.weight.dtype == x.dtype:
            routed.append(x.dtype)
            return gemm_a16w16(x, self.weight, bias=self.bias, otype=x.dtype)
        return _original_linear_forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", _patched_forward)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).to(device)
    x = torch.randn(5, 64, device=device)
    best = model.double()(x.double())
    model.to(BF16)(x.to(BF16)).sum().backward()
    near(model(x.to(BF16)), best, 2e-2)
    assert routed == [BF16] * 4 and all(p.grad is not None for p in model.parameters())


def test_qkv_fusion(device):
    D, Dkv = 64, 16
    q_proj, k_proj, v_proj = (nn.Linear(D, n, bias=False, device=device) for n in (D, Dkv, Dkv))
    x = torch.randn(2, 5, D, device=device)
    # Fuse weights once at init time:
    fused_qkv_weight = torch.cat([q_proj.weight, k_proj.weight, v_proj.weight], dim=0)
    # At forward time:
    qkv = F.linear(x, fused_qkv_weight)  # single GEMM
    q, k, v = qkv.split([D, Dkv, Dkv], dim=-1)
    torch.testing.assert_close((q, k, v), (q_proj(x), k_proj(x), v_proj(x)), rtol=1e-4, atol=1e-5)


def test_gate_up_fusion(device):
    gate_proj, up_proj = (nn.Linear(64, 96, bias=False, device=device) for _ in range(2))
    x = torch.randn(5, 64, device=device)
    fused_gate_up_weight = torch.cat([gate_proj.weight, up_proj.weight], dim=0)
    gate_up = F.linear(x, fused_gate_up_weight)  # single GEMM
    gate, up = gate_up.chunk(2, dim=-1)
    expected = F.silu(gate_proj(x)) * up_proj(x)
    torch.testing.assert_close(F.silu(gate) * up, expected, rtol=1e-4, atol=1e-5)


def preshuffle_weights(model, require_multiple=256, layout=(16, 16)):
    """Pre-shuffle eligible Linear weights for aiter asm kernels."""
    count = 0
    for module in model.modules():
        if not isinstance(module, nn.Linear):
            continue
        w = module.weight
        if w.dtype != torch.bfloat16 or w.ndim != 2:
            continue
        n, k = w.shape
        if n % require_multiple != 0 or k % require_multiple != 0:
            continue
        if module.bias is not None:
            continue  # asm path needs bias=None (or use bias splitting)
        w_shuffled = shuffle_weight(w, layout=layout)
        module._preshuffled_weight = w_shuffled
        count += 1
    return count


def make_model(device):
    layers = nn.Linear(256, 512, bias=False), nn.Linear(512, 256), nn.Linear(256, 40, bias=False)
    return nn.Sequential(*layers).to(device, BF16).requires_grad_(False)


def test_preshuffle_weights(device):
    assert preshuffle_weights(make_model(device)) == 1


@pytest.mark.parametrize("m", [4, 100])
def test_m_threshold_gating(m, monkeypatch, device):
    M_THRESHOLD = 64
    shuffled = []

    def patched_forward(self, x):
        w = self.weight
        w_shuf = getattr(self, "_preshuffled_weight", None)
        if w_shuf is not None:
            m = x.numel() // x.shape[-1]  # total rows
            if m >= M_THRESHOLD:  # tune this threshold for your workload
                w = w_shuf
                shuffled.append(m)
        return gemm_a16w16(x, w, bias=self.bias, otype=x.dtype)

    model = make_model(device)
    preshuffle_weights(model)
    x = torch.randn(m, 256, device=device, dtype=BF16)
    best = x.double()
    for layer in model:
        best = F.linear(best, layer.weight.double(), None if layer.bias is None else layer.bias.double())
    monkeypatch.setattr(nn.Linear, "forward", patched_forward)
    near(model(x), best, 2e-2)
    assert shuffled == ([100] if m == 100 else [])


def test_bias_splitting(device):
    def linear_with_split_bias(x, weight, bias):
        out = gemm_a16w16(x, weight, bias=None, otype=x.dtype)
        if bias is not None:
            out = out + bias
        return out

    x, weight = (torch.randn(n, 64, device=device, dtype=BF16) for n in (10, 32))
    bias = torch.randn(32, device=device, dtype=BF16)
    near(linear_with_split_bias(x, weight, bias), x.double() @ weight.double().T + bias.double())
    near(linear_with_split_bias(x, weight, None), x.double() @ weight.double().T)


def test_flash_attention_by_torch_ops(device):
    q = torch.randn(2, 40, 8, 64, device=device, dtype=torch.float16)
    k, v = (torch.randn(2, 56, 2, 64, device=device, dtype=torch.float16) for _ in range(2))
    scale = 0.125
    for is_causal in (False, True):
        # Direct torch.ops path (compile-friendly, avoids graph breaks):
        output = torch.ops.moe_aiter.mha_fwd.default(
            q, k, v,
            dropout_p=0.0,
            softmax_scale=scale,
            is_causal=is_causal,
            window_size_left=-1,
            window_size_right=-1,
            return_softmax_lse=False,
            return_dropout_randval=False,
        )[0]  # fmt: skip
        heads_first = [t.double().transpose(1, 2) for t in (q, k, v)]
        shown = torch.ones(40, 56, device=device, dtype=torch.bool).tril(56 - 40) if is_causal else None
        best = F.scaled_dot_product_attention(*heads_first, shown, scale=scale, enable_gqa=True)
        near(output, best.transpose(1, 2))


def test_decoding_with_a_cache(device):
    query = torch.randn(2, 8, 1, 64, device=device)
    key, value = (torch.randn(2, 8, 33, 64, device=device) for _ in range(2))
    # instead of F.scaled_dot_product_attention(..., is_causal=True), which is attention to the first key
    out = attention(query, key, value, None, dropout_p=0.0, is_causal=True)
    best = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    near(out, best)


def test_shared_heads_need_no_repetition(device):
    query = torch.randn(2, 8, 9, 64, device=device)
    key, value = (torch.randn(2, 2, 9, 64, device=device) for _ in range(2))
    repeated = (t.double().repeat_interleave(4, 1) for t in (key, value))
    near(attention(query, key, value), F.scaled_dot_product_attention(query.double(), *repeated))
