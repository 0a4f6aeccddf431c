"""A NaN or infinity of one row stays in that row, on CPUs whose products of 16 bits read behind rows."""

import pytest
import torch
import torch.nn.functional as F
from check import error

import moe_aiter
from moe_aiter import private_api
from moe_aiter.kernels.base.check import STEP
from moe_aiter.kernels.base.check import linear as linear_apart
from moe_aiter.kernels.dense.tuned_gemm import tuned_gemm

pytestmark = pytest.mark.no_interpreter
WIDTHS = [(1, 1), (7, 33), (33, 7), (32, 40), (100, 100), (66, 64)]


def reading_on(product):
    """`product` as on a CPU with AMX: what lies behind a row, up to a multiple of 32, is multiplied by 0."""

    def multiply(*args, **kwargs):
        out = product(*args, **kwargs)
        x = args[1] if product.__name__ in ("addmm", "baddbmm") else args[0]
        rest = -x.shape[-1] % STEP
        if x.itemsize == 2 and x.dim() > 1 and x.stride(-1) == 1 and rest:
            rows = x.reshape(-1, x.shape[-1])
            behind = F.pad(rows.flatten(), (0, rest))
            starts = torch.arange(1, len(rows) + 1) * rows.shape[1]
            read = behind[starts[:, None] + torch.arange(rest)]  # (rows, rest)
            spoilt = (read * 0).sum(1, keepdim=True).reshape(*x.shape[:-1], 1)
            with torch.no_grad():
                out += spoilt.to(out.dtype)
        return out

    return multiply


@pytest.fixture
def amx(monkeypatch):
    """Products that read on, unless this CPU has them."""
    if not private_api.AMX:
        for name in ("mm", "addmm", "bmm", "baddbmm", "matmul"):
            monkeypatch.setattr(torch, name, reading_on(getattr(torch, name)))
        monkeypatch.setattr(torch.Tensor, "__matmul__", reading_on(torch.Tensor.__matmul__))
        monkeypatch.setattr(F, "linear", reading_on(F.linear))
    monkeypatch.setattr(private_api, "AMX", True)
    monkeypatch.setitem(private_api.FAST, torch.bfloat16, True)


def layers_of(H, inner):
    """Functions (34, H) -> (34, ...) by name, with weights that are drawn."""
    dtype = torch.bfloat16
    w = torch.randn(3, H, inner).to(dtype)
    ids, weights = torch.randint(3, (34, 2)), torch.rand(34, 2)
    moe = moe_aiter.MoE(H, inner, 4, 2, shared_intermediate=inner, shared_gate=True, latent=17, dtype=dtype)
    optimized = moe_aiter.OptimizedMoELayer(H, 3, inner, dtype=dtype, device="cpu")
    adapted = moe_aiter.MoE(H, inner, 4, 2, dtype=dtype)
    adapted.experts = moe_aiter.LoRAExperts(adapted.experts, rank=3)
    blocks = torch.randn(inner, H).to(dtype).to_sparse_bsr((inner, H))
    layer = moe_aiter.LoRALinear(torch.nn.Linear(H, inner, dtype=dtype), rank=4)
    factors = moe_aiter.LoRALinear(torch.nn.Linear(H, inner, dtype=dtype), rank=4).lora
    torch.nn.init.normal_(factors.B)
    lens = torch.tensor([10, 0, 24])
    return {
        "MoE": moe,
        "OptimizedMoELayer": lambda x: optimized(x, ids, weights),
        "adapters": lambda x: factors(x, torch.tensor([34])),
        "gmm": lambda x: moe_aiter.gmm(x, w, lens, trans_rhs=False),
        "segment_gmm": lambda x: moe_aiter.segment_gmm(x, w, lens=lens),
        "grouped_gemm": lambda x: moe_aiter.grouped_gemm(x, w, ids),
        "LoRALinear": layer,
        "LoRAExperts": adapted,
        "sparse_gemm": lambda x: moe_aiter.sparse_gemm(x, blocks),
        "gemm with a bias of float32": lambda x: moe_aiter.gemm(x, w[0], torch.ones(inner)),
        "gemm": lambda x: moe_aiter.gemm(x, w[0]),
        "batched gemm": lambda x: moe_aiter.gemm(x.expand(3, -1, -1), w).transpose(0, 1),
        "tuned_gemm": lambda x: tuned_gemm(x, w[0].T.contiguous()),
    }


def alike(got, want):
    """Equal but for the roundings of another number of rows, as the other token chooses other experts."""
    return got.isfinite().all() and error(got, want) < 2e-2


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_other_rows_keep_their_numbers(amx, widths, value):
    for name, layer in layers_of(*widths).items():
        x = torch.randn(34, widths[0]).bfloat16()
        clean = layer(x)
        spoilt = x.clone()
        spoilt[[3, 20]] = value
        others = (torch.arange(34) != 3) & (torch.arange(34) != 20)
        assert alike(layer(spoilt)[others], clean[others]), name
        assert clean.isfinite().all(), name


def test_gradients_of_other_rows_keep_their_numbers(amx):
    for name, layer in layers_of(33, 41).items():
        x = torch.randn(34, 33).bfloat16()
        spoilt = x.clone()
        spoilt[5] = float("nan")
        grads = []
        for t in (x, spoilt):
            leaf = t.requires_grad_()
            out = layer(leaf)
            grads.append(torch.autograd.grad(out, leaf, torch.ones_like(out))[0])
        others = torch.arange(34) != 5
        assert alike(grads[1][others], grads[0][others]), name


def test_padding_rows_are_finite_whatever_memory_held(amx, monkeypatch):
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        out = new_empty(self, *args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    for name, layer in layers_of(7, 33).items():
        x = torch.randn(34, 7).bfloat16().requires_grad_()
        out = layer(x)
        assert out.isfinite().all(), name
        assert torch.autograd.grad(out.sum(), x)[0].isfinite().all(), name


@pytest.mark.parametrize("shape, width", [((0,), 2), ((3, 0), 2), ((0, 4), 3), ((2, 0, 5), 1)], ids=str)
def test_gradients_of_empty_operands(monkeypatch, shape, width):
    monkeypatch.setattr(private_api, "AMX", True)
    x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(width, shape[-1], dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(width, dtype=torch.bfloat16, requires_grad=True)
    grads = [
        torch.autograd.grad(fn(x, w, bias).float().sum(), (x, w, bias)) for fn in (linear_apart, F.linear)
    ]
    for got, want in zip(*grads, strict=True):
        assert torch.equal(got, want)
