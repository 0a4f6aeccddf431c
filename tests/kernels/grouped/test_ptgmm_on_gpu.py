"""The grouped products at the sizes of models, past 2^31 elements, and in a CUDA graph."""

import pytest
import torch

from moe_aiter.kernels.grouped.gmm import gmm
from moe_aiter.kernels.grouped.grouped_gemm import grouped_gemm
from moe_aiter.kernels.grouped.ptgmm import nptgmm, ptgmm

from ...references import gmm_reference, group_sum_reference, tgmm_reference

pytestmark = pytest.mark.gpu
LARGE = [  # M, K, N, G
    (512, 4096, 2048, 160),
    (49152, 1408, 2048, 64),
    (32768, 6144, 16384, 8),
    (267424, 1280, 2560, 32),
    (267424, 1280, 2560, 17),
    (267424, 1280, 2560, 13),
]


def make(shape, sizes=None):
    """x (M, K), w (G, K, N), dout (M, N), bias (G, N) and the group sizes, even unless given."""
    M, K, N, G = shape
    sizes = [M // G + (g < M % G) for g in range(G)] if sizes is None else sizes
    shapes = (M, K), (G, K, N), (M, N), (G, N)
    x, w, dout, bias = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    return x, w.mul_(K**-0.5), dout, bias, torch.tensor(sizes, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_shapes_of_models(shape, seed, most_of_the_gpu):
    """AITER's, bfloat16, by cuBLAS group by group; the first with even groups, the others uneven."""
    torch.manual_seed(seed)
    x, w, dout, bias, sizes = make(shape)
    if seed:
        chosen = torch.randint(0, shape[3], (shape[0],), device="cuda")
        sizes = torch.bincount(chosen[chosen % 7 > 0], minlength=shape[3]).int()  # some empty, some rows left
    close = {"rtol": 1e-2, "atol": 5e-3}
    for rhs in (w, w.mT.contiguous().mT):
        torch.testing.assert_close(gmm(x, rhs, sizes), gmm_reference(x, rhs, sizes, None), **close)
        out = gmm(x, rhs, sizes, bias=bias)
        torch.testing.assert_close(out, gmm_reference(x, rhs, sizes, bias), rtol=2e-2, atol=2e-2)
    expected = tgmm_reference(x, dout, sizes, None, 1, False)
    bias_grad = torch.empty(shape[3], shape[1], device="cuda")
    for variant in (ptgmm, nptgmm):
        for lhs in (x.T, x.T.contiguous()):
            torch.testing.assert_close(variant(lhs, dout, sizes, bias_grad=bias_grad), expected, **close)
            exact = group_sum_reference(x, sizes, None, 1, None)
            torch.testing.assert_close(bias_grad, exact, rtol=1e-3, atol=1e-2)


def test_more_than_two_to_the_31_elements(most_of_the_gpu):
    """3145728 x 2048 -> 1408 with 8 groups: the last rows of lhs and of the result are past 2^31."""
    M, K, N, G = 3145728, 2048, 1408, 8
    if torch.cuda.get_device_properties(0).total_memory < 70e9:
        pytest.skip("takes 60 GB")
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(G, K, N, device="cuda", dtype=torch.bfloat16) / K**0.5
    sizes = torch.full((G,), M // G, dtype=torch.int32, device="cuda")
    out = gmm(x, w, sizes)
    close = {"rtol": 1e-2, "atol": 5e-3}
    torch.testing.assert_close(out[-1000:], x[-1000:] @ w[-1], **close)
    last = M - M // G
    expected = x[last:].T @ out[last:]
    for variant in (ptgmm, nptgmm):
        torch.testing.assert_close(variant(x.T, out, sizes)[-1], expected, rtol=2e-2, atol=1)
    x = x.T.contiguous()
    torch.testing.assert_close(ptgmm(x, out, sizes)[-1], expected, rtol=2e-2, atol=1)


def test_one_row_repeated():
    """A stride of 0, as the gradient of a sum has it, in copies of whole tiles."""
    x, w, dout, _, sizes = make((300, 64, 128, 4), [100, 0, 150, 50])
    x, dout = x[:1].expand_as(x), dout[:1].expand_as(dout)
    torch.testing.assert_close(gmm(x, w, sizes), gmm(x.contiguous(), w, sizes), rtol=0, atol=0)
    expected = ptgmm(x.contiguous().T, dout.contiguous(), sizes)
    torch.testing.assert_close(ptgmm(x.T, dout, sizes), expected, rtol=0, atol=0)


def test_a_cuda_graph_takes_other_groups(no_debug):
    x, w, dout, bias, sizes = make((300, 64, 128, 4), [100, 0, 150, 50])
    ids, bias_grad = torch.randint(0, 4, (300, 2), device="cuda"), torch.empty(4, 64, device="cuda")

    def run():
        dw = ptgmm(x.T, dout, sizes, bias_grad=bias_grad)
        return gmm(x, w, sizes, bias=bias), dw, bias_grad, grouped_gemm(x, w, ids)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for seed in range(2):
        torch.manual_seed(seed)
        ids.random_(0, 4)
        sizes.copy_(torch.bincount(ids[:, 0], minlength=4))
        graph.replay()
        got = [t.clone() for t in results]
        assert all(torch.equal(a, b) for a, b in zip(got, run(), strict=True))
