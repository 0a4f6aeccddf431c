"""The examples of FlashInfer's page on SegmentGEMMWrapper, and the shapes of its own tests."""

import pytest
import torch

from moe_aiter.compat.flashinfer import SegmentGEMMWrapper
from moe_aiter.compat.flashinfer import gemm as gemm_module

CLOSE = {"rtol": 1e-3, "atol": 2e-3}  # as upstream's own tests: equality to the bit is nobody's
BATCHES = [(b, rows) for b in (1, 77, 199) for rows in (3, 10, 99) if b * rows <= 8192]


def allclose(a, b):
    return torch.allclose(a, b, **CLOSE)


def test_the_examples(device):
    # create a 1MB workspace buffer
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.int8, device=device)
    segment_gemm = SegmentGEMMWrapper(workspace_buffer)
    seq_lens = torch.tensor([1, 2, 3, 4], dtype=torch.int64, device=device)
    # create packed input tensor (10 = 1 + 2 + 3 + 4)
    x = torch.randn(10, 128, device=device, dtype=torch.float16)
    # create weight tensor with 4 weights, each with 128 input and 256 output channels, column major
    weights = torch.randn(4, 256, 128, device=device, dtype=torch.float16)
    # compute the segment GEMM
    y = segment_gemm.run(x, weights, 4, True, seg_lens=seq_lens)
    assert y.shape == torch.Size([10, 256])
    y_ref_0 = torch.matmul(x[:1], weights[0].t())
    assert allclose(y[:1], y_ref_0)
    y_ref_1 = torch.matmul(x[1:3], weights[1].t())
    assert allclose(y[1:3], y_ref_1)
    y_ref_2 = torch.matmul(x[3:6], weights[2].t())
    assert allclose(y[3:6], y_ref_2)
    y_ref_3 = torch.matmul(x[6:], weights[3].t())
    assert allclose(y[6:], y_ref_3)

    # another example with weight indices
    weight_indices = torch.tensor([0, 1, 0, 1], dtype=torch.int64, device=device)
    y = segment_gemm.run(x, weights, 4, True, seg_lens=seq_lens, weight_indices=weight_indices)
    assert y.shape == torch.Size([10, 256])
    y_ref_0 = torch.matmul(x[:1], weights[0].t())
    assert allclose(y[:1], y_ref_0)
    y_ref_1 = torch.matmul(x[1:3], weights[1].t())
    assert allclose(y[1:3], y_ref_1)
    y_ref_2 = torch.matmul(x[3:6], weights[0].t())
    assert allclose(y[3:6], y_ref_2)
    y_ref_3 = torch.matmul(x[6:], weights[1].t())
    assert allclose(y[6:], y_ref_3)


def test_the_module_has_it_as_well():
    assert gemm_module.SegmentGEMMWrapper is SegmentGEMMWrapper


def upstreams_test(batch_size, rows, d_in, d_out, use_weight_indices, column_major, backend, device):
    torch.manual_seed(42)
    segment_gemm = SegmentGEMMWrapper(torch.empty(1024, dtype=torch.int8, device=device), backend=backend)
    x = torch.randn(batch_size * rows, d_in, device=device).half()
    num_weights = min(1024, 2 * batch_size) if use_weight_indices else batch_size
    shape = (num_weights, d_out, d_in) if column_major else (num_weights, d_in, d_out)
    weights = torch.randn(shape, device=device).half()
    indices = torch.arange(batch_size, device=device) % num_weights if use_weight_indices else None
    seg_lens = torch.full((batch_size,), rows, dtype=torch.int64)  # on the CPU, as upstream's
    y = segment_gemm.run(x, weights, batch_size, column_major, seg_lens=seg_lens, weight_indices=indices)
    w = weights[:batch_size].mT if column_major else weights[:batch_size]
    expected = torch.matmul(x.float().view(batch_size, rows, d_in), w.float()).flatten(0, 1).half()
    torch.testing.assert_close(y, expected, **CLOSE)


@pytest.mark.parametrize("use_weight_indices", [False, True])
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("batch_size, rows", [(1, 10), (7, 3)])
def test_some_of_upstreams_shapes(batch_size, rows, column_major, use_weight_indices, device):
    upstreams_test(batch_size, rows, 128, 128, use_weight_indices, column_major, "auto", device)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
@pytest.mark.parametrize("use_weight_indices", [False, True])
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("d_in", [128, 1024, 4096])
@pytest.mark.parametrize("batch_size, rows", BATCHES)
@pytest.mark.pairwise
def test_upstreams_shapes(batch_size, rows, d_in, column_major, use_weight_indices, backend):
    for d_out in (128, 1024, 4096):
        upstreams_test(batch_size, rows, d_in, d_out, use_weight_indices, column_major, backend, "cuda")
