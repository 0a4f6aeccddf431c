"""What the tests of the documents' examples share."""

import pytest
import torch

import moe_aiter.compat.aiter as aiter


def there(*names):
    """Skip a test of names that the package does not have yet."""
    if missing := [name for name in names if not hasattr(aiter, name)]:
        pytest.skip(f"there is no {', '.join(missing)} yet")


def near(got, exact, rtol=None):
    """Close to a result in float64, relative to its norm."""
    rtol = rtol or {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}[got.dtype]
    assert got.shape == exact.shape
    assert (got.double() - exact).norm() <= rtol * exact.norm()
