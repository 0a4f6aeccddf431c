"""What the tests of several ops share."""

import pytest

from moe_aiter.config import interpret
from moe_aiter.kernels.base.host import ext
from moe_aiter.op import use

# the interpreter is slow, and the others were tested without it
BACKENDS = ["triton"] if interpret else ["torch", "host", "triton"]  # and Hopper's in test_hopper.py


@pytest.fixture(params=BACKENDS)
def backend(request, device):
    """Each implementation there is on this device, and for the `dtype` of the test if it has one, forced."""
    if request.param == "host" and ext is None:
        pytest.skip("the C++ extension is not built")
    with use(request.param):
        yield request.param
