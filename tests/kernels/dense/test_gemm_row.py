"""Products of one row without tensor cores: who has them, and what they are at every tile."""

import pytest
import torch

from moe_aiter import tuning
from moe_aiter.kernels import dense, hopper
from moe_aiter.kernels.base import gemm_row
from moe_aiter.kernels.base.gemm_row import BUSY, GemmInputs, takes_row
from moe_aiter.kernels.dense.gemm import gemm
from moe_aiter.op import IMPLS, ORDER, use
from moe_aiter.tuning import Config
from moe_aiter.tuning.candidates import PORTABLE

from .test_gemm import CUDA, DTYPES, compare, make


def enough(device):
    """Columns, of which no tile is a divisor."""
    return BUSY * gemm_row.num_programs(torch.empty(0, device=device)) + 5


@pytest.fixture
def launched(monkeypatch, device):
    """How many products had one row, of those of the portable kernel; the interpreter has few programs."""
    calls = []
    if device.type == "cpu":
        monkeypatch.setattr(gemm_row, "num_programs", lambda x: 4)
    bind = dense.gemm.bind_one_row
    monkeypatch.setattr(dense.gemm, "bind_one_row", lambda *args: calls.append(1) or bind(*args))
    return calls


def apart(t, by=1):
    """The same numbers, with NaN between the rows."""
    return torch.cat([t, torch.full_like(t, torch.nan)[..., :by]], -1)[..., : t.shape[-1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [0, 1, 40, 77])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.pairwise
def test_one_row(device, launched, dtype, K, batch):
    backend = "triton" if "triton" in ORDER[device.type] else "torch"
    x, w, bias, c = make(device, 1, K, enough(device), dtype, batch)
    w = w.mT.contiguous()
    with use(backend):
        compare(x, w.mT, gradients=False)
        compare(x, w.mT, bias, c, activation="gelu", alpha=0.5, beta=2.0)
        compare(apart(x, 8), apart(w, 8).mT, bias, gradients=False, activation="silu")
        compare(apart(x), apart(w).mT, None, c, gradients=False, beta=1.0)
    assert backend == "torch" or K < 2 or len(launched) >= 4


def test_other_products_are_not_of_one_row():
    N = enough("meta")

    def takes(B=1, M=1, K=64, N=N, rows=True, config=None):
        x, w = torch.empty(B, M, K, device="meta"), torch.empty(B, N, K, device="meta")
        return takes_row(x, w.mT if rows else w.mT.contiguous(), config)

    assert takes() and takes(B=100, N=8) and takes(config=Config(1, 1, 2048))
    assert not takes(M=2) and not takes(N=N - 6) and not takes(rows=False) and not takes(B=2**16)
    assert not takes(config=Config(16, 64, 64)) and not takes(K=2**31 - 2**16)
    x, w = torch.empty(1, 64, 1, device="meta").mT, torch.empty(1, N, 64, device="meta").mT
    assert takes_row(x, w, None) and not takes_row(x.expand(1, 1, 64)[..., ::2], w[:, ::2], None)


@pytest.mark.parametrize("M, rows", [(2, True), (1, False)])
def test_a_tile_of_one_row_is_no_other_products(device, M, rows):
    """A row of a user's file may name it for what it is not for."""
    impl = IMPLS["gemm"]["triton"]
    if "triton" not in ORDER[device.type]:
        pytest.skip("no Triton")
    x, w, _, _ = make(device, M, 64, 800, torch.float16)
    w = w.mT.contiguous().mT if rows else w
    on_hopper = hopper.is_hopper(device)
    for bind in (impl, IMPLS["gemm"]["hopper"]) if on_hopper else (impl,):
        out = torch.full((1, M, 800), torch.nan, dtype=x.dtype, device=device)
        i = GemmInputs(x[None], w[None], None, None, "", 1.0, 0.0, None, False)
        bind(i, config=Config(1, 1, 2048))((out, out[:0]), i)
        torch.testing.assert_close(out[0], x @ w, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", PORTABLE["gemm_row"], ids=str)
@pytest.mark.parametrize("K", [1000, 4104, 5003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_tile(tile, K, dtype):
    x, w, bias, c = make(CUDA, 1, K, enough(CUDA), dtype)
    x, w = apart(x, 8 - K % 8), apart(w.mT, 8 - K % 8)
    assert takes_row(x[None], w.mT[None], tile)
    with use("triton"), tuning.choose(lambda key: tile if key.op == "gemm_row" else None):
        compare(x, w.mT, gradients=False)
        compare(x, w.mT, bias, c, gradients=False, activation="gelu", alpha=0.5, beta=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_it_is_what_long_rows_are_multiplied_by(backend, monkeypatch):
    """On Hopper, where K is short, few rows are faster."""
    if backend == "hopper" and not hopper.is_hopper(CUDA):
        pytest.skip("no Hopper GPU")
    room = dense.gemm if backend == "triton" else pytest.importorskip("moe_aiter.kernels.hopper.gemm")
    calls = []
    monkeypatch.setattr(room, "bind_one_row", lambda *args: calls.append(1) or gemm_row.bind_one_row(*args))
    for K in (1032, 1024):
        x, w, bias, _ = make(CUDA, 1, K, enough(CUDA) + 3, torch.bfloat16)
        w = w.mT.contiguous().mT
        with use(backend):
            compare(x, w, bias, gradients=False)
    assert len(calls) == (1 if backend == "hopper" else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("far", ["rows", "matrices"])
def test_strides_are_64_bit(most_of_the_gpu, far):
    """The last of them is more than 2**32 numbers from the first."""
    many = max(enough(CUDA), 1056)
    K, (B, n) = 72, (1, many) if far == "rows" else (many, 8)
    x, w = torch.randn(B, 1, K).to(CUDA, torch.bfloat16), torch.randn(B, n, K).to(CUDA, torch.bfloat16)
    step = 2**22
    memory = torch.empty(many * step, dtype=torch.bfloat16, device=CUDA)
    there = memory.as_strided(w.shape, (step, K, 1) if far == "matrices" else (0, step, 1))
    there.copy_(w)
    assert takes_row(x, there.mT, None)
    with use("triton"):
        assert torch.equal(gemm(x, there.mT), gemm(x, w.mT))
