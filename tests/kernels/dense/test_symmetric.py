"""Products that are symmetric: as the whole product, equal to their transposes to the bit, on any tile."""

import pytest
import torch
from check import error

from moe_aiter.config import interpret
from moe_aiter.kernels.dense.symmetric import (
    SymmetricInputs,
    bind_symmetric,
    symmetric_product,
    symmetric_reference,
)
from moe_aiter.op import use
from moe_aiter.tuning import Config

pytestmark = pytest.mark.no_host
SIZES = [(2, 1, 1), (3, 5, 7), (1, 130, 40), (2, 64, 129), (0, 4, 3), (2, 16, 0), (2, 0, 4)]
TILES = [Config(16, 16, 16), Config(32, 32, 16), Config(64, 64, 32)]
EPILOGUES = [(1.0, 0.0, 0.0), (2.0315, -4.775, 3.4445)]


def operands(size, dtype, device, gram, columns):
    """x, w and c; of two symmetric matrices that commute where x is not to be multiplied by its transpose."""
    B, N, K = size
    x = torch.randn(B, K, N, device=device, dtype=dtype).mT if columns else torch.randn(size, device=device)
    x = x.to(dtype)
    if not gram:
        x = (x @ x.mT / max(K, 1)).to(dtype)
    c = torch.randn(B, N, 2 * N, device=device).to(dtype)[..., ::2]
    c = (c + c.mT).mT
    return x, x.mT if gram else x.float().matmul(x.float()).to(dtype).mT, c


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("gram, columns", [(True, False), (True, True), (False, False)])
def test_as_the_whole_product(backend, device, size, dtype, gram, columns):
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the reference's alone")
    x, w, c = operands(size, dtype, device, gram, columns)
    for (alpha, beta, gamma), added in zip(EPILOGUES, (None, c), strict=True):
        how = {"alpha": alpha, "beta": beta, "gamma": gamma}
        with use(backend):
            got = symmetric_product(x, w, added, **how)
            again = symmetric_product(x, w, added, **how)
        exact = alpha * x.double() @ w.double() + beta * c.double()
        exact.diagonal(dim1=1, dim2=2).add_(gamma)
        assert got.dtype == dtype and torch.equal(got, got.mT) and torch.equal(got, again)
        bound = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5)
        assert error(got, exact) < bound


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("size", [(2, 100, 33), (1, 15, 20), (1, 161, 16)], ids=str)
def test_every_tile_of_the_triangle(device, tile, size):
    if device.type == "cpu" and not interpret:
        pytest.skip("nothing here runs Triton")
    x, w, c = operands(size, torch.float16, device, True, False)
    i = SymmetricInputs(x, w, c, 0.5, 2.0, -1.0)
    out = x.new_full((size[0], size[1], size[1]), float("nan"))
    bind_symmetric(i, tile)(out, i)
    assert torch.equal(out, out.mT) and error(out, symmetric_reference(i)) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(3, 256, 512), (2, 1024, 320), (2, 768, 2048), (1, 1032, 264)], ids=str)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_whole_tiles(size, columns, dtype):
    """With descriptors, on a GPU that has them."""
    device = torch.device("cuda")
    x, w, c = operands(size, dtype, device, True, columns)
    i = SymmetricInputs(x, w, c, 0.5, 2.0, -1.0)
    with use("triton"):
        out = symmetric_product(x, w, c, alpha=0.5, beta=2.0, gamma=-1.0)
    exact = symmetric_reference(i._replace(x=x.double(), w=w.double(), c=c.double()))
    assert torch.equal(out, out.mT) and error(out, exact) < (1e-3 if dtype == torch.float16 else 6e-3)


def test_what_does_not_fit_is_refused():
    x = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match=r"x is \(B, N=3, K\) but w is \(B, K, N=5\)"):
        symmetric_product(x, torch.ones(2, 4, 5))
    with pytest.raises(ValueError, match="c is"):
        symmetric_product(x, x.mT, torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match="alpha is 0"):
        symmetric_product(x, x.mT, alpha=0.0)
    with pytest.raises(TypeError):
        symmetric_product(x, x.mT.half())
