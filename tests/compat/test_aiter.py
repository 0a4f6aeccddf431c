"""The examples of AITER's pages as they are printed, but for the import and the device."""

import pytest
import torch

from moe_aiter.compat import aiter

from ..references import gmm_reference, tgmm_reference


def on(device, code):
    """The names that `code` leaves, run on this device."""
    code = code.replace("'cuda'", repr(str(device)))
    names = {}
    exec(code, names)
    return names


GROUPED_GEMM = """
import torch
import moe_aiter.compat.aiter as aiter
# 4096 tokens, 512 hidden dim, 8 experts, top-2 routing
tokens = 4096
hidden = 512
num_experts = 8
output_dim = 2048
x = torch.randn(tokens, hidden, device='cuda', dtype=torch.float16)
expert_weights = torch.randn(num_experts, hidden, output_dim, device='cuda', dtype=torch.float16)
expert_ids = torch.randint(0, num_experts, (tokens, 2), device='cuda')
output = aiter.grouped_gemm(x, expert_weights, expert_ids)
"""

LAYER = """
import torch
import moe_aiter.compat.aiter as aiter

class OptimizedMoELayer:
    def __init__(self, hidden_dim, num_experts, expert_dim):
        self.hidden_dim = hidden_dim
        self.num_experts = num_experts
        self.expert_dim = expert_dim

        # Expert weights (all experts in one tensor)
        self.w1 = torch.randn(num_experts, hidden_dim, expert_dim, device='cuda', dtype=torch.float16)
        self.w2 = torch.randn(num_experts, expert_dim, hidden_dim, device='cuda', dtype=torch.float16)

    def forward(self, x, expert_ids, routing_weights):
        # x: (total_tokens, hidden_dim)
        # expert_ids: (total_tokens, top_k)
        # routing_weights: (total_tokens, top_k)

        x = x.unsqueeze(1).expand(-1, expert_ids.shape[1], -1)  # not in the page: a slot for each expert

        # First grouped GEMM
        hidden = aiter.grouped_gemm(x, self.w1, expert_ids)

        # Activation
        hidden = aiter.gelu(hidden)

        # Second grouped GEMM
        output = aiter.grouped_gemm(hidden, self.w2, expert_ids)

        # Apply routing weights
        output = output * routing_weights.unsqueeze(-1)

        return output.sum(dim=1)  # in the page `return output`
"""

GMM = """
import torch
from moe_aiter.compat.aiter.ops.triton.gmm import gmm

out = gmm(
    lhs,            # (M, K) — input activations
    rhs,            # (G, K, N) — per-group weights
    group_sizes,    # (G,) int32 — rows per group, must sum to M
    preferred_element_type=torch.bfloat16,
    bias=bias,      # (G, N) — optional per-group bias
)
# out: (M, N)
"""

PTGMM = """
from moe_aiter.compat.aiter.ops.triton.gmm import ptgmm, nptgmm

out = ptgmm(
    lhs,            # (K, M) — transposed input
    rhs,            # (M, N) — gradient from downstream
    group_sizes,    # (G,) int32
    bias_grad=bg,   # (G, K) float32 — optional bias gradient output
    accumulate=False, # accumulate into existing output
)
# out: (G, K, N)
"""


def test_grouped_gemm(device):
    names = on(device, GROUPED_GEMM)
    x, w, ids, output = (names[n] for n in ("x", "expert_weights", "expert_ids", "output"))
    assert output.shape == (4096, 2048) and output.dtype == torch.float16
    for t in (0, 1, 4095):
        expected = sum(x[t].double() @ w[e].double() for e in ids[t].tolist())
        torch.testing.assert_close(output[t].double(), expected, rtol=2e-3, atol=5e-2)


def test_layer(device):
    layer = on(device, LAYER)["OptimizedMoELayer"](64, 8, 96)
    x = torch.randn(50, 64, device=device, dtype=torch.float16)
    ids, weights = torch.randint(0, 8, (50, 2), device=device), torch.rand(50, 2, device=device).half()
    output = layer.forward(x, ids, weights)
    assert output.shape == (50, 64)
    gelu = torch.nn.functional.gelu
    w1, w2 = layer.w1.double(), layer.w2.double()
    expected = torch.stack(
        [
            sum(weights[t, j] * (gelu(x[t].double() @ w1[e]) @ w2[e]) for j, e in enumerate(ids[t].tolist()))
            for t in range(50)
        ]
    )
    assert (output.double() - expected).norm() < 2e-3 * expected.norm()


@pytest.fixture
def operands(device):
    M, K, N, G = 40, 24, 16, 3
    names = {"lhs": torch.randn(M, K), "rhs": torch.randn(G, K, N), "bias": torch.randn(G, N)}
    names = {name: t.to(device, torch.bfloat16) for name, t in names.items()}
    return names | {"group_sizes": torch.tensor([11, 0, 29], dtype=torch.int32, device=device)}


def test_gmm(operands):
    exec(GMM, operands)
    out = operands["out"]
    assert out.shape == (40, 16) and out.dtype == torch.bfloat16
    lhs, rhs, bias = (operands[n].double() for n in ("lhs", "rhs", "bias"))
    expected = gmm_reference(lhs, rhs, operands["group_sizes"], bias)
    assert (out.double() - expected).norm() < 5e-3 * expected.norm()


def test_ptgmm(operands):
    x, device = operands["lhs"], operands["lhs"].device
    operands |= {"lhs": x.T, "rhs": torch.randn(40, 16).to(x), "bg": torch.empty(3, 24, device=device)}
    exec(PTGMM, operands)
    out = operands["out"]
    sizes = operands["group_sizes"]
    expected = tgmm_reference(x.double(), operands["rhs"].double(), sizes, None, 1, False)
    assert out.shape == (3, 24, 16) and (out.double() - expected).norm() < 5e-3 * expected.norm()
    torch.testing.assert_close(operands["bg"][0], x[:11].float().sum(0))
    assert not operands["bg"][1].any()
    again = operands["nptgmm"](operands["lhs"], operands["rhs"], sizes)
    assert (again.double() - expected).norm() < 5e-3 * expected.norm()


def test_configurations_have_both_paths():
    from moe_aiter.compat.aiter.ops.triton import gmm
    from moe_aiter.compat.aiter.ops.triton._triton_kernels.gmm import get_config

    assert gmm.get_config is get_config
    assert get_config("gmm", 49152, 1408, 2048, 64)["BLOCK_SIZE_M"] >= 16


def test_sparse_gemm():
    """By the names and the order of AITER's page, with each of its patterns."""
    x, w = torch.randn(5, 8), torch.eye(8)[[1, 0, 2, 3, 3]]
    for pattern, weight in (("csr", w.to_sparse_csr()), ("coo", w.to_sparse_coo()), ("block", w)):
        out = aiter.sparse_gemm(x, weight, pattern)
        torch.testing.assert_close(out, x[:, [1, 0, 2, 3, 3]])
        assert torch.equal(aiter.sparse_gemm(input=x, weight=weight, sparsity_pattern=pattern), out)
