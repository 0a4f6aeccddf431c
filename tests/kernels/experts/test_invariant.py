"""Portable kernels give a token the same bits in any batch: interpreted in float32, or on a GPU."""

import pytest
import torch
from same_bits import differences, results

from moe_aiter import tuning
from moe_aiter.config import interpret
from moe_aiter.invariance import invariant
from moe_aiter.kernels.experts.down import bias_dots
from moe_aiter.kernels.experts.mlp import expert_mlp
from moe_aiter.kernels.rows.sort import sort_by_expert
from moe_aiter.op import use
from moe_aiter.tuning import Config

pytestmark = pytest.mark.no_host
E, H, INNER, K, ALL = 4, 520, 136, 2, 70  # three blocks of columns
OPTIONS = {
    "plain": {"activation": "gelu"},
    "three chunks, z twice": {"row_chunks": 3, "recompute": "z"},
    "gpt-oss": {"activation": "swiglu_oai", "interleaved": True, "row_chunks": 2},
}


@pytest.fixture(autouse=True)
def portable(device):
    if device.type == "cpu" and not interpret:
        pytest.skip("portable kernels need a GPU or the interpreter")
    with use("triton"), invariant(), tuning.choose(tile if interpret else lambda key: None):
        yield


def tile(key):
    """Other tiles for few rows of a group, as on a GPU."""
    return Config(16, 128 if key.rows >= 64 else 32, 128)


@pytest.mark.parametrize("dtype", [torch.float16] if interpret else [torch.bfloat16, torch.float16], ids=str)
def test_a_wide_bias_has_the_bits_of_its_numbers(device, dtype):
    """Beside guests, biases of 16 bits are wide; the gradient of routing weights is the same."""
    dout, bias = torch.randn(300, H).to(device, dtype), torch.randn(E, H).to(device, dtype)
    _, rank, sizes = sort_by_expert(torch.rand(300, E, device=device).argsort(1)[:, :K], E)
    dots = bias_dots(dout, bias, rank, sizes)
    assert torch.equal(bias_dots(dout, bias.float(), rank, sizes), dots)
    wide = bias.float() * 1.001
    got, exact = bias_dots(dout, wide, rank, sizes), dout.double() @ wide.double().T
    own = torch.searchsorted(sizes.cumsum(0), rank.long(), right=True)
    torch.testing.assert_close(got.double(), exact.gather(1, own), rtol=1e-4, atol=1e-3)
    for other in (dout.float(), dout.double()):  # and of wide tokens
        torch.testing.assert_close(bias_dots(other, bias, rank, sizes).float(), dots, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_experts(device, options):
    parts = 1 if options.get("activation") == "gelu" else 2
    shapes = (E, parts * INNER, H), (E, H, INNER), (E, parts * INNER)
    gate_up, down, bias = (torch.randn(shape, device=device) * shape[-1] ** -0.5 for shape in shapes)
    bias = bias if "interleaved" in options else None

    def layer(x, weights, ids):
        plan = sort_by_expert(ids, E)
        return expert_mlp(x, gate_up, down, weights, plan, **options, gate_up_bias=bias)

    x, weights = torch.randn(ALL, H, device=device), torch.rand(ALL, K, device=device)
    ids = torch.rand(ALL, E, device=device).argsort(1)[:, :K]
    ids[::5, 1] = -1
    leaves = x.requires_grad_(), weights.requires_grad_(), ids
    dout = torch.randn(ALL, H, device=device)
    whole = results(layer, leaves, dout, torch.arange(ALL, device=device))
    for T in (1, 7, 32):
        tokens = torch.randperm(ALL, device=device)[:T]
        for gradient in (dout, None):
            assert not differences(results(layer, leaves, gradient, tokens), whole, tokens), T
