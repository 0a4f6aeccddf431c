"""Products of up to 16 rows: who has them, and Hopper's kernel for them at every tile."""

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.kernels import hopper
from moe_aiter.kernels.base.gemm_row import GemmInputs
from moe_aiter.kernels.dense import tuned_gemm
from moe_aiter.kernels.dense.gemm import gemm
from moe_aiter.op import IMPLS, ORDER, pick, use
from moe_aiter.tuning import choice
from moe_aiter.tuning.aiter_csv import GemmKey
from moe_aiter.tuning.candidates import HOPPER_TILES

from .test_gemm import CUDA, compare, make

PLAIN = 1.0, 0.0, None, False  # the rest of the inputs of a product


@pytest.fixture
def on_hopper(monkeypatch):
    """A GPU of which nothing was measured; meta tensors stand for what lies there."""
    monkeypatch.setattr(choice, "find_row", lambda table, names, key: None)
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setitem(ORDER, "meta", ("hopper", "triton", "torch"))


def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "M, N, K, dtype, backend",
    [
        (1, 1024, 4096, torch.bfloat16, "hopper"),
        (16, 1024, 4096, torch.float16, "hopper"),
        (17, 1024, 4096, torch.bfloat16, "torch"),
        (16, 1016, 4096, torch.bfloat16, "torch"),
        (16, 1024, 4096, torch.float32, "torch"),
        (16, 8192, 512, torch.bfloat16, "hopper"),
        (16, 16384, 504, torch.bfloat16, "torch"),
        (16, 50257, 4096, torch.bfloat16, "hopper"),
        (16, 4096, 4099, torch.bfloat16, "torch"),
    ],
)
@pytest.mark.no_interpreter
def test_long_weights_of_few_rows_are_hoppers(on_hopper, M, N, K, dtype, backend):
    x, weight, rest = new(M, K, dtype=dtype)[None], new(N, K, dtype=dtype)[None], (None, None, "gelu", *PLAIN)
    assert pick("gemm", GemmInputs(x, weight.mT, *rest)) is IMPLS["gemm"][backend]
    columns = new(K, N, dtype=dtype)[None]
    assert pick("gemm", GemmInputs(x, columns, *rest)) is IMPLS["gemm"]["torch"]
    problem = GemmKey(M, N, K, False, dtype, dtype, False, False)
    assert tuned_gemm.usual(problem, torch.device("meta")) == backend


def test_matrices_of_few_rows_may_lie_anywhere(on_hopper):
    """A token of each sequence, say, times the weight of its head; but 16 bytes are read at a time."""
    rest, weights = (None, None, "", *PLAIN), new(8, 1024, 1024)
    impls, x = IMPLS["gemm"], new(1, 8, 1024).transpose(0, 1)
    assert pick("gemm", GemmInputs(x, weights.mT, *rest)) is impls["hopper"]
    assert pick("gemm", GemmInputs(x, weights[:1].expand(8, -1, -1).mT, *rest)) is impls["hopper"]
    apart = new(8 * 1028)[: 8 * 1028].as_strided((8, 1, 1024), (1028, 1024, 1))
    assert pick("gemm", GemmInputs(apart, weights.mT, *rest)) is impls["torch"]


def test_elsewhere_they_are_torchs(on_hopper, monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: False)
    x, weight = new(1, 1, 4096), new(1, 4096, 4096)
    assert pick("gemm", GemmInputs(x, weight.mT, None, None, "", *PLAIN)) is IMPLS["gemm"]["torch"]
    problem = GemmKey(1, 4096, 4096, False, torch.bfloat16, torch.bfloat16, False, False)
    assert tuned_gemm.usual(problem, torch.device("meta")) == "torch"


@pytest.mark.gpu
@pytest.mark.parametrize("K", [8192, 8200])
def test_batches_of_few_rows(K):
    """With tails of a part of K, too."""
    if not hopper.is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    x, w, bias, c = make(CUDA, 3, K, 136, torch.float16, (5,))
    with use("hopper"):
        w = w.mT.contiguous().mT
        compare(x, w, bias, c, gradients=False, activation="silu", alpha=0.5, beta=2.0)
        turned = x[:, :1].transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(gemm(turned, w), gemm(x[:, :1].contiguous(), w))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", HOPPER_TILES["hopper_few_rows"], ids=str)
@pytest.mark.parametrize("M, K, N", [(1, 8, 8), (8, 1032, 4096), (16, 4096, 1000), (11, 520, 2121)])
def test_every_tile_of_few_rows(M, K, N, tile):
    """With NaN between the rows of both operands."""
    if not hopper.is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    x, w, bias, c = make(CUDA, M, K, N, torch.bfloat16)
    x, w = (torch.cat([t, torch.full_like(t, torch.nan)], 1)[:, :K] for t in (x, w.mT))
    with use("hopper"), tuning.choose(lambda key: tile if key.op == "hopper_few_rows" else None):
        compare(x, w.mT, gradients=False)
        compare(x, w.mT, bias, c, gradients=False, activation="gelu", alpha=0.5, beta=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("far", ["rows", "matrices of x", "matrices of w"])
def test_strides_of_few_rows_are_64_bit(most_of_the_gpu, far):
    """8 GiB from one to the next."""
    if not hopper.is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    K, long = 1032, 2**32
    B, row = (1, long) if far == "rows" else (2, 8192)
    x, w = (torch.randn(B, n, K).to(CUDA, torch.bfloat16) for n in (2, 8))
    near = w if far == "matrices of w" else x
    there = torch.empty(long + 8 * 8192, dtype=torch.bfloat16, device=CUDA).as_strided(
        near.shape, (long, row, 1)
    )
    there.copy_(near)
    with use("hopper"):
        expected = gemm(x, w.mT)
        found = gemm(x, there.mT) if near is w else gemm(there, w.mT)
    assert torch.equal(found, expected)
