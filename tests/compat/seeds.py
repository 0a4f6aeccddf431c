"""What the tests of the documents' examples share."""

import torch


def near(got, exact, rtol=None):
    """Close to a result in float64, relative to its norm."""
    rtol = rtol or {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}[got.dtype]
    assert got.shape == exact.shape
    assert (got.double() - exact).norm() <= rtol * exact.norm()
